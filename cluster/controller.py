"""The controller: admission, weight propagation, evaluation, and the facts everyone asks for.

::

    worker --pull--> [orders] --+-- evaluation orders (first: they are few and block a phase)
                                +-- lost groups, next attempt        (reconcile, every second)
                                +-- new groups, while allowance > 0  (staleness.allowance)
    feeder --published--> [weights] --per generator--> load_weights --ack--> allowance grows
    health loop --> generator table (epoch grows when the set of healthy generators changes)

``pull`` waits at most ``PULL_WAIT_S`` for something to give; it is woken by an acknowledgement,
a closed group, a lost group or a new evaluation. Everything durable lies in the queue: a
restarted controller reads version, counts and open orders back, grows the epoch, and learns
assignments from the workers' pulls. It speaks only to Protocols.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster import codec
from cluster.assign import Assignments
from cluster.config import Config
from cluster.errors import WeightsFailed
from cluster.evaluation import EvalBook
from cluster.messages import (
    EvalEpisode,
    EvalSummary,
    GeneratorHealth,
    GeneratorRow,
    Grant,
    Published,
    Pull,
    Table,
)
from cluster.metrics import union
from cluster.ports import Queue
from cluster.staleness import allowance
from cluster.types import Order, Purpose, Task, Weights
from cluster.waits import IdleClock

PULL_WAIT_S = 1.0
HEALTH_EVERY_S = 1.0
RECONCILE_EVERY_S = 1.0
FORGOTTEN_S = 3.0  # an order that a worker does not report after this long never arrived
LOAD_RETRIES = 3
"""Failed weight loads in a row before a generator is asked to restart."""


class GeneratorPort(Protocol):
    """What the controller asks of a generator."""

    async def health(self) -> GeneratorHealth:
        """State now; raises when the process is gone."""

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Load and verify; returns the live version. Raises WeightsFailed."""

    async def restart(self, reason: str) -> None:
        """End the process; its supervisor starts a new one."""


TaskSource = Callable[[str, int], Task]
Trace = Callable[[str, dict[str, Any]], None]


@dataclass
class _Slot:
    """One generator as the controller sees it."""

    port: GeneratorPort
    health: GeneratorHealth | None = None
    acked: int = -1
    healthy: bool = False
    failures: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restarts: int = 0
    sync_s: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Given:
    """Who was handed an evaluation order, and when."""

    worker: str
    incarnation: str
    since: float

    def lost(self, pull: Pull, group: str, now: float) -> bool:
        """The worker's process is another one now, or it never got the order."""
        forgotten = group not in pull.running and now - self.since > FORGOTTEN_S
        return pull.incarnation != self.incarnation or forgotten


