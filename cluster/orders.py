"""Orders: which groups are admitted, who plays them, what was lost on the way. The controller's half that
looks at env workers.

::

    take --+-- evaluation orders (first: they are few and block a phase)
           +-- lost groups, next attempt        (reconcile, every second)
           +-- new groups, while allowance > 0  (staleness.allowance)

Open orders are durable in the queue and read back from it; who plays which of them is learned from the
workers' pulls.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.assign import Assignments
from cluster.config import Config
from cluster.evaluation import EvalBook
from cluster.fleet import Fleet, Trace
from cluster.messages import EvalEpisode, EvalSummary, Pull
from cluster.ports import Queue
from cluster.staleness import allowance, smallest_batch
from cluster.types import Order, Purpose, Task

RECONCILE_EVERY_S = 1.0
FORGOTTEN_S = 3.0  # an order that a worker does not report after this long never arrived

TaskSource = Callable[[str, int], Task]


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


class Orders:
    """See the module docstring."""

    def __init__(self, config: Config, queue: Queue, fleet: Fleet, tasks: TaskSource, trace: Trace) -> None:
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.tasks = tasks
        self.trace = trace
        self.is_open = False  # training groups are admitted
        self.cursor = 0  # groups admitted so far; the next one's index
        self.assignments = Assignments(config.env.max_attempts)
        self.evaluations = EvalBook()
        self.open: dict[str, Order] = {}
        self._lost: list[Order] = []
        self._eval_given: dict[str, _Given] = {}
        self._groups: dict[str, int] = {}  # the queue's counts by state
        self._progress = (0, 0)  # (version, groups trained by then), if batches may be of unequal size
        self._marks: dict[int, int] = {}  # version -> groups admitted and not lost, at its last admission
        self._admitting = asyncio.Lock()
        self._stopping = False

    async def start(self) -> None:
        """Read back what the queue holds."""
        await self.recount()
        self.cursor = sum(self._groups.values())
        if self.config.run.min_groups_per_step:
            await self._restore_progress()
        self.open = {order.group: order for order in await self.queue.orders()}
        self.assignments.started = time.monotonic()
        self.is_open = await self.queue.get("admission") == b"open"

    async def run(self) -> None:
        """Find open groups that nobody runs, until stopped; order them again or give them up."""
        while not self._stopping:
            await asyncio.sleep(RECONCILE_EVERY_S)
            async with self._admitting:
                await self._reconcile()
            self.fleet.notify()

    def stop(self) -> None:
        """End ``run``."""
        self._stopping = True

    async def recount(self) -> None:
        """Groups by state, as the queue has them now."""
        self._groups = await self.queue.groups()

    # -- admission ----------------------------------------------------------------------

    async def open_admission(self, is_open: bool) -> None:
        """Start or stop admitting training groups (evaluation phases close it)."""
        self.is_open = is_open
        await self.queue.put("admission", b"open" if is_open else b"closed")
        self.trace("admission_open" if is_open else "admission_closed", {"version": self.fleet.version})
        self.fleet.notify()

    def room(self) -> int:
        """Groups that may be admitted now."""
        acknowledged = self.fleet.acknowledged()
        if not self.is_open or acknowledged < 0:
            return 0
        return allowance(
            max_lag=self.config.run.max_lag,
            groups_per_step=self.config.run.groups_per_step,
            acknowledged=acknowledged,
            steps=self.config.run.steps,
            admitted=self.cursor,
            lost=self._groups.get("lost", 0),
            progress=self._progress if self.config.run.min_groups_per_step else None,
        )

    async def next_batch(self, step: int) -> int:
        """Fewest groups that the step after ``step`` may train; 0 if batches are all of one size."""
        run = self.config.run
        if not run.min_groups_per_step:
            return 0
        await self.recount()
        self._progress = (step, self._groups.get("trained", 0))
        self._marks = {a: mark for a, mark in self._marks.items() if a + run.max_lag >= step}
        return smallest_batch(
            max_lag=run.max_lag, groups_per_step=run.groups_per_step, least=run.min_groups_per_step,
            progress=self._progress, marks=self._marks,
        )  # fmt: skip

    async def _restore_progress(self) -> None:
        """From the step log. All that was admitted may be as old as the bound allows: no small batch yet."""
        committed = [record for record in await self.queue.steps(0) if record.committed]
        version = max((record.step for record in committed), default=0)
        self._progress = (version, sum(len(record.groups) for record in committed))
        self._marks = {version - self.config.run.max_lag: self.cursor - self._groups.get("lost", 0)}

    # -- workers ------------------------------------------------------------------------

    def meet(self, pull: Pull, now: float) -> None:
        """A worker's report: evaluations and groups that its process does not run are lost."""
        self._evaluate_again(
            [g for g, given in self._eval_given.items() if given.worker == pull.worker
             and given.lost(pull, g, now)]
        )  # fmt: skip
        running = {g: a for g, a in pull.running.items() if g in self.open}
        self.assignments.pulled(pull.worker, pull.incarnation, running, now)

    def gone(self, workers: set[str]) -> None:
        """These workers are no more, or have been silent for too long: others evaluate in their place."""
        self._evaluate_again([g for g, given in self._eval_given.items() if given.worker in workers])

    def _evaluate_again(self, groups: list[str]) -> None:
        for group in groups:
            self._eval_given.pop(group)
            self.evaluations.again(group)
        if groups:
            self.fleet.notify()

    def superseded(self, pull: Pull) -> tuple[str, ...]:
        """Groups of which the worker runs an attempt that has been replaced or given up."""
        running = [(self.open.get(group), attempt) for group, attempt in pull.running.items()]
        return tuple(o.group for o, attempt in running if o is not None and o.attempt > attempt)

    async def take(self, pull: Pull, free: int) -> list[Order]:
        """Orders for ``free`` slots of a worker, as far as there are any."""
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
        while self._lost:
            order = self._lost.pop(0)
            if order.group in self.open:
                return order
        if self.room() <= 0:
            return None
        order = self._new_order(self.cursor)
        await self.queue.admit(order)
        self.cursor += 1
        if self.config.run.min_groups_per_step:
            self._marks[self.fleet.acknowledged()] = self.cursor - self._groups.get("lost", 0)
        self.open[order.group] = order
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
            version=self.fleet.acknowledged(),
            seed=self.config.run.seed,
            epoch=self.fleet.epoch,
        )

    async def _reconcile(self) -> None:
        live = set(self.assignments.live(time.monotonic()))
        self.gone({given.worker for given in self._eval_given.values()} - live)
        orders = await self.queue.orders()
        await self.recount()
        self.open = {order.group: order for order in orders}
        waiting = {order.group for order in self._lost}
        mine = [order for order in orders if order.group not in waiting]
        for verdict in self.assignments.reconcile(mine, time.monotonic()):
            order = verdict.order
            self.trace(
                "group_lost",
                {"group": order.group, "reason": verdict.reason, "attempt": order.attempt},
            )
            if verdict.give_up:
                await self.queue.abandon(order.group, verdict.reason)
                self.open.pop(order.group, None)
            elif await self.queue.reorder(order):
                self.open[order.group] = order
                self._lost.append(order)

    async def closed(self, groups: list[str]) -> None:
        """The feeder or a worker ended groups without training: their places are free."""
        for group in groups:
            self.open.pop(group, None)
            self.assignments.finished(group)
        await self.recount()
        self.fleet.notify()

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
                    version=self.fleet.acknowledged(),
                    seed=self.config.run.seed,
                    epoch=self.fleet.epoch,
                    suite=suite,
                )
                for i in range(tasks)
            ]
            self.evaluations.begin(suite, mode, orders, time.monotonic())
            self.fleet.notify()
        return await self.evaluations.finished(suite, deadline_s)

    def report(self, episodes: list[EvalEpisode]) -> None:
        """Results of evaluated tasks."""
        for episode in episodes:
            self._eval_given.pop(episode.group, None)
            self.evaluations.record(episode, time.monotonic())
