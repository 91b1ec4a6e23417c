"""One workload on one cluster under many policies: tuned, run on common seeds, compared.

Every policy is tuned first (its own split, its own way of scoring), then run on each seed. Figures are
paired over seeds. What a figure compares is said where it is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgspec

from cluster.pipeline import Costs, decoupled_s, full_batch_s, thrash_s
from cluster.sim.policies import (
    ASYNC,
    LADDER,
    LEAVE_ONE_OUT,
    STATIC,
    Candidate,
    policy,
    scorer_share,
    split_for,
)
from cluster.sim.profile import Profile
from cluster.sim.scenario import PolicyConfig, Result, Scenario, Split
from cluster.sim.statistics import Interval, interval, ratio, reduction
from cluster.sim.sweep import TUNING_STEPS, Progress, Tuned, run_many, tune
from cluster.sim.workloads import TableWorkload, altered

QUICK = ("sync", "stream", "areal", "tide", "tide_no_admission", "tide_no_elastic")
"""Policies of a run that names none."""
FULL = tuple(dict.fromkeys(("sync", *ASYNC, *(name for name, _ in (*LADDER, *LEAVE_ONE_OUT)))))
"""Policies of a study: every baseline, the ladder, the leave-one-out variants."""
TWINS = {
    "tide": "tide_no_elastic",
    "tide_no_admission": "tide",
    "stream_pipelining_elastic": "stream_pipelining",
}
"""A policy that begins with the split of another, if that is run too: so only the mechanism differs."""
UNTUNED = ("tide", "tide_no_elastic")
"""Policies that are also run from an even split, as of somebody who has not swept."""
READY = 8
"""Ready micro-batches at which the training step is compared, as TideRL did."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much of it."""

    ranks: int
    policies: tuple[str, ...] = QUICK
    steps: int = 24
    warmup_steps: int = 12  # an elastic run settles, one move per step
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (0,)
    tuning_steps: int = TUNING_STEPS
    split: Split | None = None  # run everybody with this one instead of searching
    full: bool = False  # sweep every eighth of the ranks, then to ranks / 32; run from an even split too
    workers: int = 1


@dataclass
class Study:
    """What was run."""

    workload: TableWorkload
    profile: Profile
    options: Options
    base: Scenario
    tuned: dict[str, Tuned] = field(default_factory=dict)
    results: dict[str, list[Result]] = field(default_factory=dict)  # by policy, one per seed
    untuned: dict[str, list[Result]] = field(default_factory=dict)  # from an even split

    def goodput(self, name: str) -> list[float]:
        """Trained tokens a second over all ranks, per seed."""
        return [result.goodput_tok_s for result in self.results[name]]

    def waits(self, name: str) -> list[float]:
        """RWT + TWT, rank-seconds a step, per seed."""
        return [result.wait_s for result in self.results[name]]

    def best(self, names: Sequence[str]) -> str | None:
        """Of the policies that were run, the one with the highest mean goodput."""
        run = [name for name in names if name in self.results]
        return max(run, key=lambda name: fmean(self.goodput(name))) if run else None

    def calmest(self, names: Sequence[str]) -> str | None:
        """Of the policies that were run, the one that waits least per token trained."""
        run = [name for name in names if name in self.results]
        return min(run, key=lambda name: fmean(per_token(self.results[name]))) if run else None


