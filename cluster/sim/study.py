"""One job under many policies: each tuned (its own split, its own way of scoring), then run on common seeds.

``cluster/sim/compare.py`` makes figures of it, ``cluster/sim/vary.py`` repeats it with something changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from cluster.errors import ConfigError
from cluster.sim.knobs import Job
from cluster.sim.policies import ASYNC, LADDER, LEAVE_ONE_OUT, Candidate, policy, split_for
from cluster.sim.scenario import PolicyConfig, Result, Scenario, Split, check
from cluster.sim.sweep import QUIET, TUNING_STEPS, Progress, Tuned, Workers, tune

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
"""Policies that are also run from an even split, as of somebody who has not searched."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much of it."""

    policies: tuple[str, ...] = QUICK
    steps: int = 24
    warmup_steps: int = 12  # an elastic run settles, one move per step
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (0,)
    tuning_steps: int = TUNING_STEPS
    untuned: bool = True  # run from an even split too
    full: bool = False  # try every eighth of the ranks, and refine to ranks / 32


@dataclass
class Study:
    """What was run."""

    job: Job
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


def scenario_of(job: Job, options: Options) -> Scenario:
    """The job as a scenario; policy and split are filled in by tuning. Raises ConfigError if it cannot run.

    A micro-batch is widened to the longest context, since a learner rank has to hold a whole row (a recipe
    that cannot is refused: ``learner.row_tokens``).
    """
    workload, profile, run = job.workload, job.profile, job.workload.spec.run
    room = profile.generator.kv_tokens - profile.generator.block
    for kind in workload.spec.kind:
        if kind.max_context > room:
            raise ConfigError(
                f"workload {workload.name}: {kind.name}.max_context = {kind.max_context} does not fit into "
                f"{profile.name}: generator.kv_tokens = {profile.generator.kv_tokens}"
            )
    longest = max(kind.max_context for kind in workload.spec.kind)
    if longest > profile.learner.micro_tokens:
        learner = msgspec.structs.replace(profile.learner, micro_tokens=longest)
        profile = msgspec.structs.replace(profile, learner=learner)
    row = policy("tide", run.max_lag)
    scenario = Scenario(
        workload=workload,
        profile=profile,
        policy=row,
        split=even(row, job),
        steps=options.steps,
        groups_per_step=run.groups_per_step,
        min_groups_per_step=run.min_groups_per_step,
        group_size=run.group_size,
        env_slots=run.env_slots,
        warmup_steps=options.warmup_steps,
    )
    try:
        check(scenario)
    except ValueError as error:
        raise ConfigError(f"workload {workload.name}: {error}") from error
    return scenario


def even(row: PolicyConfig, job: Job) -> Split:
    """Half of the ranks generate: what somebody might begin with who has not searched."""
    return split_for(row, job.profile, job.ranks, max(1, job.ranks // 2))


def study(job: Job, options: Options, workers: Workers, progress: Progress = QUIET) -> Study:
    """Tune, then run. An elastic policy begins with the split of its fixed twin.

    ``one_step_off`` is left out under a staleness bound of 0, which it cannot keep.
    """
    lag = job.workload.spec.run.max_lag
    asked = tuple(name for name in options.policies if name != "one_step_off" or lag)
    found = Study(job, options, scenario_of(job, options))
    naive = UNTUNED if options.untuned and not job.split and set(UNTUNED) <= set(asked) else ()
    progress.stage("searching splits" if job.split is None else "running")
    progress.entered((len(asked) + len(naive)) * len(options.seeds) * options.steps)
    found.tuned = _tuned(found, asked, workers, progress)
    progress.stage("running")
    jobs = [(found.results, name, found.tuned[name].scenario(found.base)) for name in asked]
    for name in naive:
        row = policy(name, lag)
        jobs.append((found.untuned, name, replace(found.base, policy=row, split=even(row, job))))
    runs = [
        (kept, name, replace(_whole(one), seed=seed)) for seed in options.seeds for kept, name, one in jobs
    ]
    known = [found.tuned[name].known(one.seed) if kept is found.results else None for kept, name, one in runs]
    missing = [one for (_, _, one), result in zip(runs, known, strict=True) if result is None]
    progress.ended(options.steps * (len(runs) - len(missing)))
    fresh = iter(workers.run(missing, progress))
    for (kept, name, _), result in zip(runs, known, strict=True):
        kept.setdefault(name, []).append(result or next(fresh))
    return found


def _tuned(found: Study, asked: tuple[str, ...], workers: Workers, progress: Progress) -> dict[str, Tuned]:
    """For each policy its own best split, its twin's, or the one that was asked for."""
    job, options, lag = found.job, found.options, found.job.workload.spec.run.max_lag
    bases = {
        name: _whole(replace(found.base, policy=policy(name, lag)))
        for name in asked
        if TWINS.get(name) not in asked and (job.split is None or name == "sync")
    }
    tuned = tune(
        bases, job.ranks, workers, seeds=options.tuning_seeds, steps=options.tuning_steps,
        progress=progress, full=options.full,
    )  # fmt: skip
    for name in asked:
        if name not in tuned:
            row = policy(name, lag)
            split = _given(row, job.split) if job.split else _split_of(name, tuned)
            tuned[name] = Tuned(Candidate(row, split))
    return tuned


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
