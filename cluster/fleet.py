"""The generators of the job: who belongs, who is healthy, which weights each holds. The controller's half
that looks at generators; it owns the epoch and the version.

::

    join --> [slot] --watch: health, every second--> ready? --behind?--> load_weights --ack--> healthy
    leave -> the slot is put away with its counters; the table loses the name under a new epoch

Whoever waits for a change here (``changed``) is woken by an acknowledgement, a new set of healthy
generators, new weights, or ``notify``.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster import codec
from cluster.config import Config
from cluster.errors import WeightsFailed
from cluster.messages import GeneratorHealth, GeneratorRow, Published, Table
from cluster.ports import Queue
from cluster.types import Weights

HEALTH_EVERY_S = 1.0
HEALTH_DEADLINE_S = 10.0
REFRESH_DEADLINE_S = 1.0
LOAD_DEADLINE_S = 60.0
LOAD_RETRIES = 3
"""Weight loads in a row that failed, or hung, before a generator is asked to restart."""


class GeneratorPort(Protocol):
    """What the controller asks of a generator."""

    async def health(self) -> GeneratorHealth:
        """State now; raises when the process is gone."""

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Load and verify; returns the live version. Raises WeightsFailed."""

    async def clear(self, epoch: int) -> None:
        """It has joined or left: forget all tasks. Raises StaleEpoch for an older order."""

    async def restart(self, reason: str) -> None:
        """End the process; its supervisor starts a new one."""


Connect = Callable[[str], GeneratorPort]
"""A generator's port by name; raises while its actor does not exist."""
Trace = Callable[[str, dict[str, Any]], None]


_COUNTERS = ("tokens", "prompt_tokens", "cached_tokens", "grown_tokens", "sync_s", "demand_s", "parks",
             "resumes", "moved")  # fmt: skip


