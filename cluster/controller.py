"""The controller: where all that is asked and told meets, and the facts everyone asks for.

::

    worker --pull--> [orders] evaluation, lost groups, new groups while the bound allows
    loop --published--> [fleet] --per generator--> load_weights --ack--> room for more groups
    loop --barrier, moved--> [elastic] roles change between two steps
    [fleet] generator table (epoch grows when the set of healthy generators changes)

``pull`` waits at most ``PULL_WAIT_S`` for something to give; it is woken by an acknowledgement,
a closed group, a lost group or a new evaluation. Everything durable lies in the queue: a
restarted controller reads version, counts, roles and open orders back, grows the epoch, and learns
assignments from the workers' pulls. It speaks only to Protocols. Orders are seen to in
``cluster/orders.py``, generators in ``cluster/fleet.py``, roles in ``cluster/elastic.py``, what a step cost
whom in ``cluster/facts.py``.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.config import Config
from cluster.elastic import Elastic
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
from cluster.moving import Ready
from cluster.orders import Orders, TaskSource
from cluster.ports import Queue
from cluster.types import Order

PULL_WAIT_S = 1.0


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
        self.trace = trace
        self._fixed = list(generators) if isinstance(generators, Mapping) else None
        connect = generators.__getitem__ if isinstance(generators, Mapping) else generators
        self.fleet = Fleet(config, queue, connect, trace)
        self.fleet.why_idle = self._why_idle
        self.orders = Orders(config, queue, self.fleet, tasks, trace)
        self.elastic = Elastic(config, queue, self.fleet, trace, ready or self._generator_ready, costs)
        self.workers: dict[str, Pull] = {}
        self._ended_totals: dict[str, float] = {}  # counters of workers that are no more
        self.watch = StepWatch(self.fleet)
        self._stopping = False
        self._last_step: dict[str, Any] = {}

    async def start(self, session: str = "") -> None:
        """Restore from the queue; grow the epoch so that older orders are refused.

        ``session`` names the driver; roles of another one's actors are not taken over.
        """
        names = await self.elastic.start(session)
        await self.fleet.start(names if self._fixed is None else self._fixed, self.elastic.joining())
        await self.orders.start()
        self.trace("controller_start", {"epoch": self.epoch, "version": self.version})

    async def run(self) -> None:
        """Supervise generators, roles and open groups until stopped."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.fleet.run())
            loops.create_task(self.orders.run())
            if self._fixed is None:
                loops.create_task(self.elastic.run())

    async def stop(self) -> None:
        """End the loops; pulls answer with nothing."""
        self._stopping = True
        self.elastic.stop()
        self.orders.stop()
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
        await self.orders.recount()
        self.fleet.notify()

    async def _generator_ready(self, name: str) -> bool:
        return (await self.fleet.connect(name).health()).ready

    async def barrier(self, facts: dict[str, Any]) -> Barrier:
        """The loop has committed step ``facts["step"]`` and waits: what changes before the next one?

        ``facts`` are those of ``learner.pace.StepFacts.told``. Asking again for the same step repeats the
        answer.
        """
        step = int(facts["step"])
        groups = await self.orders.next_batch(step)
        if self.elastic.active and self.watch.short:
            await self.fleet.refresh()
        seen = self.watch.barrier(facts, self.elastic.map.counts(), bool(self.orders.evaluations.progress()))
        if seen is not None:
            slots = sum(worker.slots for worker in self.workers.values())
            seen = replace(seen, open=len(self.orders.open), most=slots // self.config.run.group_size)
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
        gone = set(self.workers) - set(names)
        self.orders.gone(gone)
        for worker in gone:
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

    # -- orders -------------------------------------------------------------------------

    async def open_admission(self, is_open: bool) -> None:
        """Start or stop admitting training groups (evaluation phases close it)."""
        if is_open and self.version == 0:
            self.watch.opened()
        await self.orders.open_admission(is_open)

    def room(self) -> int:
        """Groups that may be admitted now."""
        return self.orders.room()

    async def pull(self, pull: Pull) -> Grant:
        """Work for one worker; waits up to ``PULL_WAIT_S`` when there is none."""
        now = time.monotonic()
        self._meet(pull, now)
        deadline = now + PULL_WAIT_S
        free = pull.free
        orders: list[Order] = []
        first_epoch = self.epoch
        while True:
            orders += await self.orders.take(pull, free - sum(len(o.members) for o in orders))
            left = deadline - time.monotonic()
            if orders or free <= 0 or self._stopping or left <= 0 or self.epoch != first_epoch:
                break
            await self.fleet.changed.wait(left)
        self._mark_idle()
        return Grant(orders=tuple(orders), table=self.table(), cancel=self.orders.superseded(pull))

    def _meet(self, pull: Pull, now: float) -> None:
        """A worker's report: new incarnation, running groups, idle slots."""
        old = self.workers.get(pull.worker)
        if old is not None and old.incarnation != pull.incarnation:
            self.trace("worker_replaced", {"worker": pull.worker})
        self.workers[pull.worker] = pull
        self.orders.meet(pull, now)
        self._mark_idle()

    async def closed(self, groups: list[str]) -> None:
        """The feeder or a worker ended groups without training: their places are free."""
        await self.orders.closed(groups)

    async def evaluate(self, suite: str, mode: str, tasks: int, deadline_s: float) -> EvalSummary:
        """Run held-out tasks on the live generators; see ``Orders.evaluate``."""
        return await self.orders.evaluate(suite, mode, tasks, deadline_s)

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        """Results of evaluated tasks."""
        self.orders.report(episodes)

    # -- facts --------------------------------------------------------------------------

    def _why_idle(self) -> str:
        """Cause of the seconds during which a generator has nothing to do now."""
        if not self.orders.is_open:
            return "closed"
        return "capacity" if self.room() <= 0 else "no_work"

    def _mark_idle(self) -> None:
        """Idle rollout slots by cause: the measure of waiting for generators that do not tell their own."""
        total = sum(p.slots for p in self.workers.values()) or 1
        free = sum(p.free for p in self.workers.values())
        cause = "generator" if self.acknowledged() < 0 else "capacity"
        blocked = self.orders.is_open and self.room() <= 0
        self.watch.idle.observe(free / total if blocked else 0.0, cause, time.monotonic())

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """The feeder's step record goes in; generator-side facts of the step come out."""
        self._mark_idle()
        self._last_step |= record
        totals = self.fleet.totals()
        return {
            "rwt": self.watch.take_rwt(),
            "generated_tokens": totals.tokens,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "sync_s": totals.sync_s,
            "generator_busy": union(self.fleet.take_busy()),
            "workers": self._worker_totals(),
            "tasks": self.fleet.tasks(),
            "admission": totals.admission(),
            "ranks": self.ranks(),
            "switches": self.elastic.machine.switches.take_news(),
        }

    def measured(self, step: int, metrics: dict[str, Any]) -> None:
        """The step's metrics under their public names, rates and waits among them: what ``status`` shows."""
        self._last_step |= metrics | {"step": step}

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
            "open_groups": len(self.orders.open),
            "generators": {n: [s.healthy, s.acked, s.restarts] for n, s in self.fleet.slots.items()},
            "workers": {n: [p.free, p.slots] for n, p in self.workers.items()},
            "ledger": codec_plain(await self.queue.ledger()),
            "tasks": self.fleet.tasks(),
            "admission": self.fleet.totals().admission(),
            "evaluating": self.orders.evaluations.progress(),
            "roles": self.elastic.status(),
        }


def codec_plain(record: Any) -> dict[str, Any]:
    """A record as plain values, every field present."""
    return {name: getattr(record, name) for name in record.__struct_fields__}
