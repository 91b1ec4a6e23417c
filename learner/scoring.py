"""The feeder's side of scoring: groups to scorers as they arrive, scores to the ranks that train them.

decoupled
    A group goes to the scorer with the least to do as soon as it is claimed; what comes back waits here
    until a batch has the group, and is then offered to each rank that trains a row of it. A scorer
    that is lost or changes its role loses nothing: what it was asked is asked elsewhere.
colocated
    Nothing is asked; the ranks score their own rows in one burst before they train.

Runs on one event loop; all state is rebuilt by asking again.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cluster.config import Config
from cluster.pipeline import Mode
from cluster.types import Group
from learner.batch import RankBatch, Sample, compile_trajectory, pack
from learner.credit.pipeline import has_score
from learner.form import Formed
from learner.group import RankPort
from learner.late import Key, Late, Scored, keys_of

RETRY_S = 0.5
"""Between two asks of the same group: a scorer that died is back in seconds, not at once."""


class ScorerPort(Protocol):
    """A frozen forward pass, wherever it runs."""

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        """Scores of the batch's samples; ``keys[i]`` names sample ``i``. Asking again is harmless."""


@dataclass
class _Ask:
    """One group and its scores to be."""

    group: Group
    scores: asyncio.Future[Scored]
    scorer: int = -1
    task: asyncio.Task[None] | None = None


@dataclass
class Spent:
    """Rank-seconds of scorers, and the tokens they ran forward."""

    seconds: float = 0.0
    tokens: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)


class Scoring:
    """Who scores, how, and what was asked of whom."""

    def __init__(
        self,
        config: Config,
        port_of: Callable[[int], ScorerPort],
        trace: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.config = config
        self.active = config.objective.kl_coef > 0
        self.mode: Mode = "colocated" if config.scorer.mode == "colocated" else "decoupled"
        self.scorers: list[int] = []
        self.failures = 0  # asks that failed so far
        self._port_of = port_of
        self._trace = trace
        self._asks: dict[str, _Ask] = {}
        self._spent = Spent()

    # -- who and how --------------------------------------------------------------------

    def assign(self, scorers: Sequence[int], mode: str = "") -> None:
        """These ranks score from now on, and ``mode`` counts if ``scorer.mode`` leaves it open (auto).

        What was asked of others is asked again.
        """
        self.scorers = sorted(scorers)
        chosen = self.config.scorer.mode if self.config.scorer.mode != "auto" else mode or self.mode
        self.mode = "colocated" if chosen == "colocated" or not self.scorers else "decoupled"
        for ask in self._asks.values():
            if ask.scorer not in self.scorers and not ask.scores.done():
                self._start(ask)

    # -- life of a group ----------------------------------------------------------------

    def arrived(self, group: Group) -> None:
        """A group is ready: its scores are asked for, if scorers stream."""
        if not self.active or self.mode != "decoupled" or group.id in self._asks:
            return
        scores: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        ask = self._asks[group.id] = _Ask(group, scores)
        self._start(ask)

    def forget(self, groups: Iterable[str]) -> None:
        """These groups were trained or dropped."""
        for group in groups:
            ask = self._asks.pop(group, None)
            if ask is not None and ask.task is not None:
                ask.task.cancel()

    async def stop(self) -> None:
        """Ask nothing any more."""
        tasks = [ask.task for ask in self._asks.values() if ask.task is not None]
        self.forget(list(self._asks))
        await asyncio.gather(*tasks, return_exceptions=True)

    def waiting(self) -> int:
        """Groups whose scores are not there yet."""
        return sum(not ask.scores.done() for ask in self._asks.values())

    def take_spent(self) -> Spent:
        """What scorers did since the last call."""
        spent, self._spent = self._spent, Spent()
        return spent

    # -- a step -------------------------------------------------------------------------

    def late(self, groups: Sequence[Group], samples: Sequence[Sample]) -> Late | None:
        """How the ranks get the signal of a batch of these groups; None if the loss needs none."""
        if not self.active:
            return None
        if self.mode == "colocated":
            return Late("here")
        for group in groups:
            self.arrived(group)  # those that came before scorers did
        return Late("offered", keys_of(samples))

    async def deliver(self, formed: Formed, ranks: Sequence[RankPort]) -> None:
        """Offer each group's scores, as they come, to the ranks that train it. Ends when all have theirs."""
        takers: dict[str, list[RankPort]] = {}
        for batch, port in zip(formed.plan.ranks, ranks, strict=True):
            for index in np.unique(batch.sample[batch.mask]):
                ports = takers.setdefault(formed.samples[int(index)].group, [])
                if port not in ports:
                    ports.append(port)
        async with asyncio.TaskGroup() as offering:
            for group, ports in takers.items():
                offering.create_task(self._offer(group, ports))

    async def _offer(self, group: str, ports: Sequence[RankPort]) -> None:
        scored = await asyncio.shield(self._asks[group].scores)
        told = await asyncio.gather(*(port.offer(scored) for port in ports), return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException):  # the rank is lost: its step says so
                self._trace("scores_not_taken", {"group": group, "error": repr(error)[:300]})

    # -- asking -------------------------------------------------------------------------

    def _start(self, ask: _Ask) -> None:
        if ask.task is not None:
            ask.task.cancel()
        ask.scorer = -1
        ask.task = asyncio.create_task(self._ask(ask)) if self.scorers else None

    async def _ask(self, ask: _Ask) -> None:
        """Ask until somebody answers; the rank that waits has the deadline (scorer.timeout_s)."""
        samples = [
            sample
            for member in ask.group.members
            if has_score(member)
            for sample in compile_trajectory(member, ask.group.id)
        ]
        keys = keys_of(samples)
        batch = self._rows(samples)
        while True:
            ask.scorer = self._idlest()
            try:
                scored = await self._port_of(ask.scorer).score(batch, keys)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                told = {"group": ask.group.id, "scorer": ask.scorer, "error": repr(error)[:300]}
                self._trace("score_asked_again", told)
                ask.scorer = -1
                self.failures += 1
                await asyncio.sleep(RETRY_S)
                continue
            self._spent.seconds += scored.busy[1] - scored.busy[0]
            self._spent.tokens += scored.tokens
            self._spent.busy.append(scored.busy)
            if not ask.scores.done():
                ask.scores.set_result(scored)
            return

    def _rows(self, samples: Sequence[Sample]) -> RankBatch:
        learner = self.config.learner
        blank = [np.zeros(len(sample.ids), np.float32) for sample in samples]
        return pack(samples, blank, learner.row_tokens, 1, learner.micro_rows).ranks[0]

    def _idlest(self) -> int:
        load = dict.fromkeys(self.scorers, 0)
        for ask in self._asks.values():
            if ask.scorer in load and not ask.scores.done():
                load[ask.scorer] += 1
        return min(load, key=lambda scorer: (load[scorer], scorer), default=-1)


def per_micro_batch(seconds: float, tokens: int, row_tokens: int, micro_rows: int) -> float | None:
    """Seconds for one full micro-batch on one rank, out of rank-seconds for ``tokens``; None if none."""
    if tokens <= 0 or not math.isfinite(seconds):
        return None
    return seconds * row_tokens * micro_rows / tokens
