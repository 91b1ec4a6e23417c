"""Small bookkeeping beside an engine: completions waiting for their caller, and busy time."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.types import Completion


@dataclass(slots=True)
class _Box:
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    completions: list[Completion] = field(default_factory=list)
    touched: float = 0.0


class Mailboxes:
    """Completions by caller. A box that its caller left is forgotten after ``keep_s``."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._boxes: dict[str, _Box] = {}

    def put(self, caller: str, completion: Completion) -> None:
        """Leave a completion for its caller and wake it."""
        box = self._box(caller)
        box.completions.append(completion)
        box.ready.set()

    async def take(self, caller: str, wait_s: float) -> list[Completion]:
        """Everything that came since the last call, waiting at most ``wait_s`` for the first."""
        box = self._box(caller)
        box.touched = self._clock()
        if not box.completions and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await box.ready.wait()
            except TimeoutError:
                return []
        box.touched = self._clock()
        taken, box.completions = box.completions, []
        box.ready.clear()
        return taken

    def touch(self, caller: str) -> None:
        """The caller is alive; it has a box from now on."""
        self._box(caller).touched = self._clock()

    def knows(self, caller: str) -> bool:
        """Has it a box that is not forgotten?"""
        return caller in self._boxes

    def silent_s(self, caller: str) -> float:
        """Seconds since it was last heard of; 0 for one without a box."""
        box = self._boxes.get(caller)
        return self._clock() - box.touched if box is not None else 0.0

    def prune(self) -> int:
        """Forget boxes untouched for ``keep_s``; returns how many completions went with them."""
        limit = self._clock() - self._keep_s
        gone = [caller for caller, box in self._boxes.items() if box.touched < limit]
        return sum(len(self._boxes.pop(caller).completions) for caller in gone)

    def _box(self, caller: str) -> _Box:
        box = self._boxes.get(caller)
        if box is None:
            box = self._boxes[caller] = _Box(touched=self._clock())
        return box


class BusyTime:
    """Union of request intervals, merged as they end, at most ``limit`` of them kept."""

    def __init__(self, limit: int = 1024) -> None:
        self._intervals: deque[tuple[float, float]] = deque(maxlen=limit)

    def add(self, start: float, end: float) -> None:
        """Add ``[start, end]`` (seconds). Ends come in order, or nearly so."""
        while self._intervals and self._intervals[-1][1] >= start:
            earlier, later = self._intervals.pop()
            start, end = min(start, earlier), max(end, later)
        self._intervals.append((start, end))

    def drain(self) -> tuple[tuple[float, float], ...]:
        """The disjoint intervals since the last drain, in order."""
        drained = tuple(self._intervals)
        self._intervals.clear()
        return drained
