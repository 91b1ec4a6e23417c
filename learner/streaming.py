"""The feeder's side of segments that are scored as they stream.

A trajectory's segments go to one scorer, which keeps the prefix (learner/segment_scorer.py); their scores
wait here, turn by turn, until the group is claimed. So at the claim only the last turns are open. Each scorer
has one request under way, and takes into the next what has come meanwhile. It is given no more trajectories
than it has room for; the others wait for room, oldest first.

Nothing here has to be complete. Turns that were not heard of come with the group. A trajectory that was never
heard of, found no room or lost its prefix too often is *left*: its rows are scored whole, with the group
(learner/scoring.py). Runs on one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from cluster.assemble import VALID
from cluster.config import Config
from cluster.types import End, Segment, Trajectory
from learner.patience import RETRY_S, Patience
from learner.segments import Ask, Floats, Told, Unfolded, unfold
from learner.streams import REST_S, Lanes, Stream, sampled

WASTE = 2.0
"""A trajectory is left before its end once its scorer has run more than this times what whole rows would
cost: its prefix was lost, again and again."""
TRIES = 10
"""Requests in a row that may fail before a trajectory is left: five seconds, in which a process restarts."""
SPARE = 2
"""Trajectories remembered, as a multiple of those that may be pending: the others have failed somewhere."""


class SegmentPort(Protocol):
    """A scorer that keeps prefixes, wherever it runs."""

    async def score_segments(self, asks: Sequence[Ask], done: Sequence[str]) -> Told:
        """Scores of the asks' targets; prefixes of ``done`` are not needed. Asking again is harmless."""