def scenario_of(workload: TableWorkload, profile: Profile, options: Options) -> Scenario:
    """The job of the workload's file on the options' ranks; policy and split are filled in by tuning.

    A micro-batch is widened to the longest context, since a learner rank has to hold a whole row (a recipe
    that cannot is refused: ``learner.row_tokens``).
    """
    run = workload.spec.run
    longest = max(kind.max_context for kind in workload.spec.kind)
    if longest > profile.learner.micro_tokens:
        learner = msgspec.structs.replace(profile.learner, micro_tokens=longest)
        profile = msgspec.structs.replace(profile, learner=learner)
    row = policy("tide", run.max_lag)
    return Scenario(
        workload=workload,
        profile=profile,
        policy=row,
        split=split_for(row, profile, options.ranks, max(1, options.ranks // 2)),
        steps=options.steps,
        groups_per_step=run.groups_per_step,
        min_groups_per_step=run.min_groups_per_step,
        group_size=run.group_size,
        env_slots=run.env_slots,
        warmup_steps=options.warmup_steps,
    )


def study(
    workload: TableWorkload, profile: Profile, options: Options, progress: Progress | None = None
) -> Study:
    """Tune, then run. An elastic policy begins with the split of its fixed twin."""
    base = scenario_of(workload, profile, options)
    found = Study(workload, profile, options, base)
    lag = workload.spec.run.max_lag
    asked = options.policies
    bases = {
        name: _whole(replace(base, policy=policy(name, lag)))
        for name in asked
        if TWINS.get(name) not in asked and (options.split is None or name == "sync")
    }
    found.tuned = tune(
        bases, options.ranks, seeds=options.tuning_seeds, steps=options.tuning_steps,
        workers=options.workers, progress=progress, full=options.full, finest=32 if options.full else 16,
    )  # fmt: skip
    for name in asked:
        if name not in found.tuned:
            row = policy(name, lag)
            split = _given(row, options.split) if options.split else _split_of(name, found.tuned)
            found.tuned[name] = Tuned(Candidate(row, split))
    jobs = [(name, found.tuned[name].scenario(base), seed) for seed in options.seeds for name in asked]
    naive = [name for name in UNTUNED if options.full and set(UNTUNED) <= set(asked)]
    for name in naive:
        row = policy(name, lag)
        split = split_for(row, profile, options.ranks, max(1, options.ranks // 2))
        jobs += [(name, replace(base, policy=row, split=split), seed) for seed in options.seeds]
    scenarios = [replace(_whole(scenario), seed=seed) for _, scenario, seed in jobs]
    results = run_many(scenarios, options.workers, progress)
    tuned = len(asked) * len(options.seeds)
    for at, ((name, _, _), result) in enumerate(zip(jobs, results, strict=True)):
        (found.results if at < tuned else found.untuned).setdefault(name, []).append(result)
    return found


def _given(row: PolicyConfig, split: Split) -> Split:
    """The split asked for; scorers train where the policy has no use for them."""
    if row.scoring in ("decoupled", "auto"):
        return split
    return Split(split.generators, split.learners + split.scorers)


def _split_of(name: str, tuned: Mapping[str, Tuned]) -> Split:
    """Of the twin, or the twin's twin."""
    while name not in tuned:
        name = TWINS[name]
    return tuned[name].best.split


def _whole(scenario: Scenario) -> Scenario:
    """Systems that generate batch by batch train whole batches only."""
    return scenario if scenario.policy.rollout == "stream" else replace(scenario, min_groups_per_step=0)


def per_token(results: Sequence[Result]) -> list[float]:
    """Rank-seconds waited per trained token: comparable between batches of different sizes."""
    return [_per_token(result) for result in results]


def _per_token(result: Result) -> float:
    steps = [step for step in result.steps if step.step > result.scenario.warmup_steps] or result.steps
    tokens = fmean(step.tokens for step in steps) if steps else 0.0
    return result.wait_s / tokens if tokens else 0.0


def headline(found: Study) -> dict[str, Interval]:
    """The figures of the published comparison, as far as the policies that were run allow."""
    figures: dict[str, Interval] = {}
    if "tide" not in found.results:
        return figures
    ours = found.goodput("tide")
    if "sync" in found.results:
        figures["goodput_vs_sync"] = ratio(ours, found.goodput("sync"))
    asynchronous = found.best(ASYNC)
    if asynchronous:
        figures["goodput_vs_best_async"] = ratio(ours, found.goodput(asynchronous))
    static = found.calmest(STATIC)
    if static and all(value > 0 for value in per_token(found.results[static])):
        figures["wait_reduction_vs_best_static"] = reduction(
            per_token(found.results["tide"]), per_token(found.results[static])
        )
    if "tide_no_admission" in found.results:
        lru = [result.kv_hit for result in found.results["tide_no_admission"]]
        if all(hit > 0 for hit in lru):
            figures["kv_hit_vs_request_lru"] = ratio([r.kv_hit for r in found.results["tide"]], lru)
    if found.profile.scorer.passes:
        split = found.tuned["tide"].best.split
        swap, whole = step_reduction(found.profile, split.learners + split.scorers)
        seeds = len(found.options.seeds)
        figures["train_step_reduction"] = interval([swap] * seeds)
        figures["train_step_reduction_vs_one_burst"] = interval([whole] * seeds)
    if "tide_no_elastic" in found.results:
        best = found.goodput("tide_no_elastic")
        figures["goodput_elastic_vs_static"] = ratio(ours, best)
        for name, key in (("tide", "goodput_elastic_untuned"), ("tide_no_elastic", "goodput_static_untuned")):
            if name in found.untuned:
                figures[key] = ratio([r.goodput_tok_s for r in found.untuned[name]], best)
    return figures


def step_reduction(profile: Profile, ranks: int, ready: int = READY) -> tuple[float, float]:
    """By what share a training step with ``ready`` micro-batches is shorter with scorers of their own.

    Against (streaming that swaps the reference per micro-batch, the whole batch in one burst), on the same
    ``ranks``. A micro-batch fills every rank: ``micro_tokens`` each. From the cost model that the live
    system decides by (cluster/pipeline.py); (0, 0) without a scorer or a second rank.
    """
    if not profile.scorer.passes or ranks < 2:
        return 0.0, 0.0
    tokens = profile.learner.micro_tokens * ranks
    score = tokens * profile.scorer.passes / profile.scorer.forward_tok_s
    train = tokens * (1 / profile.learner.forward_tok_s + 1 / profile.learner.backward_tok_s)
    at = (0.0,) * ready
    middle = max(1, min(ranks - 1, round(ranks * scorer_share(profile))))
    fixed = profile.learner.step_fixed_s
    ours = min(
        decoupled_s(at, Costs(score, train, profile.scorer.swap_s, scorers, ranks - scorers))
        for scorers in (middle - 1, middle, middle + 1)
        if 1 <= scorers < ranks
    )
    shared = Costs(score, train, profile.scorer.swap_s, 0, ranks)
    return (
        1 - (ours + fixed) / (thrash_s(at, shared) + fixed),
        1 - (ours + fixed) / (full_batch_s(at, shared) + fixed),
    )


def ladder(found: Study) -> list[dict[str, Any]]:
    """From the base to all mechanisms: goodput of each rung, and its gain over the one before."""
    rows: list[dict[str, Any]] = []
    before: str | None = None
    for name, label in LADDER:
        if name not in found.results:
            continue
        row: dict[str, Any] = {"policy": name, "label": label}
        row["goodput_tok_s"] = interval(found.goodput(name))
        row["gain"] = ratio(found.goodput(name), found.goodput(before)) if before else None
        rows.append(row)
        before = name
    return rows


def leave_one_out(found: Study) -> list[dict[str, Any]]:
    """What each mechanism is worth beside the other two: everything over everything but it."""
    return [
        {"policy": name, "label": label, "worth": ratio(found.goodput("tide"), found.goodput(name))}
        for name, label in LEAVE_ONE_OUT
        if name in found.results and "tide" in found.results
    ]


def plain(value: Any) -> Any:
    """Records as JSON values."""
    if isinstance(value, Interval):
        return value.plain()
    if isinstance(value, Split):
        return {"generators": value.generators, "learners": value.learners, "scorers": value.scorers}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def report(found: Study) -> dict[str, Any]:
    """Everything of a study as JSON values."""
    policies = {}
    for name, results in found.results.items():
        best = found.tuned[name].best
        policies[name] = {
            "split": best.split,
            "scoring": best.policy.scoring,
            "goodput_tok_s": interval([r.goodput_tok_s for r in results]),
            "wait_s": interval([r.wait_s for r in results]),
            "kv_hit": interval([r.kv_hit for r in results]),
            "train_s": interval([r.train_s for r in results]),
            "group_latency_s": interval([r.group_latency_s for r in results]),
            "moves": fmean(len(r.moves) for r in results),
            "wasted_tokens": fmean(r.wasted_tokens for r in results),
            "prefilled_tokens": fmean(r.prefilled_tokens for r in results),
            "events": sum(r.events for r in results),
            "wall_s": sum(r.wall_s for r in results),
            "sweep": [
                {"split": split, "scoring": scoring, "goodput_tok_s": value}
                for (split, scoring), value in sorted(found.tuned[name].tried.items(), key=_by_split)
            ],
        }
    run = found.workload.spec.run
    tree: dict[str, Any] = {
        "workload": found.workload.name,
        "profile": found.profile.name,
        "ranks": found.options.ranks,
        "steps": found.options.steps,
        "warmup_steps": found.options.warmup_steps,
        "seeds": list(found.options.seeds),
        "job": msgspec.to_builtins(run) | {"ranks": found.options.ranks, "profile": found.profile.name},
        **headline(found),
        "best_async": found.best(ASYNC),
        "best_static_by_wait": found.calmest(STATIC),
        "ladder": ladder(found),
        "leave_one_out": leave_one_out(found),
        "policies": policies,
    }
    built: dict[str, Any] = plain(tree)
    return built


def _by_split(item: tuple[tuple[Split, str], float]) -> tuple[str, int, int]:
    (split, scoring), _ = item
    return scoring, split.generators, split.scorers


# What a sensitivity sweep varies: (name, what it means, how it changes workload and profile by a factor).
Change = Callable[[TableWorkload, Profile, float], tuple[TableWorkload, Profile]]


def _kv(workload: TableWorkload, profile: Profile, factor: float) -> tuple[TableWorkload, Profile]:
    generator = profile.generator
    changed = msgspec.structs.replace(generator, kv_tokens=int(generator.kv_tokens * factor))
    return workload, msgspec.structs.replace(profile, generator=changed)


def _train(workload: TableWorkload, profile: Profile, factor: float) -> tuple[TableWorkload, Profile]:
    learner = msgspec.structs.replace(
        profile.learner,
        forward_tok_s=profile.learner.forward_tok_s / factor,
        backward_tok_s=profile.learner.backward_tok_s / factor,
    )
    scorer = msgspec.structs.replace(
        profile.scorer, forward_tok_s=profile.scorer.forward_tok_s / factor
    )
    return workload, msgspec.structs.replace(profile, learner=learner, scorer=scorer)


def _swap(workload: TableWorkload, profile: Profile, factor: float) -> tuple[TableWorkload, Profile]:
    scorer = msgspec.structs.replace(profile.scorer, swap_s=profile.scorer.swap_s * factor)
    return workload, msgspec.structs.replace(profile, scorer=scorer)


def _env(workload: TableWorkload, profile: Profile, factor: float) -> tuple[TableWorkload, Profile]:
    return altered(workload, env=factor), profile


def _batch(workload: TableWorkload, profile: Profile, factor: float) -> tuple[TableWorkload, Profile]:
    run = workload.spec.run
    changed = msgspec.structs.replace(
        run,
        groups_per_step=max(1, round(run.groups_per_step * factor)),
        env_slots=max(1, round(run.env_slots * factor)) if run.env_slots else 0,
    )
    return TableWorkload(msgspec.structs.replace(workload.spec, run=changed), workload.name), profile


def _phase(workload: TableWorkload, profile: Profile, factor: float) -> tuple[TableWorkload, Profile]:
    groups = max(1, round(workload.spec.phase_groups * factor))
    return TableWorkload(msgspec.structs.replace(workload.spec, phase_groups=groups), workload.name), profile


SENSITIVITY: dict[str, tuple[str, tuple[float, ...], Change]] = {
    "env_latency": ("environment latency and start", (0.25, 4.0, 16.0), _env),
    "kv_capacity": ("KV capacity of a generator", (0.125, 0.25, 0.5), _kv),
    "train_cost": ("time of a trained token", (0.5, 2.0), _train),
    "batch": ("groups per step (and environment slots)", (0.25, 2.0), _batch),
    "swap": ("time to swap the frozen model", (4.0, 16.0), _swap),
    "phase": ("length of a phase", (0.5, 2.0), _phase),
}
"""The factor 1 is the study itself."""


def sensitivity(
    found: Study, names: Sequence[str], options: Options, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """The headline figures with one parameter changed at a time; every policy tuned again."""
    rows = []
    for name in names:
        label, factors, change = SENSITIVITY[name]
        if (name == "phase" and not found.workload.spec.phase_groups) or (
            name in ("kv_capacity", "swap") and not found.profile.scorer.passes
        ):
            continue  # nothing that it would change
        for factor in factors:
            workload, profile = change(found.workload, found.profile, factor)
            again = study(workload, profile, options, progress)
            row: dict[str, Any] = {"parameter": name, "label": label, "factor": factor}
            rows.append(row | dict(headline(again)) | {"best_async": again.best(ASYNC)})
    return rows
