"""The feed: ready groups in, batches out; the only consumer of the queue's ready groups.

A background task claims and loads groups as they become ready, so that reading overlaps the
learner's step. ``form`` waits for enough of them, checks each group's lag *now* (time in the
queue counts), drops the stale ones whole, and takes the oldest first. Enough is ``run.groups_per_step``, or
as few as the controller allows when waiting for more would train fewer groups a second
(``cluster.pipeline.batch_range``).
"""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import Config
from cluster.errors import StaleBatch
from cluster.pipeline import batch_range
from cluster.ports import Queue
from cluster.staleness import lag
from cluster.types import Group, StepRecord

CLAIM_WAIT_S = 0.25
LOOK_EVERY_S = 1.0
GAP_WEIGHT = 0.2
"""Of the newest gap between groups in the running mean: five gaps carry two thirds."""
STOP_S = 5.0
REMEMBERED = 100_000
"""Groups taken lately: a delivery that the server repeats is one of these, and no job holds as many."""


@dataclass(frozen=True)
class Batch:
    """Groups of one optimizer step, in batch order, with what was seen when it formed."""

    record: StepRecord
    groups: tuple[Group, ...]
    waited_s: float = 0.0  # from the call to ``form`` to enough groups: the learner's wait for data
    head_age_s: float = 0.0
    micro_batches: int = 1  # full ones that the batch makes, rounded up
    ras: int = 1  # of which were ready when the wait began
    tprm_s: float = 0.0  # mean arrival gap of the later ones (0 if none)


@dataclass(frozen=True)
class Pace:
    """How fast the learner is, to weigh waiting against starting: see ``batch_range``."""

    train_s_per_group: float = 0.0
    fixed_s: float = 0.0


@dataclass(frozen=True)
class _Ready:
    group: Group
    arrived: float


def _nothing(group: Group) -> None:
    """Nobody wants to know of a group that arrives."""


async def _never() -> bool:
    """Nobody calls."""
    return False


NO_PACE = Pace()


class Feed:
    """Claims, checks and orders groups for the learner."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        consumer: str,
        on_dropped: Callable[[list[str]], Any],
        trace: Callable[[str, dict[str, Any]], None],
        on_ready: Callable[[Group], None] = _nothing,
    ) -> None:
        self.config = config
        self.on_ready = on_ready
        self.queue = queue
        self.consumer = consumer
        self.on_dropped = on_dropped
        self.trace = trace
        self._ready: list[_Ready] = []
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taken: dict[str, None] = {}  # newest last
        self._stopping = False
        self._last = time.monotonic()  # when the newest groups arrived
        self._gap = 0.0  # mean seconds between groups; 0 before the first

    async def start(self, planned: set[str]) -> None:
        """Take over what an earlier feeder had claimed (but not ``planned`` groups); begin."""
        self._taken |= dict.fromkeys(planned)
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
        self._taken |= dict.fromkeys(fresh)
        for old in list(itertools.islice(self._taken, max(0, len(self._taken) - REMEMBERED))):
            del self._taken[old]
        now = time.monotonic()
        self._pace(now, len(fresh))
        for group in await self.queue.load(fresh):
            self._ready.append(_Ready(group, now))
            self.trace("claimed", {"group": group.id, "oldest": group.oldest})
            self.on_ready(group)
        self._arrived.set()

    def _pace(self, now: float, count: int) -> None:
        gap = (now - self._last) / count
        self._gap += GAP_WEIGHT * (gap - self._gap) if self._gap else gap
        self._last = now

    async def form(
        self,
        version: int,
        least: int = 0,
        pace: Pace = NO_PACE,
        called: Callable[[], Awaitable[bool]] = _never,
        begun: float | None = None,
    ) -> Batch | None:
        """Wait for a batch to train at ``version``; never returns a group beyond the bound.

        ``least`` (0: groups_per_step) groups may be enough. A long wait asks ``called`` now and then, and
        ends with None if it says so; the next call goes on with it (``begun``, monotonic). Raises
        TimeoutError when no batch forms within ``run.deadline_s``, and whatever ended the background task.
        """
        size = self.config.run.groups_per_step
        least = min(least, size) if least > 0 else size
        begun = time.monotonic() if begun is None else begun
        look_at = time.monotonic() + LOOK_EVERY_S
        await self._drop_stale(version)
        while not self._enough(least, size, pace):
            if time.monotonic() >= look_at:
                if await called():
                    return None
                look_at = time.monotonic() + LOOK_EVERY_S
                continue  # groups may have come meanwhile
            await self._wait_for_arrival(begun + self.config.run.deadline_s, len(self._ready) >= least)
            await self._drop_stale(version)
        now = time.monotonic()
        self._ready.sort(key=lambda ready: (ready.group.oldest, ready.group.id))
        chosen, self._ready = self._ready[:size], self._ready[size:]
        groups = tuple(ready.group for ready in chosen)
        micro, ras, gap = self._readiness(chosen, begun)
        return Batch(
            record=step_record(version, groups, self.config.run.max_lag),
            groups=groups,
            waited_s=now - begun,
            head_age_s=now - min(r.arrived for r in chosen),
            micro_batches=micro,
            ras=ras,
            tprm_s=gap,
        )

    def _enough(self, least: int, size: int, pace: Pace) -> bool:
        """There are enough groups to start with."""
        ready = len(self._ready)
        if ready >= size or ready < least:
            return ready >= size
        gap = max(self._gap, time.monotonic() - self._last)  # silence is a gap that has not ended yet
        return ready >= batch_range(0, gap, pace.train_s_per_group, least, size, pace.fixed_s)

    def _readiness(self, chosen: list[_Ready], begun: float) -> tuple[int, int, float]:
        """(micro-batches, ready at the start, mean gap of the later ones), by tokens."""
        learner = self.config.learner
        full = learner.row_tokens * learner.micro_rows
        sizes = [tokens_of(ready.group) for ready in chosen]
        micro = max(1, math.ceil(sum(sizes) / full))
        late = [ready.arrived for ready in chosen if ready.arrived > begun]
        if not late:
            return micro, micro, 0.0
        early = sum(n for n, ready in zip(sizes, chosen, strict=True) if ready.arrived <= begun)
        ras = min(micro - 1, early // full)
        return micro, ras, (max(late) - begun) / (micro - ras)

    def depth(self) -> int:
        """Groups claimed and waiting here."""
        return len(self._ready)

    async def _wait_for_arrival(self, deadline: float, may_start: bool) -> None:
        """Until a group arrives or it is time to look: soon if a batch could start with what is there."""
        assert self._task is not None
        self._arrived.clear()
        arrival = asyncio.ensure_future(self._arrived.wait())
        left = deadline - time.monotonic()
        done, _ = await asyncio.wait(
            {arrival, self._task},
            timeout=min(max(0.0, left), CLAIM_WAIT_S if may_start else LOOK_EVERY_S),
            return_when=asyncio.FIRST_COMPLETED,
        )
        arrival.cancel()
        if self._task in done:
            self._task.result()
        if not done and time.monotonic() >= deadline:
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


def tokens_of(group: Group) -> int:
    """Tokens of a group's rows (a context that was cut is counted once)."""
    calls = (call for member in group.members for turn in member.turns for call in turn.calls)
    return sum(len(call.added) + len(call.output) for call in calls) // 4
