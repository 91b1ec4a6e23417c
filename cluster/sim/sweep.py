"""Many simulations: over cores, over seeds, over splits."""

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from statistics import fmean
from types import TracebackType

from cluster.errors import ConfigError
from cluster.sim.policies import Candidate, around, scan
from cluster.sim.scenario import Result, Scenario, Split
from cluster.sim.world import run

TUNING_STEPS = 10
"""Steps of a run that only ranks splits against each other: enough to pass the start."""
FINALISTS, CLOSE = 3, 0.9
"""So many candidates, within this share of the best, are run at full length: short runs still hold some of
the start, when the queue fills, and favour splits with many learners."""
SAMPLE = 16
"""Groups that the first guess of a split is estimated from."""
BATCH = 64
"""Sequences that a generator is taken to decode together, for that guess."""


class Progress:
    """Told how a study gets on, in simulated optimizer steps; this one ignores it."""

    def stage(self, name: str) -> None:
        """What is done from now on."""

    def entered(self, steps: int) -> None:
        """So many more steps will be simulated."""

    def ended(self, steps: int) -> None:
        """So many of them have been."""


QUIET = Progress()


class Workers:
    """Processes that simulate, kept between calls; ``with`` ends them. One worker is this process itself.

    They are spawned, never forked: the caller may have threads.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()  # children of this process that are not ours

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=error is None, cancel_futures=True)
        if error is not None:  # what they are at is of no use any more
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()

    def run(
        self, scenarios: Sequence[Scenario], progress: Progress = QUIET, lean: bool = True
    ) -> list[Result]:
        """Results in the order of the scenarios. ``lean``: without the series that only pictures need.

        An exception of a simulation is raised here.
        """
        if self._count <= 1 or (len(scenarios) <= 1 and self._pool is None):
            results = []
            for scenario in scenarios:
                results.append(_one(scenario, lean))
                progress.ended(scenario.steps)
            return results
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._others = set(multiprocessing.active_children())
            self._pool = ProcessPoolExecutor(self._count, mp_context=context, initializer=_end_on_ctrl_c)
        futures = {self._pool.submit(_one, scenario, lean): at for at, scenario in enumerate(scenarios)}
        found: dict[int, Result] = {}
        for future in as_completed(futures):
            at = futures[future]
            found[at] = future.result()
            progress.ended(scenarios[at].steps)
        return [found[at] for at in range(len(scenarios))]


def _end_on_ctrl_c() -> None:
    """A terminal's Ctrl-C reaches the workers too: they end at once and silently, the caller reports it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _one(scenario: Scenario, lean: bool) -> Result:
    result = run(replace(scenario, trace=not lean))
    if lean:  # results of workers are pickled
        result.waits, result.roles, result.depth = [], [], []
    return result


Key = tuple[Split, str]
"""A candidate of one policy: its split and way of scoring."""


@dataclass
class Tuned:
    """A policy's best candidate, and the goodput (tokens a second) of each that was tried."""

    best: Candidate
    tried: dict[Key, float] = field(default_factory=dict)
    proven: dict[tuple[Key, int], Result] = field(default_factory=dict)  # runs of full length, by seed

    def note(self, candidate: Candidate, goodput: float) -> None:
        """A candidate was tried."""
        self.tried[_key(candidate)] = goodput
        if goodput > self.tried.get(_key(self.best), -1.0):
            self.best = candidate

    def finalists(self) -> list[Candidate]:
        """Those that short runs cannot tell from the best."""
        ranked = sorted(self.tried.items(), key=lambda item: -item[1])
        return [
            Candidate(replace(self.best.policy, scoring=scoring), split)  # type: ignore[arg-type]
            for (split, scoring), goodput in ranked[:FINALISTS]
            if goodput >= CLOSE * ranked[0][1]
        ]

    def prove(self, candidates: Sequence[Candidate], results: Sequence[Sequence[Result]]) -> None:
        """Full runs of the finalists decide. The other short ones are put on the scale of the full ones."""
        means = [fmean(result.goodput_tok_s for result in runs) for runs in results]
        scale = means[0] / self.tried[_key(candidates[0])]
        self.tried = {key: goodput * scale for key, goodput in self.tried.items()}
        for candidate, goodput, runs in zip(candidates, means, results, strict=True):
            self.tried[_key(candidate)] = goodput
            for result in runs:
                self.proven[_key(candidate), result.scenario.seed] = result
        self.best = candidates[means.index(max(means))]

    def scenario(self, base: Scenario) -> Scenario:
        """``base`` run the best way."""
        return replace(base, policy=self.best.policy, split=self.best.split)

    def known(self, seed: int) -> Result | None:
        """The run of the best on ``seed``, if the search has made it."""
        return self.proven.get((_key(self.best), seed))


