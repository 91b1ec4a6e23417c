"""The feed: ready groups in, batches out; the only consumer of the queue's ready groups.

A background task claims and loads groups as they become ready, so that reading overlaps the
learner's step. ``form`` waits for enough of them, checks each group's lag *now* (time in the
queue counts), drops the stale ones whole, and takes the oldest first.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import Config
from cluster.errors import StaleBatch
from cluster.ports import Queue
from cluster.staleness import lag
from cluster.types import Group, StepRecord

CLAIM_WAIT_S = 0.25
STOP_S = 5.0


@dataclass(frozen=True)
class Batch:
    """Groups of one optimizer step, in batch order, with what was seen when it formed."""

    record: StepRecord
    groups: tuple[Group, ...]
    waited_s: float  # from the call to ``form`` to enough groups: the learner's wait for data
    ready_at_start: int  # groups that were ready when the wait began
    mean_gap_s: float  # mean arrival gap of the later ones (0 if none)
    head_age_s: float


@dataclass(frozen=True)
class _Ready:
    group: Group
    arrived: float


class Feed:
    """Claims, checks and orders groups for the learner."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        consumer: str,
        on_dropped: Callable[[list[str]], Any],
        trace: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.config = config
        self.queue = queue
        self.consumer = consumer
        self.on_dropped = on_dropped
        self.trace = trace
        self._ready: list[_Ready] = []
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taken: set[str] = set()
        self._stopping = False

    async def start(self, planned: set[str]) -> None:
        """Take over what an earlier feeder had claimed (but not ``planned`` groups); begin."""
        self._taken |= planned
        for group in await self.queue.reclaim(self.consumer):
            await self._admit([group])
        self._task = asyncio.create_task(self._gather())

    async def stop(self) -> None:
        """End the background task: it looks at the flag between claims, and is cancelled if late."""
        self._stopping = True
        if self._task is None:
            return
        for _ in range(2):
            done, _ = await asyncio.wait({self._task}, timeout=STOP_S)
            if done:
                break
            self._task.cancel()

    async def _gather(self) -> None:
        most = 2 * self.config.capacity + self.config.run.groups_per_step
        while not self._stopping:
            room = most - len(self._ready)
            if room <= 0:
                await asyncio.sleep(CLAIM_WAIT_S)
                continue
            claimed = await self.queue.claim(self.consumer, room, CLAIM_WAIT_S)
            await self._admit(claimed)

    async def _admit(self, claimed: list[str]) -> None:
        fresh = [group for group in claimed if group not in self._taken]
        if not fresh:
            return
        self._taken.update(fresh)
        now = time.monotonic()
        for group in await self.queue.load(fresh):
            self._ready.append(_Ready(group, now))
            self.trace("claimed", {"group": group.id, "oldest": group.oldest})
        self._arrived.set()

    async def form(self, version: int) -> Batch:
        """Wait for a batch to train at ``version``; never returns a group beyond the bound.

        Raises TimeoutError when no batch forms within ``run.deadline_s``, and whatever ended
        the background task.
        """
        size = self.config.run.groups_per_step
        begun = time.monotonic()
        await self._drop_stale(version)
        at_start = len(self._ready)
        while len(self._ready) < size:
            await self._wait_for_arrival(begun + self.config.run.deadline_s)
            await self._drop_stale(version)
        now = time.monotonic()
        self._ready.sort(key=lambda ready: (ready.group.oldest, ready.group.id))
        chosen, self._ready = self._ready[:size], self._ready[size:]
        later = [r.arrived for r in chosen if r.arrived > begun]
        gap = (max(later) - begun) / len(later) if later else 0.0
        groups = tuple(ready.group for ready in chosen)
        return Batch(
            record=step_record(version, groups, self.config.run.max_lag),
            groups=groups,
            waited_s=now - begun,
            ready_at_start=min(at_start, size),
            mean_gap_s=gap,
            head_age_s=now - min(r.arrived for r in chosen),
        )

    def depth(self) -> int:
        """Groups claimed and waiting here."""
        return len(self._ready)

    async def _wait_for_arrival(self, deadline: float) -> None:
        assert self._task is not None
        self._arrived.clear()
        arrival = asyncio.ensure_future(self._arrived.wait())
        left = deadline - time.monotonic()
        done, _ = await asyncio.wait(
            {arrival, self._task}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
        )
        arrival.cancel()
        if self._task in done:
            self._task.result()
        if not done:
            raise TimeoutError(
                f"no batch within run.deadline_s = {self.config.run.deadline_s:.0f} s: "
                f"{len(self._ready)} of {self.config.run.groups_per_step} groups ready"
            )

    async def _drop_stale(self, version: int) -> None:
        bound = self.config.run.max_lag
        stale = [r for r in self._ready if lag(training=version, oldest=r.group.oldest) > bound]
        if not stale:
            return
        ids = [ready.group.id for ready in stale]
        self._ready = [ready for ready in self._ready if ready not in stale]
        await self.queue.close(ids, "stale")
        self.trace("stale", {"groups": ids, "version": version})
        await self.on_dropped(ids)


def step_record(version: int, groups: tuple[Group, ...], bound: int) -> StepRecord:
    """The step log entry of training ``groups`` at ``version``. Raises StaleBatch beyond the bound."""
    lags = tuple(lag(training=version, oldest=group.oldest) for group in groups)
    if max(lags) > bound:
        raise StaleBatch(f"lag {max(lags)} beyond run.max_lag = {bound} in step {version + 1}")
    return StepRecord(
        step=version + 1,
        groups=tuple(group.id for group in groups),
        trajectories=tuple(member.id for group in groups for member in group.members),
        lags=lags,
    )
