"""The feeder's side of scoring: segments and groups to scorers, scores to the ranks that train them.

decoupled
    Segments are scored as they stream (learner/streaming.py). When their group is claimed, what is still
    missing of its trajectories goes first; rows of which no segment was heard go, whole, to the scorer with
    the least to do, a micro-batch of them in a request. The scores wait here until a batch has the group, and
    are then offered to each rank that trains a row of it. A scorer that is lost or changes its role loses
    nothing: what it was asked is asked elsewhere.
colocated
    Nothing is asked; the ranks score their own rows in one burst before they train.

Runs on one event loop; all state is rebuilt by asking again.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cluster.config import Config
from cluster.errors import StreamFailed
from cluster.pipeline import Mode
from cluster.ports import Queue
from cluster.types import End, Group, Segment, Trajectory
from learner.batch import RankBatch, Sample, compile_trajectory, pack
from learner.credit.pipeline import has_score
from learner.form import Formed
from learner.group import RankPort
from learner.late import Key, Late, Scored, keys_of
from learner.patience import RETRY_S, Patience
from learner.segments import Floats, Told
from learner.streaming import SegmentPort, Streaming
from learner.streams import sampled

LISTEN_S = 1.0
STOP_S = 10.0
READ_NEWS = 256


class ScorerPort(SegmentPort, Protocol):
    """A frozen forward pass, wherever it runs."""

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        """Scores of the batch's samples; ``keys[i]`` names sample ``i``. Asking again is harmless."""

    async def restart(self) -> None:
        """End its process, which hangs; another one takes its place."""


@dataclass
class _Ask:
    """One group and its scores to be."""

    group: Group
    scores: asyncio.Future[Scored]
    sampled: int  # tokens that need a score
    ahead: int  # of which were scored when the group was claimed
    scorer: int = -1  # that scores rows of it whole
    task: asyncio.Task[None] | None = None


