"""Trajectories that are scored as they stream, and the scorers that have room for them. No waiting here."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cluster.types import Turn
from learner.segments import Floats, Ints, Unfolded

REST_S = 5.0
"""A scorer whose request failed gets no new trajectories for so long, while there are others."""
WEIGHT = 0.1
"""Of the newest length in the running mean of whole trajectories: ten carry two thirds."""


@dataclass(eq=False)
class Stream:
    """One attempt of a trajectory: first the turns of ``scores``, then those ``asked``, then ``waiting``."""

    name: str
    group: str
    attempt: int
    scorer: int = -1  # that has room promised for it
    promised: int = 0  # tokens of that room
    base: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # ids after the last scored turn
    scores: list[Floats] = field(default_factory=list)
    asked: list[Turn] = field(default_factory=list)
    waiting: list[Turn] = field(default_factory=list)
    rows: int = 0  # tokens that whole rows would have cost so far
    run: int = 0  # tokens that were run forward
    tries: int = 0  # requests that failed since the last answer
    whole: bool = False  # no turn will follow
    claimed: bool = False  # with its group
    left: bool = False
    held: bool = False  # its scorer had the prefix when it last answered
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _open: int = 0  # tokens of the turns without scores

    @property
    def heard(self) -> int:
        """Turns known."""
        return len(self.scores) + len(self.asked) + len(self.waiting)

    @property
    def new_tokens(self) -> int:
        """Of the turns that wait."""
        return _tokens(self.waiting)

    @property
    def length(self) -> int:
        """Tokens of its context, as far as it is heard of (more, if it is being cut)."""
        return len(self.base) + self._open

    def add(self, turn: Turn) -> None:
        """Its next turn."""
        self.waiting.append(turn)
        self._open += _tokens([turn])

    def scored(self, scores: list[Floats], found: Unfolded) -> None:
        """Of the turns that were asked."""
        self.scores += scores
        self._open -= _tokens(self.asked)
        self.asked = []
        self.base = found.reached
        self.rows += found.rows
        self.tries = 0
        self.held = True
        self.changed.set()

    def leave(self) -> None:
        """Its rows are scored whole, if at all."""
        self.left = True
        self.waiting.clear()
        self.changed.set()


def sampled(turns: Iterable[Turn]) -> int:
    """Tokens that the policy sampled in these turns."""
    return sum(len(call.output) for turn in turns for call in turn.calls) // 4


def _tokens(turns: Iterable[Turn]) -> int:
    return sum(len(call.added) + len(call.output) for turn in turns for call in turn.calls) // 4


@dataclass
class _Lane:
    """One scorer: who waits for it, and its room in tokens."""

    queue: OrderedDict[Stream, None] = field(default_factory=OrderedDict)
    room: int | None = None  # unknown before its first answer
    promised: int = 0
    done: dict[str, None] = field(default_factory=dict)  # trajectories that it need not keep, to be told
    rests_until: float = 0.0


class Lanes:
    """Which scorer has which trajectory.

    One is promised the room that whole ones take in the mean, more if it is longer. A scorer that has none
    takes one that fits as it is.
    """

    def __init__(self) -> None:
        self.scorers: dict[int, _Lane] = {}
        self._outside: OrderedDict[Stream, None] = OrderedDict()  # wait for room, oldest first
        self._mean = 0.0

    def assign(self, scorers: Iterable[int]) -> list[int]:
        """These score from now on; returns those that do not any more: release their trajectories."""
        wanted = set(scorers)
        gone = [scorer for scorer in self.scorers if scorer not in wanted]
        for scorer in gone:
            del self.scorers[scorer]
        for scorer in sorted(wanted - set(self.scorers)):
            self.scorers[scorer] = _Lane()
        return gone

    def outside(self) -> list[Stream]:
        """Who waits for room, the oldest first; nobody if nobody scores."""
        return list(self._outside) if self.scorers else []

    def enter(self, stream: Stream) -> bool:
        """Let it wait for its scorer; a new one needs room. False if nobody has any."""
        if stream.scorer < 0 and not self._bind(stream):
            self._outside.setdefault(stream)
            return False
        self._outside.pop(stream, None)
        queue = self.scorers[stream.scorer].queue
        queue.setdefault(stream)
        if stream.claimed:
            queue.move_to_end(stream, last=False)
        return True

    def _bind(self, stream: Stream) -> bool:
        wanted = max(stream.length, int(self._mean))
        fit = {
            s: lane
            for s, lane in self._awake().items()
            if lane.room is None
            or lane.promised + wanted <= lane.room
            or (not lane.promised and stream.length <= lane.room)
            or stream.claimed
        }
        if not fit:
            return False
        stream.scorer = min(fit, key=lambda scorer: (fit[scorer].promised, scorer))
        stream.promised = wanted
        lane = fit[stream.scorer]
        lane.promised += wanted
        lane.done.pop(stream.name, None)
        return True

    @property
    def has_room(self) -> bool:
        """A trajectory that is short enough, and not claimed, would find a scorer."""
        return any(
            lane.room is None or not lane.promised or lane.promised + int(self._mean) <= lane.room
            for lane in self._awake().values()
        )

    def _awake(self) -> dict[int, _Lane]:
        """All, if all rest."""
        now = time.monotonic()
        return {s: lane for s, lane in self.scorers.items() if lane.rests_until <= now} or self.scorers

    def resize(self, stream: Stream) -> None:
        """It has grown: beyond what it was promised, if need be."""
        if stream.scorer in self.scorers and stream.length > stream.promised:
            self.scorers[stream.scorer].promised += stream.length - stream.promised
            stream.promised = stream.length

    def release(self, stream: Stream) -> None:
        """It needs no scorer, or another one."""
        self._outside.pop(stream, None)
        lane = self.scorers.get(stream.scorer)
        if lane is not None:
            lane.queue.pop(stream, None)
            lane.promised -= stream.promised
            lane.done[stream.name] = None
            if stream.whole:
                self._mean += WEIGHT * (stream.length - self._mean) if self._mean else stream.length
        stream.scorer, stream.promised, stream.held = -1, 0, False

    def pop(self, scorer: int) -> Stream | None:
        """Who is next."""
        queue = self.scorers[scorer].queue
        return queue.popitem(last=False)[0] if queue else None

    def done(self, scorer: int) -> list[str]:
        """Trajectories that this scorer need not keep, since the last call."""
        lane = self.scorers[scorer]
        done, lane.done = list(lane.done), {}
        return done

    def answered(self, scorer: int, room: int) -> None:
        """It works, and can keep so many tokens."""
        if (lane := self.scorers.get(scorer)) is not None:
            lane.room, lane.rests_until = room, 0.0

    def failed(self, scorer: int, rest_s: float) -> None:
        """It gave no answer; it may have lost everything."""
        self.scorers[scorer].rests_until = time.monotonic() + rest_s
