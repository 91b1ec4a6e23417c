"""The systems that are compared, as literal tables, and the splits that each of them could be run with.

All share one simulator, one engine model and one staleness bound; they differ in what the tables say. A
published system is its scheduling rules here, not its code: docs/tide.md says what each one leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.errors import ConfigError, nearest
from cluster.sim.profile import Profile
from cluster.sim.scenario import PolicyConfig, Split

BOUND = -1
"""``max_lag`` of a row that takes the workload's bound."""

POLICIES: dict[str, PolicyConfig] = {
    policy.name: policy
    for policy in (
        # verl, colocated: every rank generates, then every rank trains; the reference once per batch.
        PolicyConfig(
            name="sync", rollout="sync", admission="request", scoring="full_batch", roles="static", max_lag=0,
        ),
        # The next batch is generated while this one is trained, on ranks of their own.
        PolicyConfig(
            name="one_step_off", rollout="one_step_off", admission="request", scoring="full_batch",
            roles="static", max_lag=1,
        ),
        # StreamRL: micro-batches are trained as they arrive; the reference shares the learners' ranks, so it
        # is swapped per micro-batch (or once a batch, whichever tunes better: see SCORINGS).
        PolicyConfig(
            name="stream", rollout="stream", admission="request", scoring="thrash", roles="static",
            max_lag=BOUND,
        ),
        # AReaL: admission by the capacity rule; a sync interrupts requests, which are computed again.
        PolicyConfig(
            name="areal", rollout="stream", admission="request", scoring="full_batch", roles="static",
            max_lag=BOUND, kv_on_sync="recompute",
        ),
        # prime-rl: as above, with a cap on what is in flight that follows KV pressure.
        PolicyConfig(
            name="aimd", rollout="stream", admission="aimd", scoring="full_batch", roles="static",
            max_lag=BOUND,
        ),
        # verl, dynamic scheduling: learner ranks are lent to generation while their buffer fills.
        PolicyConfig(
            name="lending", rollout="stream", admission="request", scoring="full_batch", roles="lending",
            max_lag=BOUND,
        ),
        PolicyConfig(
            name="tide", rollout="stream", admission="task", scoring="auto", roles="elastic", max_lag=BOUND,
        ),
        # The ladder from ``stream`` to ``tide`` ...
        PolicyConfig(
            name="stream_pipelining", rollout="stream", admission="request", scoring="auto", roles="static",
            max_lag=BOUND,
        ),
        PolicyConfig(
            name="stream_pipelining_elastic", rollout="stream", admission="request", scoring="auto",
            roles="elastic", max_lag=BOUND,
        ),
        # ... and ``tide`` without one of the three.
        PolicyConfig(
            name="tide_no_admission", rollout="stream", admission="request", scoring="auto", roles="elastic",
            max_lag=BOUND,
        ),
        PolicyConfig(
            name="tide_no_pipelining", rollout="stream", admission="task", scoring="full_batch",
            roles="elastic", max_lag=BOUND,
        ),
        PolicyConfig(
            name="tide_no_elastic", rollout="stream", admission="task", scoring="auto", roles="static",
            max_lag=BOUND,
        ),
    )
}  # fmt: skip

ASYNC = ("one_step_off", "stream", "areal", "aimd", "lending")
"""The asynchronous baselines, among which the best tuned one is sought."""
STATIC = ("one_step_off", "stream", "areal", "aimd", "tide_no_elastic")
"""Systems whose split never changes: the best of them, on waiting, is what elasticity is measured against."""
LADDER = (
    ("stream", "base: streaming, fixed split"),
    ("stream_pipelining", "+ scorer-actor pipelining"),
    ("stream_pipelining_elastic", "+ elastic ranks"),
    ("tide", "+ task batching"),
)
LEAVE_ONE_OUT = (
    ("tide_no_admission", "without task batching"),
    ("tide_no_pipelining", "without pipelining"),
    ("tide_no_elastic", "without elastic ranks"),
)
SCORINGS: dict[str, tuple[str, ...]] = {"stream": ("thrash", "full_batch")}
"""Ways of scoring that a policy is tuned over, if it has a choice."""


def policy(name: str, max_lag: int = 2) -> PolicyConfig:
    """A policy of the table, under the bound ``max_lag``. Raises ConfigError naming the nearest one."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}{nearest(name, POLICIES)}")
    found = POLICIES[name]
    return replace(found, max_lag=max_lag if found.max_lag == BOUND else min(found.max_lag, max_lag))


@dataclass(frozen=True)
class Candidate:
    """One way to run a policy: its row (the scoring may differ) and its split."""

    policy: PolicyConfig
    split: Split


def scorer_share(profile: Profile) -> float:
    """Share of the training ranks that scoring needs for both stages of the pipeline to take as long."""
    if profile.scorer.passes == 0:
        return 0.0
    score = profile.scorer.passes / profile.scorer.forward_tok_s
    train = 1 / profile.learner.forward_tok_s + 1 / profile.learner.backward_tok_s
    return score / (score + train)


def split_for(
    found: PolicyConfig, profile: Profile, ranks: int, generators: int, scorers: bool = True
) -> Split:
    """The split of ``ranks`` with ``generators``, and with scorers of their own if the policy can use them.

    ``scorers`` false: without any, where the policy can do without.
    """
    if found.rollout == "sync":
        return Split(generators=ranks, learners=ranks)  # the same ranks, in turn
    trainers = ranks - generators
    count = 0
    wanted = found.scoring == "decoupled" or (found.scoring == "auto" and scorers)
    if wanted and profile.scorer.passes and trainers > 1:
        count = min(trainers - 1, max(1, round(trainers * scorer_share(profile))))
    return Split(generators=generators, learners=trainers - count, scorers=count)


def ways(found: PolicyConfig, profile: Profile) -> list[PolicyConfig]:
    """The policy with each way of scoring that it may choose from."""
    names = SCORINGS.get(found.name, (found.scoring,)) if profile.scorer.passes else (found.scoring,)
    return [replace(found, scoring=name) for name in names]  # type: ignore[arg-type]


def scan(found: PolicyConfig, profile: Profile, ranks: int, counts: Sequence[int] = ()) -> list[Candidate]:
    """Splits to begin a search with: so many generators (default: eighths of the ranks), each in every way.

    For ``sync`` the one split that there is.
    """
    if found.rollout == "sync":
        return [Candidate(found, split_for(found, profile, ranks, ranks))]
    chosen = sorted({_inside(n, ranks) for n in counts or [round(ranks * part / 8) for part in range(1, 8)]})
    rows = ways(found, profile)
    splits = [
        (row, split_for(row, profile, ranks, n, own)) for row in rows for n in chosen for own in (True, False)
    ]
    return [Candidate(row, split) for row, split in dict.fromkeys(splits)]


def around(best: Candidate, profile: Profile, ranks: int, stride: int, scorers: bool) -> list[Candidate]:
    """``stride`` generators more or less; with ``scorers`` also one scorer more or less."""
    if best.policy.rollout == "sync":
        return []
    middle, row = best.split.generators, best.policy
    counts = sorted({_inside(middle + step, ranks) for step in (-stride, stride)} - {middle})
    own = best.split.scorers > 0
    splits = [split_for(row, profile, ranks, count, own) for count in counts]
    if scorers and best.split.scorers:
        for count in (best.split.scorers - 1, best.split.scorers + 1):
            learners = ranks - middle - count
            if count >= 1 and learners >= 1:
                splits.append(Split(middle, learners, count))
    return [Candidate(row, split) for split in splits]


def _inside(generators: int, ranks: int) -> int:
    return min(ranks - 1, max(1, generators))
