"""Env worker: pulls orders, plays their groups, hands the results on. No Ray in here.

::

    pull loop --orders--> group task (one per group) --members--> slots --> run_trajectory
       ^  |                    |                                                 | segments
       |  +-- table --> router |                                                 v
       |  +-- cancel           |                                     writer --> queue.append
       +---- counters          +-- all ended: rewards -> log -> flush -> queue.end -> queue.ready

Evaluation groups take the same way, but nothing of them goes to the queue: their episodes are
reported to the controller. An error of the queue or the controller ends ``run`` with that
error; whoever supervises the worker starts it again, and its groups are ordered anew.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.harness.chat import ChatHarness
from actors.outcomes import eval_episode, group_deadline_s, never_started
from actors.reward import Reward
from actors.rollout import Environments, Member, Tools, run_trajectory
from actors.router import Router
from actors.slots import Slots
from actors.tokenizer import Tokenizer
from actors.topology.iid import Iid, Scope
from actors.writer import EndLog, SegmentWriter
from cluster.config import Config
from cluster.errors import EngineFailed, StaleEpoch, TooManyFailures
from cluster.messages import EvalEpisode, Grant, Pull, Table
from cluster.ports import Policy, Queue
from cluster.types import End, EndKind, Order, Purpose, Segment
from envs.latency import Latency

_log = logging.getLogger(__name__)

_PULL_TIMEOUT_S = 60.0
_IDLE_S = 0.02  # between pulls that brought nothing
_HEARTBEAT_S = 1.0  # a worker without a free slot still pulls this often
_CANCEL_S = 30.0  # what cancelled groups may take to release their environments
_REMEMBERED = 4096  # groups whose latest attempt is known, to ignore repeated orders

Topology = Callable[[Scope], Awaitable[list[Member]]]


class Controller(Protocol):
    """What a worker asks of the controller; the caller of ``Worker`` makes restarts invisible."""

    async def pull(self, pull: Pull) -> Grant:
        """Orders for the free slots, the generator table, groups to stop."""

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        """Episodes of one evaluation group."""

    async def closed(self, groups: list[str]) -> None:
        """Groups that ended without becoming ready."""


@dataclass(slots=True)
class _Running:
    """A group being played."""

    attempt: int
    task: asyncio.Task[None]
    left: int  # members that have not ended, started or not
    size: int

    @property
    def done(self) -> float:
        """Share of the members that have ended."""
        return 1.0 - self.left / self.size


class Worker:
    """``await Worker(...).run()`` works until ``stop`` is called and its groups have ended.

    ``folder`` is where the log of ends goes (none without it); ``seeded`` gives every request a
    sampling seed derived from (order seed, trajectory, attempt, turn).
    """

    def __init__(
        self,
        name: str,
        config: Config,
        queue: Queue,
        policy: Policy,
        environments: Environments,
        tokenizer: Tokenizer,
        controller: Controller,
        *,
        folder: Path | None = None,
        reward: Reward | None = None,
        topology: Topology | None = None,
        seeded: bool = False,
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.config = config
        self.slots = Slots(config.env.slots)
        self.writer = SegmentWriter(queue)
        self.log = EndLog(folder, name)
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._queue = queue
        self._controller = controller
        self._router = policy if isinstance(policy, Router) else None
        self._reward = reward or Reward()
        self._topology: Topology = topology or Iid()
        self._deadline_s = group_deadline_s(config)
        latency = Latency(seed=config.run.seed, **config.env.latency) if config.env.latency else None
        self._tools = Tools(
            harness=ChatHarness(tokenizer, config.harness),
            policy=policy,
            environments=environments,
            max_turns=config.env.max_turns,
            delay=latency.delay_s if latency is not None else None,
            seeded=seeded,
            pause_after_s=config.admission.pause_env_after_s,
        )
        self._running: dict[str, _Running] = {}
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()  # a member ended, or there are more slots
        self._grace_s = 0.0
        self._failed_in_a_row = 0

    @property
    def free(self) -> int:
        """Slots that no member of a running group has or waits for; negative when overbooked.

        Counted from the orders, not from the slots in use: a group that has just been taken has
        not reached its slots yet.
        """
        return self.slots.capacity - sum(running.left for running in self._running.values())

    async def run(self) -> None:
        """Pull and play until stopped. Raises the first error of queue or controller."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self.writer.run(), name="segment writer")
                await self._pull_loop(tasks)
                await self._finish()
                await self.writer.flush()
                writer.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    def stop(self, grace_s: float = 30.0) -> None:
        """Take no more orders; groups in flight may end within ``grace_s``, then are cancelled."""
        self._grace_s = grace_s
        self._stopping.set()
        self._freed.set()

    def set_slots(self, slots: int) -> None:
        """Change how many trajectories run at once; those in flight go on."""
        self.slots.resize(slots)
        self._freed.set()

    def set_table(self, table: Table) -> None:
        """Take a generator table. Raises StaleEpoch for an older one."""
        if self._router is not None:
            self._router.set_table(table)

    def metrics(self) -> dict[str, float]:
        """Totals since the start; a tag follows its name after a dot (``env_failures.env``)."""
        totals: dict[str, float] = dict(self.counters)
        totals["appends"] = self.writer.appends
        if self._router is not None:
            totals |= self._router.stats.totals()
        return totals

    # -- orders -------------------------------------------------------------------------

    async def _pull_loop(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            report = Pull(
                worker=self.name,
                incarnation=self.incarnation,
                slots=self.slots.capacity,
                free=self.free,
                running={group: running.attempt for group, running in self._running.items()},
                counters=self.metrics(),
            )
            async with asyncio.timeout(_PULL_TIMEOUT_S):
                grant = await self._controller.pull(report)
            await self._take(grant, tasks)
            if not grant.orders:
                await asyncio.sleep(_IDLE_S)
            await self._wait_free(_HEARTBEAT_S)

    async def _take(self, grant: Grant, tasks: asyncio.TaskGroup) -> None:
        """Act on a grant; one with a stale table comes from a controller that was replaced."""
        if grant.table.epoch or grant.table.generators:
            try:
                self.set_table(grant.table)
            except StaleEpoch as error:
                self.counters["stale_grants"] += 1
                _log.warning("grant refused: %s", error)
                return
        if grant.slots is not None:
            self.set_slots(grant.slots)
        for group in grant.cancel:
            await self._cancel(group)
        for order in grant.orders:
            await self._begin(order, tasks)

    async def _begin(self, order: Order, tasks: asyncio.TaskGroup) -> None:
        """Start a group. A repeated order is ignored, a newer attempt replaces the older."""
        known = self._attempts.get(order.group, -1) >= order.attempt
        if order.purpose is Purpose.EVAL:  # a new controller lacks the report of a finished one
            known = known and order.group in self._running
        if known or self._stopping.is_set():
            self.counters["orders_ignored"] += 1
            return
        await self._cancel(order.group)
        self._attempts[order.group] = order.attempt
        if len(self._attempts) > _REMEMBERED:
            self._attempts.popitem(last=False)
        task = tasks.create_task(self._run_group(order), name=f"group {order.group}/{order.attempt}")
        self._running[order.group] = _Running(order.attempt, task, len(order.members), len(order.members))
        task.add_done_callback(lambda _: self._forget(order))

    async def _cancel(self, group: str) -> None:
        running = self._running.get(group)
        if running is None:
            return
        self.counters["groups_cancelled"] += 1
        running.task.cancel()
        await asyncio.wait([running.task], timeout=_CANCEL_S)

    def _forget(self, order: Order) -> None:
        running = self._running.get(order.group)
        if running is not None and running.attempt == order.attempt:
            del self._running[order.group]
            self._freed.set()

    def _member_ended(self, order: Order) -> None:
        running = self._running.get(order.group)
        if running is not None and running.attempt == order.attempt:
            running.left = max(0, running.left - 1)
            self._freed.set()

    def _done(self, order: Order) -> float:
        running = self._running.get(order.group)
        return running.done if running is not None else 0.0

    async def _wait_free(self, timeout_s: float) -> None:
        """Return when a slot is free or the worker stops, at the latest after ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while self.free <= 0 and not self._stopping.is_set():
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            return  # time for a heartbeat

    async def _finish(self) -> None:
        """Let the groups in flight end; cancel what is left after the grace."""
        tasks = [running.task for running in self._running.values()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._grace_s)
        for task in late:
            task.cancel()
        if late:
            self.counters["groups_cancelled"] += len(late)
            await asyncio.wait(late, timeout=_CANCEL_S)

    # -- groups -------------------------------------------------------------------------

    async def _run_group(self, order: Order) -> None:
        scope = _GroupScope(self, order, asyncio.get_running_loop().time() + self._deadline_s)
        members = await self._topology(scope)
        ends = self._reward(members)
        for end in ends:
            self._count_end(order, end)
        self.log.write(order, ends)
        if order.purpose is Purpose.EVAL:
            pairs = zip(members, ends, strict=True)
            await self._controller.report_eval([eval_episode(order, member, end) for member, end in pairs])
            return
        await self.writer.flush()
        await self._queue.end(ends)
        await self._ready(order, ends)

    async def _ready(self, order: Order, ends: list[End]) -> None:
        try:
            ready = await self._queue.ready(order.group, order.attempt, self.config.run.min_members)
        except ValueError as error:
            # The queue ignored our ends: another attempt is under way. If not, the group is found
            # open with nobody running it, and ordered again.
            self.counters["groups_superseded"] += 1
            _log.warning("group %s attempt %d is not ready: %s", order.group, order.attempt, error)
            return
        self.counters["groups_ready" if ready else "groups_closed"] += 1
        self._judge(ends, ready)
        if not ready:
            await self._controller.closed([order.group])

    def _judge(self, ends: list[End], ready: bool) -> None:
        """Raise TooManyFailures when group after group fails for a reason that will not go away.

        Failures of generators don't count: they are replaced, and their supervisor knows when to stop.
        """
        if ready:
            self._failed_in_a_row = 0
            return
        lasting = [e for e in ends if e.kind is EndKind.FAILED and e.reason != EngineFailed.boundary]
        if not lasting:
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.config.run.max_failed_groups:
            raise TooManyFailures(
                f"{self._failed_in_a_row} groups in a row failed (run.max_failed_groups); the last: "
                f"{lasting[-1].reason}: {lasting[-1].detail}"
            )

    async def _play(self, order: Order, trajectory: str, deadline: float) -> Member:
        """One member, in a slot of its own."""
        try:
            async with asyncio.timeout_at(deadline):
                await self.slots.acquire()
        except TimeoutError:
            return Member(trajectory, end=never_started(order, trajectory))
        try:
            return await run_trajectory(
                self._tools, order, trajectory, self._on_turn(order), deadline, lambda: self._done(order)
            )
        finally:
            self.slots.release()
            self._member_ended(order)
            if self._router is not None:
                self._router.forget(trajectory)

    def _on_turn(self, order: Order) -> Callable[[Segment], None]:
        def count(segment: Segment) -> None:
            self.counters["turns"] += 1
            self.counters["env_step_s"] += segment.turn.env_s
            self.counters["sampled_tokens"] += sum(len(call.output) // 4 for call in segment.turn.calls)

        def train(segment: Segment) -> None:
            count(segment)
            self.writer.add(segment)

        return count if order.purpose is Purpose.EVAL else train

    def _count_end(self, order: Order, end: End) -> None:
        self.counters[f"trajectories.{end.kind}"] += 1
        if end.kind is EndKind.FAILED:
            self.counters[f"env_failures.{end.reason}"] += 1
            _log.warning("trajectory %s failed: %s", end.trajectory, end.detail)


@dataclass(frozen=True, slots=True)
class _GroupScope:
    """A group as its topology sees it."""

    worker: Worker
    order: Order
    deadline: float

    async def play(self, trajectory: str) -> Member:
        """Play one member to its end."""
        return await self.worker._play(self.order, trajectory, self.deadline)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single error inside nested groups."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
