"""How a worker's facts leave it: segments to the queue in batches, ends to its own log."""

import asyncio
import json
import logging
import time
from pathlib import Path

from cluster.ports import Queue
from cluster.types import End, Order, Segment

_log = logging.getLogger(__name__)


class SegmentWriter:
    """Gathers segments and appends them together: one round trip per ``window_s``, not per turn.

    ``add`` never waits; ``flush`` returns when everything added before it is stored. Errors of the
    queue (after its own retries) are raised by ``run`` and ``flush``; a batch that failed is kept,
    and repeating it is harmless.
    """

    def __init__(self, queue: Queue, window_s: float = 0.005, most: int = 512) -> None:
        self.appends = 0
        self.refused = 0  # batches with segments of groups that the queue does not know
        self._queue = queue
        self._window_s = window_s
        self._most = most
        self._waiting: list[Segment] = []
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()

    def add(self, segment: Segment) -> None:
        """Hand over one segment."""
        self._waiting.append(segment)
        self._wake.set()

    async def run(self) -> None:
        """Append what comes, until cancelled."""
        while True:
            await self._wake.wait()  # lives as long as its worker, which cancels it
            await asyncio.sleep(self._window_s)
            await self.flush()

    async def flush(self) -> None:
        """Store all that was added so far, in order."""
        async with self._lock:
            self._wake.clear()
            while self._waiting:
                batch = self._waiting[: self._most]
                try:
                    await self._queue.append(batch)
                except KeyError as error:
                    # Groups that the queue no longer knows; the rest of the batch has been stored.
                    self.refused += 1
                    _log.warning("segments of unknown groups are left out: %s", error)
                self.appends += 1
                del self._waiting[: len(batch)]


class EndLog:
    """JSON lines, one per trajectory end, so that the ledger can be held against the workers' word.

    Written before the queue is told: the log may know an end that a crash kept from the ledger,
    never the reverse.
    """

    def __init__(self, folder: Path | None, worker: str) -> None:
        self.path = folder / f"ends-{worker}.jsonl" if folder is not None else None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, order: Order, ends: list[End]) -> None:
        """Append the ends of one group."""
        if self.path is None:
            return
        now = time.time()
        lines = [
            json.dumps(
                {
                    "time": now,
                    "trajectory": end.trajectory,
                    "group": end.group,
                    "attempt": end.attempt,
                    "purpose": str(order.purpose),
                    "kind": str(end.kind),
                    "reason": end.reason,
                    "detail": end.detail,
                    "turns": end.turns,
                    "outcome": end.outcome,
                }
            )
            for end in ends
        ]
        with self.path.open("a") as file:
            file.write("".join(line + "\n" for line in lines))