class Controller:
    """Decides from facts; see the module docstring for the loops."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        tasks: TaskSource,
        generators: Mapping[str, GeneratorPort],
        trace: Trace = lambda event, fields: None,
    ) -> None:
        self.config = config
        self.queue = queue
        self.tasks = tasks
        self.trace = trace
        self.slots = {name: _Slot(port) for name, port in generators.items()}
        self.epoch = 0
        self.version = 0
        self.weights: Weights | None = None
        self.cursor = 0
        self.admission_open = False
        self.assignments = Assignments(config.env.max_attempts)
        self.evaluations = EvalBook()
        self.workers: dict[str, Pull] = {}
        self.idle = IdleClock()
        self._lost_queue: list[Order] = []
        self._eval_given: dict[str, _Given] = {}
        self._open: dict[str, Order] = {}
        self._groups: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._admitting = asyncio.Lock()
        self._stopping = False
        self._last_step: dict[str, Any] = {}

    async def start(self) -> None:
        """Restore from the queue; grow the epoch so that older orders are refused."""
        raw = await self.queue.get("epoch")
        self.epoch = (int(raw) if raw else 0) + 1
        await self.queue.put("epoch", str(self.epoch).encode())
        raw = await self.queue.get("weights")
        if raw:
            self.weights = codec.decode(raw, Weights)
            self.version = self.weights.version
        self._groups = await self.queue.groups()
        self.cursor = sum(self._groups.values())
        self._open = {order.group: order for order in await self.queue.orders()}
        self.assignments.started = time.monotonic()
        raw = await self.queue.get("admission")
        self.admission_open = raw == b"open"
        self.trace("controller_start", {"epoch": self.epoch, "version": self.version})

    async def run(self) -> None:
        """Supervise generators and open groups until stopped."""
        async with asyncio.TaskGroup() as loops:
            for name in self.slots:
                loops.create_task(self._watch(name))
            loops.create_task(self._reconcile())

    async def stop(self) -> None:
        """End the loops; pulls answer with nothing."""
        self._stopping = True
        await self._notify()

    # -- generators ---------------------------------------------------------------------

    def table(self) -> Table:
        """The generator table of this epoch."""
        rows = tuple(GeneratorRow(n, s.healthy, s.acked) for n, s in sorted(self.slots.items()))
        return Table(epoch=self.epoch, generators=rows)

    def acknowledged(self) -> int:
        """Lowest version acknowledged among healthy generators; -1 if none is healthy."""
        return min((s.acked for s in self.slots.values() if s.healthy), default=-1)

    async def publish(self, published: Published) -> None:
        """New weights exist: remember the handle durably, then let each generator fetch them."""
        if published.weights.version < self.version:
            raise WeightsFailed(
                f"version {published.weights.version} published after {self.version}"
            )
        await self.queue.put("weights", codec.encode(published.weights))
        self.weights, self.version = published.weights, published.weights.version
        self.trace("published", {"version": self.version})
        self._groups = await self.queue.groups()
        await self._notify()

    async def _watch(self, name: str) -> None:
        """Health, weights and table membership of one generator."""
        slot = self.slots[name]
        while not self._stopping:
            before = slot.healthy
            try:
                health = await asyncio.wait_for(slot.port.health(), timeout=10.0)
                self._note(slot, health)
                if health.ready and self._behind(slot):
                    await self._load(name, slot)
                slot.healthy = health.ready and slot.acked >= self.version - max(
                    1, self.config.run.max_lag
                )
            except Exception as error:  # the port's process may die in any way
                self._unhealthy(name, slot, error)
            if slot.healthy != before:
                await self._grow_epoch(name, slot)
            await self._wait_for_weights(slot)

    def _behind(self, slot: _Slot) -> bool:
        """Newer weights lie ready; a handle without a place waits for being published again."""
        weights = self.weights
        return weights is not None and bool(weights.location) and slot.acked < weights.version

    def _note(self, slot: _Slot, health: GeneratorHealth) -> None:
        """Take over a report; a new instance starts from its own version and zero counters."""
        old = slot.health
        if old is None or old.instance != health.instance:
            slot.restarts += old is not None
            slot.acked = health.version if health.ready else -1
            old = None
        elif health.ready and slot.acked < 0:
            slot.acked = health.version
        slot.tokens += health.tokens - (old.tokens if old else 0)
        slot.prompt_tokens += health.prompt_tokens - (old.prompt_tokens if old else 0)
        slot.cached_tokens += health.cached_tokens - (old.cached_tokens if old else 0)
        slot.sync_s += health.sync_s - (old.sync_s if old else 0.0)
        slot.busy.extend(health.busy)
        slot.health = health

    async def _load(self, name: str, slot: _Slot) -> None:
        weights = self.weights
        assert weights is not None
        try:
            slot.acked = await slot.port.load_weights(weights, self.epoch)
        except WeightsFailed as error:
            slot.failures += 1
            self.trace("load_failed", {"generator": name, "error": str(error)})
            if slot.failures >= LOAD_RETRIES:
                slot.failures = 0
                await slot.port.restart(str(error))
            raise
        slot.failures = 0
        self.trace("acknowledged", {"generator": name, "version": slot.acked})
        await self._notify()

    def _unhealthy(self, name: str, slot: _Slot, error: BaseException) -> None:
        if slot.healthy:
            self.trace("generator_lost", {"generator": name, "error": repr(error)[:300]})
        slot.healthy = False

    async def _grow_epoch(self, name: str, slot: _Slot) -> None:
        self.epoch += 1
        await self.queue.put("epoch", str(self.epoch).encode())
        event = "generator_joined" if slot.healthy else "generator_left"
        self.trace(event, {"generator": name, "epoch": self.epoch, "version": slot.acked})
        await self._notify()

    async def _wait_for_weights(self, slot: _Slot) -> None:
        """Sleep until the next health check, or until weights newer than this slot's appear."""
        deadline = time.monotonic() + HEALTH_EVERY_S
        async with self._changed:
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                if slot.healthy and self._behind(slot):
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)

    # -- admission ----------------------------------------------------------------------

    async def open_admission(self, is_open: bool) -> None:
        """Start or stop admitting training groups (evaluation phases close it)."""
        self.admission_open = is_open
        await self.queue.put("admission", b"open" if is_open else b"closed")
        self.trace("admission_open" if is_open else "admission_closed", {"version": self.version})
        await self._notify()

    def room(self) -> int:
        """Groups that may be admitted now."""
        acknowledged = self.acknowledged()
        if not self.admission_open or acknowledged < 0:
            return 0
        return allowance(
            max_lag=self.config.run.max_lag,
            groups_per_step=self.config.run.groups_per_step,
            acknowledged=acknowledged,
            steps=self.config.run.steps,
            admitted=self.cursor,
            lost=self._groups.get("lost", 0),
        )

    async def pull(self, pull: Pull) -> Grant:
        """Work for one worker; waits up to ``PULL_WAIT_S`` when there is none."""
        now = time.monotonic()
        self._meet(pull, now)
        deadline = now + PULL_WAIT_S
        free = pull.free
        orders: list[Order] = []
        first_epoch = self.epoch
        while True:
            orders += await self._take(pull, free - sum(len(o.members) for o in orders))
            left = deadline - time.monotonic()
            if orders or free <= 0 or self._stopping or left <= 0 or self.epoch != first_epoch:
                break
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
        cancel = tuple(g for g in pull.running if self._superseded(pull, g))
        self._mark_idle()
        return Grant(orders=tuple(orders), table=self.table(), cancel=cancel)

    def _meet(self, pull: Pull, now: float) -> None:
        """A worker's report: new incarnation, running groups, idle slots."""
        old = self.workers.get(pull.worker)
        if old is not None and old.incarnation != pull.incarnation:
            self.trace("worker_replaced", {"worker": pull.worker})
        self.workers[pull.worker] = pull
        for group, given in list(self._eval_given.items()):
            if given.worker == pull.worker and given.lost(pull, group, now):
                self._eval_given.pop(group)
                self.evaluations.again(group)
        running = {g: a for g, a in pull.running.items() if g in self._open}
        self.assignments.pulled(pull.worker, pull.incarnation, running, now)
        self._mark_idle()

    def _superseded(self, pull: Pull, group: str) -> bool:
        """True when a worker runs an attempt that has been replaced or given up."""
        order = self._open.get(group)
        return order is not None and order.attempt > pull.running[group]

    async def _take(self, pull: Pull, free: int) -> list[Order]:
        """Evaluation first, then lost groups, then new ones."""
        taken: list[Order] = []
        while free > 0 and (order := self.evaluations.next()) is not None:
            self._eval_given[order.group] = _Given(pull.worker, pull.incarnation, time.monotonic())
            taken.append(order)
            free -= 1
        async with self._admitting:
            while free > 0:
                order = await self._next_group()
                if order is None:
                    break
                now = time.monotonic()
                self.assignments.given(order.group, pull.worker, pull.incarnation, now)
                taken.append(order)
                free -= len(order.members)
        return taken

    async def _next_group(self) -> Order | None:
        while self._lost_queue:
            order = self._lost_queue.pop(0)
            if order.group in self._open:
                return order
        if self.room() <= 0:
            return None
        order = self._new_order(self.cursor)
        await self.queue.admit(order)
        self.cursor += 1
        self._open[order.group] = order
        self.trace("admit", {"group": order.group, "version": order.version})
        return order

    def _new_order(self, index: int) -> Order:
        """Group ``index`` of the run: a pure function of the recipe and the cursor."""
        group = f"g{index:07d}"
        return Order(
            group=group,
            task=self.tasks("train", index),
            members=tuple(f"{group}.{i}" for i in range(self.config.run.group_size)),
            temperature=self.config.generator.temperature,
            version=self.acknowledged(),
            seed=self.config.run.seed,
            epoch=self.epoch,
        )

    async def _reconcile(self) -> None:
        """Find open groups that nobody runs; order them again or give them up."""
        while not self._stopping:
            await asyncio.sleep(RECONCILE_EVERY_S)
            async with self._admitting:
                await self._reconcile_once()
            await self._notify()

    async def _reconcile_once(self) -> None:
        orders = await self.queue.orders()
        self._groups = await self.queue.groups()
        self._open = {order.group: order for order in orders}
        waiting = {order.group for order in self._lost_queue}
        mine = [order for order in orders if order.group not in waiting]
        for verdict in self.assignments.reconcile(mine, time.monotonic()):
            order = verdict.order
            self.trace(
                "group_lost",
                {"group": order.group, "reason": verdict.reason, "attempt": order.attempt},
            )
            if verdict.give_up:
                await self.queue.abandon(order.group, verdict.reason)
                self._open.pop(order.group, None)
            elif await self.queue.reorder(order):
                self._open[order.group] = order
                self._lost_queue.append(order)

    async def closed(self, groups: list[str]) -> None:
        """The feeder or a worker ended groups without training: their places are free."""
        for group in groups:
            self._open.pop(group, None)
            self.assignments.finished(group)
        self._groups = await self.queue.groups()
        await self._notify()

    # -- evaluation ---------------------------------------------------------------------

    async def evaluate(self, suite: str, mode: str, tasks: int, deadline_s: float) -> EvalSummary:
        """Run held-out tasks on the live generators; returns the suite's summary.

        Idempotent by suite name: asking again for a finished suite returns its summary.
        """
        if not self.evaluations.known(suite):
            temperature = 0.0 if mode == "greedy" else self.config.generator.temperature
            orders = [
                Order(
                    group=f"{suite}-{i:05d}",
                    task=self.tasks("eval", i),
                    members=(f"{suite}-{i:05d}.0",),
                    purpose=Purpose.EVAL,
                    temperature=temperature,
                    version=self.acknowledged(),
                    seed=self.config.run.seed,
                    epoch=self.epoch,
                    suite=suite,
                )
                for i in range(tasks)
            ]
            self.evaluations.begin(suite, mode, orders, time.monotonic())
            await self._notify()
        return await self.evaluations.finished(suite, deadline_s)

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        """Results of evaluated tasks."""
        for episode in episodes:
            self._eval_given.pop(episode.group, None)
            self.evaluations.record(episode, time.monotonic())

    # -- facts --------------------------------------------------------------------------

    def _mark_idle(self) -> None:
        """Integrate idle rollout slots by cause (capacity, no generator, sync is the engine's)."""
        total = sum(p.slots for p in self.workers.values()) or 1
        free = sum(p.free for p in self.workers.values())
        cause = "generator" if self.acknowledged() < 0 else "capacity"
        blocked = self.admission_open and self.room() <= 0
        self.idle.observe(free / total if blocked else 0.0, cause, time.monotonic())

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """The feeder's step record goes in; generator-side facts of the step come out."""
        self._mark_idle()
        self._last_step = record
        busy = union([i for s in self.slots.values() for i in s.busy])
        for slot in self.slots.values():
            slot.busy.clear()
        return {
            "rwt": self.idle.take(),
            "generated_tokens": sum(s.tokens for s in self.slots.values()),
            "prompt_tokens": sum(s.prompt_tokens for s in self.slots.values()),
            "cached_tokens": sum(s.cached_tokens for s in self.slots.values()),
            "sync_s": sum(s.sync_s for s in self.slots.values()),
            "generator_busy": busy,
            "workers": self._worker_totals(),
            "ranks": self.ranks(),
        }

    def _worker_totals(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for pull in self.workers.values():
            for name, value in pull.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def ranks(self) -> dict[str, int]:
        """Ranks by role."""
        return {
            "generator": len(self.slots),
            "learner": self.config.learner.ranks,
            "scorer": self.config.scorer.replicas,
        }

    async def status(self) -> dict[str, Any]:
        """What the terminal shows; cheap enough to ask twice a second."""
        depth, age = await self.queue.depth()
        return {
            "epoch": self.epoch,
            "version": self.version,
            "acknowledged": self.acknowledged(),
            "step": self._last_step,
            "ready_depth": depth,
            "ready_head_age_s": age,
            "open_groups": len(self._open),
            "generators": {n: [s.healthy, s.acked, s.restarts] for n, s in self.slots.items()},
            "workers": {n: [p.free, p.slots] for n, p in self.workers.items()},
            "ledger": codec_plain(await self.queue.ledger()),
            "evaluating": self.evaluations.progress(),
        }

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def codec_plain(record: Any) -> dict[str, Any]:
    """A record as plain values, every field present."""
    return {name: getattr(record, name) for name in record.__struct_fields__}