@dataclass
class Totals:
    """Counters since the controller's start, over all processes that served a slot."""

    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    grown_tokens: int = 0
    sync_s: float = 0.0
    demand_s: float = 0.0
    parks: int = 0
    resumes: int = 0
    moved: int = 0
    busy_s: float = 0.0
    starved_s: dict[str, float] = field(default_factory=dict)  # by cause, as it was when reported

    def grow(self, new: GeneratorHealth, old: GeneratorHealth | None) -> None:
        """Take what a process counted since its report ``old``."""
        for name in _COUNTERS:
            before = getattr(old, name) if old is not None else 0
            setattr(self, name, getattr(self, name) + getattr(new, name) - before)
        self.busy_s += sum(end - start for start, end in new.busy)

    def add(self, other: "Totals") -> None:
        """Sum of two."""
        for name in (*_COUNTERS, "busy_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for cause, seconds in other.starved_s.items():
            self.starved_s[cause] = self.starved_s.get(cause, 0.0) + seconds

    def admission(self) -> dict[str, int]:
        """What became of tasks' places: the metric ``admission_events``."""
        return {"parked": self.parks, "resumed": self.resumes, "moved": self.moved}


@dataclass
class Slot:
    """One generator as the controller sees it."""

    name: str
    port: GeneratorPort | None = None
    health: GeneratorHealth | None = None
    acked: int = -1
    healthy: bool = False
    failures: int = 0
    restarts: int = 0
    reports: int = 0  # taken
    back: bool = False  # it has just become a member again: what it waited meanwhile is nobody's loss
    unclear: bool = False  # it may know tasks of an earlier membership
    totals: Totals = field(default_factory=Totals)
    busy: list[tuple[float, float]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)  # reports are taken in the order asked for

    @property
    def free(self) -> int:
        """Tokens that its ledger could still promise; 0 if it does not tell."""
        return self.health.free_tokens if self.health else 0

    def note(self, health: GeneratorHealth, cause: str) -> None:
        """Take over a report; a new instance starts from its own version and zero counters."""
        old = self.health
        if old is None or old.instance != health.instance:
            self.restarts += old is not None
            self.acked = health.version if health.ready else -1
            old = None
        elif health.ready and self.acked < 0:
            self.acked = health.version
        totals = self.totals
        totals.grow(health, old)
        starved = health.starved_s - (old.starved_s if old else 0.0)
        if starved > 0 and old is not None and not self.back:  # nor what a process waited before it was known
            totals.starved_s[cause] = totals.starved_s.get(cause, 0.0) + starved
        self.back = False
        self.reports += 1
        self.busy.extend(health.busy)
        self.health = health


class Changed:
    """Wakes all who wait, now. No lock, so a waiter may be cancelled at any moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next ``notify``, or the time is over."""
        event = self._event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


class Fleet:
    """Watches generators; see the module docstring."""

    def __init__(self, config: Config, queue: Queue, connect: Connect, trace: Trace) -> None:
        self.config = config
        self.queue = queue
        self.connect = connect
        self.trace = trace
        self.epoch = 0
        self.version = 0
        self.weights: Weights | None = None
        self.slots: dict[str, Slot] = {}  # members, by name
        self.changed = Changed()
        self.why_idle: Callable[[], str] = lambda: "no_work"  # cause of the seconds a generator starves now
        self._away: dict[str, Slot] = {}
        self._growing = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None
        self._stopping = False

    async def start(self, names: Iterable[str], unclear: Collection[str] = ()) -> None:
        """Restore epoch and weights from the queue, under a new epoch; ``names`` are the members.

        The ``unclear`` ones may know tasks of an earlier membership.
        """
        raw = await self.queue.get("epoch")
        self.epoch = int(raw) if raw else 0
        await self.grow()
        raw = await self.queue.get("weights")
        if raw:
            self.weights = codec.decode(raw, Weights)
            self.version = self.weights.version
        self.slots = {name: Slot(name, unclear=name in unclear) for name in names}

    async def run(self) -> None:
        """Watch the members, whoever they are, until stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for slot in self.slots.values():
                    slot.task = group.create_task(self._watch(slot))
                while not self._stopping:
                    await self.changed.wait(HEALTH_EVERY_S)
                for slot in self.slots.values():
                    if slot.task is not None:
                        slot.task.cancel()  # it may be waiting for a generator that hangs
        finally:
            self._group = None

    async def stop(self) -> None:
        """End the loops."""
        self._stopping = True
        self.notify()

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self.changed.notify()

    async def grow(self) -> int:
        """A new epoch, durable before it is used, and given once."""
        async with self._growing:
            epoch = self.epoch + 1
            await self.queue.put("epoch", str(epoch).encode())
            self.epoch = epoch
            return epoch

    # -- members ------------------------------------------------------------------------

    async def join(self, name: str) -> None:
        """``name`` generates from now on: it loads the published weights, then counts as healthy."""
        if name in self.slots:
            return
        slot = self._away.pop(name, None) or Slot(name)
        slot.port, slot.healthy, slot.acked, slot.back, slot.unclear = None, False, -1, True, True
        self.slots[name] = slot
        await self.grow()
        if self._group is not None and not self._stopping:
            slot.task = self._group.create_task(self._watch(slot))
        self.notify()

    async def leave(self, name: str, why: str) -> None:
        """``name`` generates no more: requests in flight there are asked elsewhere once the table says so."""
        slot = self.slots.pop(name, None)
        if slot is None:
            return
        self._away[name] = slot
        if slot.task is not None:
            slot.task.cancel()
            await asyncio.gather(slot.task, return_exceptions=True)
            slot.task = None
        await self._tell("generator_left", slot, {"why": why})
        if slot.port is not None and self._group is not None and not self._stopping:
            self._group.create_task(self._clear_late(slot.port, name, self.epoch))

    # -- facts --------------------------------------------------------------------------

    def table(self) -> Table:
        """The generator table of this epoch."""
        rows = tuple(
            GeneratorRow(n, s.healthy, s.acked, s.free, s.reports) for n, s in sorted(self.slots.items())
        )
        return Table(epoch=self.epoch, generators=rows)

    def acknowledged(self) -> int:
        """Lowest version acknowledged among healthy generators; -1 if none is healthy."""
        return min((s.acked for s in self.slots.values() if s.healthy), default=-1)

    def totals(self) -> Totals:
        """Sums over all generators that ever were members."""
        total = Totals()
        for slot in (*self.slots.values(), *self._away.values()):
            total.add(slot.totals)
        return total

    def tasks(self) -> dict[str, int]:
        """Tasks at the healthy generators by state, as last reported: the metric ``tasks``."""
        told = [slot.health for slot in self.slots.values() if slot.healthy and slot.health is not None]
        return {state: sum(getattr(h, state) for h in told) for state in ("resident", "parked", "queued")}

    def take_busy(self) -> list[tuple[float, float]]:
        """Busy intervals reported since the last call, of all generators, unsorted."""
        taken: list[tuple[float, float]] = []
        for slot in (*self.slots.values(), *self._away.values()):
            taken += slot.busy
            slot.busy.clear()
        return taken

    # -- weights and health -------------------------------------------------------------

    async def publish(self, published: Published) -> None:
        """New weights exist: remember the handle durably, then let each generator fetch them."""
        if published.weights.version < self.version:
            raise WeightsFailed(f"version {published.weights.version} published after {self.version}")
        await self.queue.put("weights", codec.encode(published.weights))
        self.weights, self.version = published.weights, published.weights.version
        self.trace("published", {"version": self.version})

    async def _watch(self, slot: Slot) -> None:
        """Health, weights and table membership of one generator."""
        while not self._stopping:
            before = slot.healthy
            try:
                if slot.unclear:
                    await self._clear(slot)
                health, port = await self._ask(slot)
                if health.ready and self._behind(slot):
                    await self._load(slot, port)
                lag = max(1, self.config.run.max_lag)
                slot.healthy = health.ready and slot.acked >= self.version - lag
            except Exception as error:  # the port's process may die in any way
                self._unhealthy(slot, error)
            if slot.healthy != before:
                await self._tell("generator_joined" if slot.healthy else "generator_left", slot, {})
            await self._wait_for_weights(slot)

    async def _ask(self, slot: Slot) -> tuple[GeneratorHealth, GeneratorPort]:
        async with slot.asking:
            port = slot.port = slot.port or self.connect(slot.name)
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                health = await port.health()
            slot.note(health, self.why_idle())
            return health, port

    async def _clear(self, slot: Slot) -> None:
        """One that was away: its tasks have moved or ended meanwhile, it shall not keep their places."""
        port = slot.port = slot.port or self.connect(slot.name)
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            await port.clear(self.epoch)
        slot.unclear = False

    async def _clear_late(self, port: GeneratorPort, name: str, epoch: int) -> None:
        """One that left stops its work. It may be dead: if it comes back, it is cleared then."""
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                await port.clear(epoch)
        except Exception as error:  # any failure of a remote call
            self.trace("not_cleared", {"generator": name, "epoch": epoch, "error": repr(error)[:300]})

    async def refresh(self) -> None:
        """Ask the healthy generators now, so that totals are of this moment. One that is late is left out."""
        asked = [asyncio.create_task(self._ask(slot)) for slot in self.slots.values() if slot.healthy]
        if asked:
            _, late = await asyncio.wait(asked, timeout=REFRESH_DEADLINE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)  # who failed is found by its own watch

    def _behind(self, slot: Slot) -> bool:
        """Newer weights lie ready; a handle without a place waits for being published again."""
        weights = self.weights
        return weights is not None and bool(weights.location) and slot.acked < weights.version

    async def _load(self, slot: Slot, port: GeneratorPort) -> None:
        weights = self.weights
        assert weights is not None
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                slot.acked = await port.load_weights(weights, self.epoch)
        except (WeightsFailed, TimeoutError) as error:
            slot.failures += 1
            why = str(error) or f"weights were not loaded within {LOAD_DEADLINE_S} s"
            self.trace("load_failed", {"generator": slot.name, "error": why})
            if slot.failures >= LOAD_RETRIES:
                slot.failures = 0
                async with asyncio.timeout(HEALTH_DEADLINE_S):
                    await port.restart(why)
            raise
        slot.failures = 0
        self.trace("acknowledged", {"generator": slot.name, "version": slot.acked})
        self.notify()

    def _unhealthy(self, slot: Slot, error: BaseException) -> None:
        if slot.healthy:
            self.trace("generator_lost", {"generator": slot.name, "error": repr(error)[:300]})
        slot.healthy = False
        slot.port = None  # another process may serve the name by now

    async def _tell(self, event: str, slot: Slot, fields: dict[str, Any]) -> None:
        """The set of healthy generators has changed: a new epoch."""
        await self.grow()
        known = {"generator": slot.name, "epoch": self.epoch, "version": slot.acked}
        self.trace(event, {**known, **fields})
        self.notify()

    async def _wait_for_weights(self, slot: Slot) -> None:
        """Sleep until the next health check, or until weights newer than this slot's appear."""
        deadline = time.monotonic() + HEALTH_EVERY_S
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            if slot.healthy and self._behind(slot):
                return
            await self.changed.wait(left)