class Streaming:
    """Trajectories under way, and what is asked of their scorers."""

    def __init__(
        self,
        config: Config,
        port_of: Callable[[int], SegmentPort],
        trace: Callable[[str, dict[str, Any]], None],
        spent: Callable[[Told], None],
        patience: Patience,
    ) -> None:
        self.config = config
        self.failures = 0
        self.port_of = port_of
        self._trace = trace
        self._spent = spent
        self._patience = patience
        self._most = SPARE * config.capacity * config.run.group_size
        self._tokens = config.learner.row_tokens * config.learner.micro_rows  # new ones in a request
        self._streams: OrderedDict[str, Stream] = OrderedDict()
        self._lanes = Lanes()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._error: BaseException | None = None

    # -- who scores ---------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Scorers take segments now."""
        return bool(self._lanes.scorers)

    def assign(self, scorers: Iterable[int]) -> None:
        """These ranks score from now on (none: pause). What others were asked is asked again."""
        for scorer in self._lanes.assign(scorers):
            if (task := self._tasks.pop(scorer, None)) is not None:
                task.cancel()
        for stream in self._streams.values():
            if stream.scorer >= 0 and stream.scorer not in self._lanes.scorers:
                self._take_back(stream)
                self._enqueue(stream)
        self._place()

    def check(self) -> None:
        """Raises what ended a background task, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> list[asyncio.Task[None]]:
        """Ask nothing any more; returns the tasks that end now."""
        tasks = list(self._tasks.values())
        self.assign(())
        return tasks

    # -- life of a trajectory -----------------------------------------------------------

    def heard(self, record: Segment | End) -> None:
        """A turn, or the trajectory, has ended. A turn after a gap is left out: the group brings it."""
        stream = self._streams.get(record.trajectory)
        if stream is not None and stream.attempt < record.attempt:
            self._drop([record.trajectory])
            stream = None
        if stream is None:
            if isinstance(record, End):
                return
            stream = self._new(record)
        self._streams.move_to_end(record.trajectory)
        if stream.attempt != record.attempt or stream.left:
            return
        if isinstance(record, End):
            if record.kind not in VALID:
                self._drop([record.trajectory])
            elif stream.heard == record.turns:
                stream.whole = True
                self._release_if_scored(stream)
        elif record.turn.turn == stream.heard:
            stream.add(record.turn)
            self._lanes.resize(stream)
            self._enqueue(stream)

    def _new(self, first: Segment) -> Stream:
        stream = self._streams[first.trajectory] = Stream(first.trajectory, first.group, first.attempt)
        if len(self._streams) > self._most:
            self._drop([next(iter(self._streams))])
        return stream

    def claimed(self, members: Iterable[Trajectory]) -> int:
        """Their group was claimed: what is missing of them goes first. Returns tokens scored by now."""
        ahead = 0
        for member in members:
            stream = self._of(member)
            if stream is None:
                continue
            ahead += sum(len(scores) for scores in stream.scores)
            stream.whole = stream.claimed = True
            if stream.scorer < 0 and not stream.scores:
                self._leave(stream, "no scorer had room for it until its group was claimed")
                continue
            for turn in member.turns[stream.heard :]:
                stream.add(turn)
            self._release_if_scored(stream)
            self._enqueue(stream)
        self._place()
        return ahead

    async def scores_of(self, member: Trajectory) -> Floats | None:
        """Scores of its sampled tokens, in order, when they are there; None if it was left."""
        stream = self._of(member)
        if stream is None:
            return None
        while len(stream.scores) < len(member.turns):
            if stream.left:
                return None
            stream.changed.clear()
            await stream.changed.wait()  # ends with the trajectory: whoever needs the scores has a deadline
        return np.concatenate(stream.scores) if stream.scores else np.empty(0, np.float32)

    def forget(self, groups: Iterable[str]) -> None:
        """These groups were trained or dropped."""
        gone = set(groups)
        self._drop([stream.name for stream in self._streams.values() if stream.group in gone])

    def _of(self, member: Trajectory) -> Stream | None:
        stream = self._streams.get(member.id)
        usable = stream is not None and stream.attempt == member.attempt and not stream.left
        return stream if usable else None

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            stream = self._streams.pop(name)
            self._lanes.release(stream)
            stream.leave()
        self._place()

    def _leave(self, stream: Stream, why: str) -> None:
        self._lanes.release(stream)
        stream.leave()
        self._trace("segments_left", {"trajectory": stream.name, "why": why[:300]})

    def _release_if_scored(self, stream: Stream) -> None:
        """No turn will follow and all have scores: its scorer need not keep the prefix."""
        if stream.whole and not stream.asked and not stream.waiting and stream.scorer >= 0:
            self._lanes.release(stream)
            self._place()

    # -- who has it ---------------------------------------------------------------------

    def _take_back(self, stream: Stream) -> None:
        """Its scorer is gone, or gave no answer: what was asked waits again."""
        self._lanes.release(stream)
        stream.waiting[:0] = stream.asked
        stream.asked.clear()

    def _place(self) -> None:
        """Room may have come for trajectories that wait for it."""
        for stream in self._lanes.outside():
            if not self._lanes.has_room:
                break
            self._enqueue(stream)

    def _enqueue(self, stream: Stream) -> None:
        """Let it be asked for as soon as its scorer is free, if nothing of it is under way."""
        if stream.left or stream.asked or not stream.waiting or not self._lanes.enter(stream):
            return
        scorer = stream.scorer
        if scorer not in self._tasks:
            self._tasks[scorer] = task = asyncio.create_task(self._serve(scorer))
            task.add_done_callback(self._ended)

    # -- asking -------------------------------------------------------------------------

    async def _serve(self, scorer: int) -> None:
        """Request after request, until nobody waits."""
        try:
            while chosen := self._next(scorer):
                asks = [Ask(stream.name, found.contexts) for stream, found in chosen]
                done = self._lanes.done(scorer)
                try:
                    told = await self._patience.answer(
                        scorer, self.port_of(scorer).score_segments(asks, done)
                    )
                except asyncio.CancelledError:
                    raise
                except Exception as error:
                    await self._failed(scorer, [stream for stream, _ in chosen], error)
                    continue
                self._spent(told)
                self._lanes.answered(scorer, told.room)
                for (stream, found), scores, tokens in zip(chosen, told.values, told.tokens, strict=True):
                    self._book(stream, found, scores, tokens)
        finally:
            if self._tasks.get(scorer) is asyncio.current_task():
                del self._tasks[scorer]

    def _next(self, scorer: int) -> list[tuple[Stream, Unfolded]]:
        """Whom to ask for next, with the contexts of all turns that wait: a request's worth of new tokens."""
        chosen: list[tuple[Stream, Unfolded]] = []
        tokens = 0
        while tokens < self._tokens and (stream := self._lanes.pop(scorer)) is not None:
            if stream.run > WASTE * stream.rows and not stream.claimed:
                self._leave(stream, f"{stream.run} tokens were run for rows of {stream.rows}")
                continue
            try:
                found = unfold(stream.base, [call for turn in stream.waiting for call in turn.calls])
            except ValueError as error:  # compiling the group will say so, too
                self._leave(stream, str(error))
                continue
            tokens += stream.new_tokens + (0 if stream.held else len(stream.base))
            stream.asked, stream.waiting = stream.waiting, []
            chosen.append((stream, found))
        return chosen

    def _book(self, stream: Stream, found: Unfolded, scores: Floats, tokens: int) -> None:
        """Scores of all turns that were asked for."""
        if stream.left:
            return
        counts = [sampled([turn]) for turn in stream.asked]
        stream.scored(np.split(scores, np.cumsum(counts)[:-1]), found)
        stream.run += tokens
        self._release_if_scored(stream)
        self._enqueue(stream)

    async def _failed(self, scorer: int, streams: Sequence[Stream], error: Exception) -> None:
        """No answer: its trajectories go to others, or to it again. Who hangs has nothing new for a while."""
        told = {"scorer": scorer, "trajectories": len(streams), "error": repr(error)[:300]}
        self._trace("segments_asked_again", told)
        self.failures += 1
        self._lanes.failed(
            scorer, self.config.scorer.timeout_s if isinstance(error, TimeoutError) else REST_S
        )
        for stream in streams:
            stream.tries += 1
            if stream.tries >= TRIES and not stream.left:
                self._leave(stream, f"no answer to {TRIES} requests")
        mine = [stream for stream in self._streams.values() if stream.scorer == scorer]
        for stream in mine:
            self._take_back(stream)
        for stream in mine:
            self._enqueue(stream)
        await asyncio.sleep(RETRY_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
