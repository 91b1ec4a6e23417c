"""The controller: admission, evaluation, and the facts everyone asks for.

::

    worker --pull--> [orders] --+-- evaluation orders (first: they are few and block a phase)
                                +-- lost groups, next attempt        (reconcile, every second)
                                +-- new groups, while allowance > 0  (staleness.allowance)
    loop --published--> [fleet] --per generator--> load_weights --ack--> allowance grows
    loop --barrier, moved--> [elastic] roles change between two steps
    [fleet] generator table (epoch grows when the set of healthy generators changes)

``pull`` waits at most ``PULL_WAIT_S`` for something to give; it is woken by an acknowledgement,
a closed group, a lost group or a new evaluation. Everything durable lies in the queue: a
restarted controller reads version, counts, roles and open orders back, grows the epoch, and learns
assignments from the workers' pulls. It speaks only to Protocols. Generators are seen to in
``cluster/fleet.py``, roles in ``cluster/elastic.py``, what a step cost whom in ``cluster/facts.py``.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.assign import Assignments
from cluster.config import Config
from cluster.elastic import Elastic, Ready
from cluster.evaluation import EvalBook
from cluster.facts import StepWatch
from cluster.fleet import Connect, Fleet, GeneratorPort, Trace
from cluster.messages import (
    Barrier,
    EvalEpisode,
    EvalSummary,
    Grant,
    Moved,
    Published,
    Pull,
    RankRow,
    Roles,
    Table,
    Wanted,
)
from cluster.metrics import union
from cluster.ports import Queue
from cluster.staleness import allowance, smallest_batch
from cluster.types import Order, Purpose, Task

PULL_WAIT_S = 1.0
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


class Controller:
    """Decides from facts; see the module docstring for the loops."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        tasks: TaskSource,
        generators: Mapping[str, GeneratorPort] | Connect,
        trace: Trace = lambda event, fields: None,
        ready: Ready | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        """``generators`` are the ports of a fixed set of generators, or how to reach one by name, if the
        role map says who generates. ``ready`` asks an actor whether it can take up its role; ``costs`` are
        prior seconds of rank moves by kind.
        """
        self.config = config
        self.queue = queue
        self.tasks = tasks
        self.trace = trace
        self._fixed = list(generators) if isinstance(generators, Mapping) else None
        connect = generators.__getitem__ if isinstance(generators, Mapping) else generators
        self.fleet = Fleet(config, queue, connect, trace)
        self.fleet.why_idle = self._why_idle
        self.elastic = Elastic(config, queue, self.fleet, trace, ready or self._generator_ready, costs)
        self.cursor = 0
        self.admission_open = False
        self.assignments = Assignments(config.env.max_attempts)
        self.evaluations = EvalBook()
        self.workers: dict[str, Pull] = {}
        self._ended_totals: dict[str, float] = {}  # counters of workers that are no more
        self.watch = StepWatch(self.fleet)
        self._lost_queue: list[Order] = []
        self._eval_given: dict[str, _Given] = {}
        self._open: dict[str, Order] = {}
        self._groups: dict[str, int] = {}
        self._progress = (0, 0)  # (version, groups trained by then), if batches may be of unequal size
        self._marks: dict[int, int] = {}  # version -> groups admitted and not lost, at its last admission
        self._admitting = asyncio.Lock()
        self._stopping = False
        self._last_step: dict[str, Any] = {}

    async def start(self, session: str = "") -> None:
        """Restore from the queue; grow the epoch so that older orders are refused.

        ``session`` names the driver; roles of another one's actors are not taken over.
        """
        names = await self.elastic.start(session)
        await self.fleet.start(names if self._fixed is None else self._fixed)
        self._groups = await self.queue.groups()
        self.cursor = sum(self._groups.values())
        if self.config.run.min_groups_per_step:
            await self._restore_progress()
        self._open = {order.group: order for order in await self.queue.orders()}
        self.assignments.started = time.monotonic()
        raw = await self.queue.get("admission")
        self.admission_open = raw == b"open"
        self.trace("controller_start", {"epoch": self.epoch, "version": self.version})

    async def run(self) -> None:
        """Supervise generators, roles and open groups until stopped."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.fleet.run())
            loops.create_task(self._reconcile())
            if self._fixed is None:
                loops.create_task(self.elastic.run())

    async def stop(self) -> None:
        """End the loops; pulls answer with nothing."""
        self._stopping = True
        self.elastic.stop()
        await self.fleet.stop()

    # -- generators and roles -----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of every order; see ``Fleet``."""
        return self.fleet.epoch

    @property
    def version(self) -> int:
        """Newest published version."""
        return self.fleet.version

    def table(self) -> Table:
        """The generator table of this epoch."""
        return self.fleet.table()

    def acknowledged(self) -> int:
        """Lowest version acknowledged among healthy generators; -1 if none is healthy."""
        return self.fleet.acknowledged()

    async def publish(self, published: Published) -> None:
        """New weights exist: each generator fetches them, and their acknowledgement makes room."""
        await self.fleet.publish(published)
        self._groups = await self.queue.groups()
        self.fleet.notify()

    async def _generator_ready(self, name: str) -> bool:
        return (await self.fleet.connect(name).health()).ready

    async def barrier(self, facts: dict[str, Any]) -> Barrier:
        """The loop has committed step ``facts["step"]`` and waits: what changes before the next one?

        ``facts`` are those of ``learner.pace.StepFacts.told``. Asking again for the same step repeats the
        answer.
        """
        step = int(facts["step"])
        groups = await self._next_batch(step)
        if self.elastic.active and self.watch.short:
            await self.fleet.refresh()
        seen = self.watch.barrier(facts, self.elastic.map.counts(), bool(self.evaluations.progress()))
        if seen is not None:
            slots = sum(worker.slots for worker in self.workers.values())
            seen = replace(seen, open=len(self._open), most=slots // self.config.run.group_size)
        return await self.elastic.barrier(seen, facts, groups)

    async def moved(self, moved: Moved) -> None:
        """How the move of the last barrier ended in the loop."""
        await self.elastic.moved(moved)

    async def roles(self) -> Roles:
        """The role map of this epoch."""
        return self.elastic.roles()

    async def wanted(self) -> Wanted:
        """What the driver should keep running."""
        return self.elastic.wanted()

    async def have(self, names: list[str], free: int | None = None) -> None:
        """The driver runs these actors; ``free`` more ranks could be had from the cluster."""
        for worker in set(self.workers) - set(names):
            for name, value in self.workers.pop(worker).counters.items():
                self._ended_totals[name] = self._ended_totals.get(name, 0.0) + value
        await self.elastic.have(names, free)

    async def located(self, nodes: dict[int, str]) -> None:
        """Ray node id of each rank: who moves is chosen beside its new peers."""
        await self.elastic.located(nodes)

    async def ranks_lost(self, ranks: list[int], node: str = "") -> None:
        """These ranks are gone with their node."""
        await self.elastic.lost(ranks, node)

    async def ranks_joined(self, rows: list[RankRow]) -> None:
        """Ranks of a node that came, or came back."""
        await self.elastic.joined(rows)

    async def scale(
        self,
        generators: int | None = None,
        learners: int | None = None,
        scorers: int | None = None,
        env_workers: int | None = None,
    ) -> dict[str, Any]:
        """An operator's target; see ``Elastic.scale``."""
        return await self.elastic.scale(generators, learners, scorers, env_workers)

    async def _next_batch(self, step: int) -> int:
        """Fewest groups that the next step may train; 0 if batches are all of one size."""
        run = self.config.run
        if not run.min_groups_per_step:
            return 0
        self._groups = await self.queue.groups()
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

    # -- admission ----------------------------------------------------------------------

    async def open_admission(self, is_open: bool) -> None:
        """Start or stop admitting training groups (evaluation phases close it)."""
        self.admission_open = is_open
        await self.queue.put("admission", b"open" if is_open else b"closed")
        if is_open and self.version == 0:
            self.watch.opened()
        self.trace("admission_open" if is_open else "admission_closed", {"version": self.version})
        self.fleet.notify()

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
            progress=self._progress if self.config.run.min_groups_per_step else None,
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
            await self.fleet.changed.wait(left)
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
        if self.config.run.min_groups_per_step:
            self._marks[self.acknowledged()] = self.cursor - self._groups.get("lost", 0)
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
            self.fleet.notify()

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
                    version=self.acknowledged(),
                    seed=self.config.run.seed,
                    epoch=self.epoch,
                    suite=suite,
                )
                for i in range(tasks)
            ]
            self.evaluations.begin(suite, mode, orders, time.monotonic())
            self.fleet.notify()
        return await self.evaluations.finished(suite, deadline_s)

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        """Results of evaluated tasks."""
        for episode in episodes:
            self._eval_given.pop(episode.group, None)
            self.evaluations.record(episode, time.monotonic())

    # -- facts --------------------------------------------------------------------------

    def _why_idle(self) -> str:
        """Cause of the seconds during which a generator has nothing to do now."""
        if not self.admission_open:
            return "closed"
        return "capacity" if self.room() <= 0 else "no_work"

    def _mark_idle(self) -> None:
        """Idle rollout slots by cause: the measure of waiting for generators that do not tell their own."""
        total = sum(p.slots for p in self.workers.values()) or 1
        free = sum(p.free for p in self.workers.values())
        cause = "generator" if self.acknowledged() < 0 else "capacity"
        blocked = self.admission_open and self.room() <= 0
        self.watch.idle.observe(free / total if blocked else 0.0, cause, time.monotonic())

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """The feeder's step record goes in; generator-side facts of the step come out."""
        self._mark_idle()
        self._last_step = record
        totals = self.fleet.totals()
        return {
            "rwt": self.watch.take_rwt(),
            "generated_tokens": totals.tokens,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "sync_s": totals.sync_s,
            "generator_busy": union(self.fleet.take_busy()),
            "workers": self._worker_totals(),
            "ranks": self.ranks(),
            "switches": self.elastic.machine.switches.take_news(),
        }

    def _worker_totals(self) -> dict[str, float]:
        totals = dict(self._ended_totals)
        for pull in self.workers.values():
            for name, value in pull.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def ranks(self) -> dict[str, int]:
        """Ranks by role."""
        counts = self.elastic.map.counts()
        return counts if counts["spare"] else {r: n for r, n in counts.items() if r != "spare"}

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
            "generators": {n: [s.healthy, s.acked, s.restarts] for n, s in self.fleet.slots.items()},
            "workers": {n: [p.free, p.slots] for n, p in self.workers.items()},
            "ledger": codec_plain(await self.queue.ledger()),
            "evaluating": self.evaluations.progress(),
            "roles": self.elastic.status(),
        }


def codec_plain(record: Any) -> dict[str, Any]:
    """A record as plain values, every field present."""
    return {name: getattr(record, name) for name in record.__struct_fields__}