@dataclass
class Spent:
    """Rank-seconds of scorers, and the tokens they ran forward."""

    seconds: float = 0.0
    tokens: int = 0


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
        self.scored_ahead = 0.0  # of the last batch's trained tokens: share scored when they were claimed
        self._port_of = port_of
        self._trace = trace
        self._tokens = config.learner.row_tokens * config.learner.micro_rows  # of whole rows in a request
        self._asks: dict[str, _Ask] = {}
        self._spent = Spent()
        self._failures = 0
        self._patience = Patience(config.scorer.timeout_s, lambda: self.scorers, self._restart)
        self._streaming = Streaming(config, port_of, trace, self._spend, self._patience)
        self._listening: asyncio.Task[None] | None = None

    @property
    def failures(self) -> int:
        """Asks that failed so far."""
        return self._failures + self._streaming.failures

    # -- who and how --------------------------------------------------------------------

    def assign(self, scorers: Sequence[int], mode: str = "") -> None:
        """These ranks score from now on, and ``mode`` counts if ``scorer.mode`` leaves it open (auto).

        What was asked of others is asked again.
        """
        self.scorers = sorted(scorers)
        chosen = self.config.scorer.mode if self.config.scorer.mode != "auto" else mode or self.mode
        self.mode = "colocated" if chosen == "colocated" or not self.scorers else "decoupled"
        streaming = self.config.streams_scores and self.mode == "decoupled"
        self._streaming.assign(self.scorers if streaming else ())
        for ask in self._asks.values():
            waits = ask.scorer < 0 and ask.task is not None  # for segments, or to ask again
            if not ask.scores.done() and not (self.scorers and (waits or ask.scorer in self.scorers)):
                self._start(ask)

    # -- segments -----------------------------------------------------------------------

    def listen(self, queue: Queue) -> None:
        """Hear of segments from now on, if they are scored as they stream."""
        if self.config.streams_scores:
            self._listening = asyncio.create_task(self._listen(queue))

    async def _listen(self, queue: Queue) -> None:
        """What is missed, while nobody scores or the queue is away, is scored with its group."""
        place = ""
        while True:
            if not self._streaming.on:
                await asyncio.sleep(LISTEN_S)
                continue
            try:
                place, news = await queue.news(place, READ_NEWS, LISTEN_S)
            except StreamFailed as error:
                self._trace("news_not_heard", {"error": str(error)[:300]})
                await asyncio.sleep(RETRY_S)
                continue
            for record in news:
                self.heard(record)

    def heard(self, record: Segment | End) -> None:
        """A segment or an end was recorded in the queue."""
        if self._streaming.on and record.group not in self._asks:
            self._streaming.heard(record)

    def check(self) -> None:
        """Raises what ended a background task, if anything did."""
        self._streaming.check()
        for ask in self._asks.values():
            if ask.task is not None and ask.task.done() and not ask.scores.done():
                ask.task.result()
        if self._listening is not None and self._listening.done():
            self._listening.result()

    # -- life of a group ----------------------------------------------------------------

    def arrived(self, group: Group) -> None:
        """A group is ready: its scores are asked for, if scorers stream."""
        if not self.active or self.mode != "decoupled" or group.id in self._asks:
            return
        scores: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        counted = [member for member in group.members if has_score(member)]
        tokens = sum(sampled(member.turns) for member in counted)
        ask = self._asks[group.id] = _Ask(group, scores, tokens, self._streaming.claimed(counted))
        self._start(ask)

    def forget(self, groups: Iterable[str]) -> None:
        """These groups were trained or dropped."""
        groups = list(groups)
        self._streaming.forget(groups)
        for group in groups:
            ask = self._asks.pop(group, None)
            if ask is not None and ask.task is not None:
                ask.task.cancel()

    async def stop(self) -> None:
        """Ask nothing any more."""
        tasks = [ask.task for ask in self._asks.values() if ask.task is not None]
        if self._listening is not None:
            self._listening.cancel()
            tasks.append(self._listening)
        self.forget(list(self._asks))
        tasks += self._streaming.stop()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=STOP_S)
            if left:
                self._trace("scoring_not_ended", {"tasks": len(left)})

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
        self.check()
        for group in groups:
            self.arrived(group)  # those that came before scorers did
        asks = [self._asks[group.id] for group in groups]
        self.scored_ahead = sum(ask.ahead for ask in asks) / max(1, sum(ask.sampled for ask in asks))
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
        """The group's scores: those of segments as they come, then whole rows for the others."""
        known: list[tuple[Key, Floats]] = []
        missing: list[Sample] = []
        for member in ask.group.members:
            if not has_score(member):
                continue
            samples = compile_trajectory(member, ask.group.id)
            values = await self._from_segments(member, samples)
            if values is None:
                missing += samples
            else:
                known += zip(keys_of(samples), values, strict=True)
        keys = keys_of(missing)
        for part in portions([len(sample.ids) for sample in missing], self._tokens):
            scored = await self._whole(ask, missing[part], keys[part])
            known += zip(scored.keys, scored.values, strict=True)
        if not ask.scores.done():
            ask.scores.set_result(Scored(tuple(key for key, _ in known), tuple(row for _, row in known)))

    async def _from_segments(self, member: Trajectory, samples: Sequence[Sample]) -> list[Floats] | None:
        """Scores [T] of each sample out of those of its segments; None if these are not to be had."""
        scores = await self._streaming.scores_of(member)
        if scores is None:
            return None
        if len(scores) != sum(sample.trained for sample in samples):
            told = {"trajectory": member.id, "why": f"{len(scores)} scores do not fit its rows"}
            self._trace("segments_left", told)
            return None
        rows, at = [], 0
        for sample in samples:
            row = np.full(len(sample.ids), np.nan, np.float32)
            row[sample.mask] = scores[at : at + sample.trained]
            at += sample.trained
            rows.append(row)
        return rows

    async def _whole(self, ask: _Ask, samples: Sequence[Sample], keys: tuple[Key, ...]) -> Scored:
        """Ask until somebody answers; the rank that waits has the deadline (scorer.timeout_s)."""
        batch = self._rows(samples)
        failed = ask.scorer = -1
        while True:
            ask.scorer = self._idlest(failed)
            try:
                scored = await self._patience.answer(
                    ask.scorer, self._port_of(ask.scorer).score(batch, keys)
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:
                told = {"group": ask.group.id, "scorer": ask.scorer, "error": repr(error)[:300]}
                self._trace("score_asked_again", told)
                failed, ask.scorer = ask.scorer, -1
                self._failures += 1
                await asyncio.sleep(RETRY_S)
                continue
            self._book(scored.busy, scored.tokens)
            return scored

    async def _restart(self, scorer: int, why: str) -> None:
        self._trace("scorer_restarted", {"scorer": scorer, "why": why})
        await self._port_of(scorer).restart()

    def _spend(self, told: Told) -> None:
        self._book(told.busy, sum(told.tokens))

    def _book(self, busy: tuple[float, float], tokens: int) -> None:
        self._spent.seconds += max(0.0, busy[1] - busy[0])
        self._spent.tokens += tokens

    def _rows(self, samples: Sequence[Sample]) -> RankBatch:
        learner = self.config.learner
        blank = [np.zeros(len(sample.ids), np.float32) for sample in samples]
        return pack(samples, blank, learner.row_tokens, 1, learner.micro_rows).ranks[0]

    def _idlest(self, failed: int) -> int:
        """The one with the least to do; not one that is silent nor ``failed``, if there is another."""
        others = [scorer for scorer in self.scorers if scorer != failed]
        awake = [scorer for scorer in others if not self._patience.silent(scorer)]
        load = dict.fromkeys(awake or others or self.scorers, 0)
        for ask in self._asks.values():
            if ask.scorer in load and not ask.scores.done():
                load[ask.scorer] += 1
        return min(load, key=lambda scorer: (load[scorer], scorer), default=-1)


def portions(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of at most ``most`` tokens, in order; what is longer is one of its own."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        if tokens + length > most and index > start:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def per_micro_batch(seconds: float, tokens: int, row_tokens: int, micro_rows: int) -> float | None:
    """Seconds for one full micro-batch on one rank, out of rank-seconds for ``tokens``; None if none."""
    if tokens <= 0 or not math.isfinite(seconds):
        return None
    return seconds * row_tokens * micro_rows / tokens
