"""Many simulations: over cores, over seeds, over splits."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from statistics import fmean

from cluster.errors import ConfigError
from cluster.sim.policies import Candidate, around, scan
from cluster.sim.scenario import Result, Scenario, Split
from cluster.sim.world import run

Progress = Callable[[int, int], None]
"""Called with the numbers of simulations that have just ended, and that have just been asked for."""

TUNING_STEPS = 10
"""Steps of a run that only ranks splits against each other: enough to pass the start."""
SAMPLE = 16
"""Groups that the first guess of a split is estimated from."""
BATCH = 64
"""Sequences that a generator is taken to decode together, for that guess."""


def run_many(
    scenarios: Sequence[Scenario], workers: int = 1, progress: Progress | None = None, lean: bool = True
) -> list[Result]:
    """Results in the order of the scenarios. ``lean``: without the series that only pictures need.

    ``workers`` processes are spawned (never forked: the caller may have threads); 1 runs in this one. An
    exception of a simulation is raised here, and ends the others.
    """
    if progress is not None:
        progress(0, len(scenarios))
    if workers <= 1 or len(scenarios) <= 1:
        results = []
        for scenario in scenarios:
            results.append(_one(scenario, lean))
            if progress is not None:
                progress(1, 0)
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(scenarios)), mp_context=context) as pool:
        futures = {pool.submit(_one, scenario, lean): at for at, scenario in enumerate(scenarios)}
        found: dict[int, Result] = {}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                if progress is not None:
                    progress(1, 0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[at] for at in range(len(scenarios))]


def _one(scenario: Scenario, lean: bool) -> Result:
    result = run(replace(scenario, trace=not lean))
    if lean:  # results of workers are pickled
        result.waits, result.roles, result.depth = [], [], []
    return result


@dataclass
class Tuned:
    """A policy's best candidate, and the goodput (tokens a second) of each that was tried."""

    best: Candidate
    tried: dict[tuple[Split, str], float] = field(default_factory=dict)  # by split and way of scoring

    def note(self, candidate: Candidate, goodput: float) -> None:
        """A candidate was tried."""
        key = candidate.split, candidate.policy.scoring
        self.tried[key] = goodput
        if goodput > self.tried.get((self.best.split, self.best.policy.scoring), -1.0):
            self.best = candidate

    def scenario(self, base: Scenario) -> Scenario:
        """``base`` run the best way."""
        return replace(base, policy=self.best.policy, split=self.best.split)


def tune(
    bases: Mapping[str, Scenario],
    ranks: int,
    *,
    seeds: Sequence[int] = (0,),
    steps: int = TUNING_STEPS,
    workers: int = 1,
    progress: Progress | None = None,
    full: bool = True,
    finest: int = 32,
) -> dict[str, Tuned]:
    """The split of each scenario's policy with the highest goodput; the scenarios' own splits are ignored.

    First eighths of the ranks (``full``) or an estimate and an eighth beside it; then ever smaller steps
    from the best, down to ``ranks / finest``. All policies' candidates of a round run together, so that the
    cores stay busy.
    """
    if ranks < 2:
        raise ConfigError(f"ranks = {ranks}: at least 2 are needed, one to generate and one to train")
    tuned: dict[str, Tuned] = {}
    strides = {name: max(1, ranks // 16) for name in bases}
    wanted = {name: _first(base, ranks, full) for name, base in bases.items()}
    for name, first in wanted.items():
        tuned[name] = Tuned(first[0])
        if len(first) == 1:
            wanted[name] = []  # nothing to choose
    while any(wanted.values()):
        jobs = [(name, candidate) for name, candidates in wanted.items() for candidate in candidates]
        scenarios = [
            _short(replace(bases[name], policy=candidate.policy, split=candidate.split, seed=seed), steps)
            for name, candidate in jobs
            for seed in seeds
        ]
        results = run_many(scenarios, workers, progress)
        for at, (name, candidate) in enumerate(jobs):
            part = results[at * len(seeds) : (at + 1) * len(seeds)]
            tuned[name].note(candidate, fmean(result.goodput_tok_s for result in part))
        for name, base in bases.items():
            wanted[name] = _next(tuned[name], base, ranks, strides, name, max(1, ranks // finest))
    return tuned


def _first(base: Scenario, ranks: int, full: bool) -> list[Candidate]:
    if full or base.policy.rollout == "sync":
        return scan(base.policy, base.profile, ranks)
    guess = estimate(base, ranks)
    return scan(base.policy, base.profile, ranks, (guess - ranks // 8, guess, guess + ranks // 8))


def _next(
    tuned: Tuned, base: Scenario, ranks: int, strides: dict[str, int], name: str, least: int
) -> list[Candidate]:
    """Untried neighbours of the best at the present stride, else at the next smaller one."""
    if len(tuned.tried) < 2:
        return []
    while strides[name] >= least:
        found = [
            candidate
            for candidate in around(tuned.best, base.profile, ranks, strides[name], strides[name] == least)
            if (candidate.split, candidate.policy.scoring) not in tuned.tried
        ]
        if found:
            return found
        strides[name] = strides[name] // 2 if strides[name] > 1 else 0
    return []


def estimate(base: Scenario, ranks: int) -> int:
    """Generators that the mean works of a few groups ask for; only a place to begin the search."""
    generator, learner, scorer = base.profile.generator, base.profile.learner, base.profile.scorer
    generate = train = 0.0
    for group in range(SAMPLE):
        plan = base.workload.plan(base.seed, group, 0)
        context = rows = 0
        for turn in plan.turns:
            if turn.kept >= 0:
                rows += context
                context = turn.kept
            context += turn.added + turn.output
            token_s = generator.step_base_s / BATCH + generator.step_seq_s + context * generator.step_ctx_s
            generate += turn.added / generator.prefill_tok_s + turn.output * token_s
        rows += context
        per_token = 1 / learner.forward_tok_s + 1 / learner.backward_tok_s
        train += rows * (per_token + scorer.passes / scorer.forward_tok_s)
    return min(ranks - 1, max(1, round(ranks * generate / (generate + train))))


def best_split(scenario: Scenario, ranks: int, seeds: Sequence[int] = (0, 1), workers: int = 1) -> Split:
    """The split of ``ranks`` under which the scenario's policy has the highest goodput."""
    return tune({"": scenario}, ranks, seeds=seeds, workers=workers)[""].best.split


def _short(scenario: Scenario, steps: int) -> Scenario:
    steps = min(steps, scenario.steps)
    return replace(scenario, steps=steps, warmup_steps=min(scenario.warmup_steps, max(1, steps // 3)))