def _key(candidate: Candidate) -> Key:
    return candidate.split, candidate.policy.scoring


def tune(
    bases: Mapping[str, Scenario],
    ranks: int,
    workers: Workers,
    *,
    seeds: Sequence[int] = (0,),
    steps: int = TUNING_STEPS,
    progress: Progress = QUIET,
    full: bool = True,
) -> dict[str, Tuned]:
    """The split of each scenario's policy with the highest goodput; the scenarios' own splits are ignored.

    ``full``: every eighth of the ranks, then sixteenths and thirty-seconds around the best. Else an estimate
    and an eighth beside it, then sixteenths around the best. Both walk on as long as it gets better.
    Those runs are short (``steps``); the finalists are then run at full length. All policies'
    candidates of a round run together, so that the cores stay busy.
    """
    if ranks < 2:
        raise ConfigError(f"ranks = {ranks}: at least 2 are needed, one to generate and one to train")
    tuned: dict[str, Tuned] = {}
    strides = {name: max(1, ranks // 16) for name in bases}
    least = max(1, ranks // (32 if full else 16))
    wanted = {name: _first(base, ranks, full) for name, base in bases.items()}
    for name, first in wanted.items():
        tuned[name] = Tuned(first[0])
        if bases[name].policy.rollout == "sync":
            wanted[name] = []  # one split, nothing to choose
    while any(wanted.values()):
        jobs = [(name, candidate) for name, candidates in wanted.items() for candidate in candidates]
        scenarios = [
            _short(replace(bases[name], policy=candidate.policy, split=candidate.split, seed=seed), steps)
            for name, candidate in jobs
            for seed in seeds
        ]
        progress.entered(sum(scenario.steps for scenario in scenarios))
        results = workers.run(scenarios, progress)
        for at, (name, candidate) in enumerate(jobs):
            part = results[at * len(seeds) : (at + 1) * len(seeds)]
            tuned[name].note(candidate, fmean(result.goodput_tok_s for result in part))
        for name, base in bases.items():
            wanted[name] = _next(tuned[name], base, ranks, strides, name, least)
    longer = {name: base for name, base in bases.items() if steps < base.steps}
    _finals(longer, tuned, seeds, workers, progress)
    return tuned


def _finals(
    bases: Mapping[str, Scenario], tuned: Mapping[str, Tuned], seeds: Sequence[int], workers: Workers,
    progress: Progress,
) -> None:
    finalists = {name: tuned[name].finalists() for name in bases}
    names = [name for name, candidates in finalists.items() if len(candidates) > 1]
    scenarios = [
        replace(bases[name], policy=candidate.policy, split=candidate.split, seed=seed)
        for name in names
        for candidate in finalists[name]
        for seed in seeds
    ]
    progress.entered(sum(scenario.steps for scenario in scenarios))
    results = iter(workers.run(scenarios, progress))
    for name in names:
        tuned[name].prove(finalists[name], [[next(results) for _ in seeds] for _ in finalists[name]])


def _first(base: Scenario, ranks: int, full: bool) -> list[Candidate]:
    if full or base.policy.rollout == "sync":
        return scan(base.policy, base.profile, ranks)
    guess, beside = estimate(base, ranks), max(1, ranks // 8)
    return scan(base.policy, base.profile, ranks, (guess - beside, guess, guess + beside))


def _next(
    tuned: Tuned, base: Scenario, ranks: int, strides: dict[str, int], name: str, least: int
) -> list[Candidate]:
    """Untried neighbours of the best at the present stride, else at the next smaller one."""
    while strides[name] >= least:
        found = [
            candidate
            for candidate in around(tuned.best, base.profile, ranks, strides[name], strides[name] == least)
            if _key(candidate) not in tuned.tried
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


def _short(scenario: Scenario, steps: int) -> Scenario:
    steps = min(steps, scenario.steps)
    return replace(scenario, steps=steps, warmup_steps=min(scenario.warmup_steps, max(1, steps // 3)))
