"""The controller over the in-memory queue: admission, acknowledgement, repair, evaluation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.config import Config, build
from cluster.controller import Controller
from cluster.errors import WeightsFailed
from cluster.memory import MemoryQueue
from cluster.messages import EvalEpisode, GeneratorHealth, Published, Pull
from cluster.types import End, EndKind, Purpose, StepRecord, Task, Weights


class ScriptedGenerator:
    """A generator port that loads what it is told, when ``hold`` is open."""

    def __init__(self, name: str) -> None:
        self.name, self.instance, self.version = name, "one", 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.fail = False
        self.alive = True
        self.restarts: list[str] = []
        self.cleared: list[int] = []  # epochs

    async def health(self) -> GeneratorHealth:
        if not self.alive:
            raise ConnectionError("gone")
        return GeneratorHealth(name=self.name, instance=self.instance, ready=True, version=self.version)

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        await self.hold.wait()
        if self.fail:
            raise WeightsFailed("damaged")
        self.version = weights.version
        return self.version

    async def clear(self, epoch: int) -> None:
        if not self.alive:
            raise ConnectionError("gone")
        self.cleared.append(epoch)

    async def restart(self, reason: str) -> None:
        self.restarts.append(reason)


def config(**run: Any) -> Config:
    return build(
        {
            "env": {"name": "coin"},
            "model": {"path": "/nowhere"},
            "run": {"groups_per_step": 2, "group_size": 2, "steps": 10, **run},
            "generator": {"replicas": 2},
        }
    )


def task(split: str, index: int) -> Task:
    return Task(id=f"{split}-{index}", env="coin", seed=index)


@asynccontextmanager
async def running(
    settings: Config, queue: MemoryQueue, ports: dict[str, ScriptedGenerator]
) -> AsyncIterator[Controller]:
    controller = Controller(settings, queue, task, ports)
    await controller.start()
    loop = asyncio.create_task(controller.run())
    try:
        async with asyncio.timeout(20):
            while controller.acknowledged() < 0:
                await asyncio.sleep(0.01)
            yield controller
    finally:
        await controller.stop()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


def two() -> dict[str, ScriptedGenerator]:
    return {name: ScriptedGenerator(name) for name in ("a", "b")}


def pull(free: int, incarnation: str = "one", running: dict[str, int] | None = None) -> Pull:
    return Pull(worker="w", incarnation=incarnation, slots=64, free=free, running=running or {})


def weights(version: int) -> Published:
    handle = Weights(version=version, location="x", checksum=str(version), nbytes=1)
    return Published(weights=handle, step=version)


async def train(queue: MemoryQueue, step: int, groups: list[str]) -> None:
    """Finish groups and commit them as one step."""
    members = [f"{group}.{i}" for group in groups for i in range(2)]
    won = {"attempt": 0, "kind": EndKind.FINISHED, "turns": 0, "outcome": 1.0}
    await queue.end([End(trajectory=m, group=m[:-2], **won) for m in members])
    for group in groups:
        assert await queue.ready(group, 0, 2)
    assert set(groups) <= set(await queue.claim("feeder", 99, 0.1))
    record = StepRecord(step=step, groups=tuple(groups), trajectories=tuple(members), lags=(0,) * len(groups))
    await queue.plan(record)
    await queue.commit(record)


async def test_bound_zero_admits_the_next_block_only_after_every_acknowledgement() -> None:
    queue, ports = MemoryQueue(), two()
    async with running(config(max_lag=0), queue, ports) as controller:
        await controller.open_admission(True)
        first = (await controller.pull(pull(64))).orders
        assert [order.group for order in first] == ["g0000000", "g0000001"]
        await train(queue, 1, [order.group for order in first])
        ports["b"].hold.clear()
        await controller.publish(weights(1))
        while ports["a"].version < 1:
            await asyncio.sleep(0.01)
        assert controller.room() == 0, "b has not acknowledged version 1"
        assert (await controller.pull(pull(0))).orders == ()
        ports["b"].hold.set()
        second = (await controller.pull(pull(64))).orders
        assert [order.group for order in second] == ["g0000002", "g0000003"]
        assert {order.version for order in second} == {1}


async def test_nothing_is_admitted_before_admission_opens_or_beyond_the_capacity() -> None:
    queue = MemoryQueue()
    async with running(config(max_lag=2), queue, two()) as controller:
        assert controller.room() == 0
        await controller.open_admission(True)
        orders = (await controller.pull(pull(1000))).orders
        assert len(orders) == 6
        assert (await queue.ledger()).pending == 12


async def test_a_restarted_controller_admits_no_burst_and_grows_the_epoch() -> None:
    queue, settings = MemoryQueue(), config(max_lag=1)
    async with running(settings, queue, two()) as controller:
        await controller.open_admission(True)
        orders = (await controller.pull(pull(1000))).orders
        epoch = controller.epoch
    async with running(settings, queue, two()) as again:
        assert again.epoch > epoch
        assert again.room() == 0, "open groups still hold their places"
        assert (await again.pull(pull(0, running={o.group: 0 for o in orders}))).orders == ()
        assert (await queue.ledger()).admitted == 8


async def test_a_lost_workers_groups_are_ordered_again_with_a_new_attempt() -> None:
    queue = MemoryQueue()
    async with running(config(max_lag=0), queue, two()) as controller:
        await controller.open_admission(True)
        lost = (await controller.pull(pull(64))).orders
        again: dict[str, int] = {}
        while len(again) < len(lost):
            grant = await controller.pull(pull(64, incarnation="two", running=again))
            again |= {order.group: order.attempt for order in grant.orders}
        assert again == {order.group: 1 for order in lost}
        ledger = await queue.ledger()
        assert (ledger.admitted, ledger.pending) == (4, 4), "an attempt is no new trajectory"


async def test_a_generator_that_cannot_load_is_restarted_and_the_other_goes_on() -> None:
    queue, ports = MemoryQueue(), two()
    async with running(config(max_lag=0), queue, ports) as controller:
        await controller.open_admission(True)
        ports["b"].fail = True
        await controller.publish(weights(1))
        while not ports["b"].restarts:
            await asyncio.sleep(0.01)
        assert controller.acknowledged() == 1, "a laggard is left out, not waited for"
        rows = {row.name: row.healthy for row in controller.table().generators}
        assert rows == {"a": True, "b": False}


async def test_a_generator_whose_loads_hang_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.fleet.LOAD_DEADLINE_S", 0.05)
    queue, ports = MemoryQueue(), two()
    async with running(config(max_lag=0), queue, ports) as controller:
        await controller.open_admission(True)
        ports["b"].hold.clear()
        await controller.publish(weights(1))
        while not ports["b"].restarts:
            await asyncio.sleep(0.01)
        assert ports["b"].restarts == ["weights were not loaded within 0.05 s"]
        assert controller.acknowledged() == 1, "the other goes on"


async def test_versions_never_go_back() -> None:
    queue = MemoryQueue()
    async with running(config(), queue, two()) as controller:
        await controller.publish(weights(3))
        with pytest.raises(WeightsFailed, match="2 published after 3"):
            await controller.publish(weights(2))


async def test_evaluation_goes_first_and_outside_the_ledger() -> None:
    queue = MemoryQueue()
    async with running(config(max_lag=2), queue, two()) as controller:
        await controller.open_admission(True)
        suite = asyncio.create_task(controller.evaluate("s", "greedy", 3, 10.0))
        await asyncio.sleep(0.05)
        orders = (await controller.pull(pull(3))).orders
        assert [order.purpose for order in orders] == [Purpose.EVAL] * 3
        assert {order.temperature for order in orders} == {0.0}
        assert (await queue.ledger()).admitted == 0
        await controller.report_eval(
            [EvalEpisode(suite="s", group=order.group, success=1.0) for order in orders]
        )
        assert (await suite).success == 1.0
        again = await controller.evaluate("s", "greedy", 3, 10.0)
        assert again.tasks == 3, "asking again returns the finished suite"


@pytest.mark.parametrize("how", ["scaled away", "silent"])
async def test_what_a_worker_that_is_gone_evaluated_is_given_to_another(how: str) -> None:
    async with running(config(), MemoryQueue(), two()) as controller:
        suite = asyncio.create_task(controller.evaluate("s", "greedy", 2, 15.0))
        await asyncio.sleep(0.05)
        held: dict[str, str] = {}
        for worker in ("worker-0", "worker-1"):
            (order,) = (await controller.pull(Pull(worker=worker, incarnation="one", slots=4, free=1))).orders
            held[worker] = order.group
        if how == "silent":
            controller.orders.assignments.silent_s = 1.5
        else:
            await controller.have(["generator-0", "worker-0"])
        mine = Pull(worker="worker-0", incarnation="one", slots=4, free=3, running={held["worker-0"]: 0})
        given: list[str] = []
        async with asyncio.timeout(10):
            while not given:
                given = [order.group for order in (await controller.pull(mine)).orders]
        assert given == [held["worker-1"]]
        for group in held.values():
            await controller.report_eval([EvalEpisode(suite="s", group=group, success=1.0)])
        assert (await suite).tasks == 2


async def test_a_worker_that_was_ended_is_forgotten_and_its_counters_are_kept() -> None:
    queue = MemoryQueue()
    async with running(config(), queue, two()) as controller:
        for worker in ("worker-0", "worker-1"):
            report = Pull(worker=worker, incarnation="one", slots=4, free=0, counters={"turns": 5.0})
            await controller.pull(report)
        await controller.have(["worker-0", "generator-0"])
        assert set((await controller.status())["workers"]) == {"worker-0"}
        assert (await controller.step_facts({}))["workers"] == {"turns": 10.0}
        await controller.have(["worker-0", "generator-0"])
        assert (await controller.step_facts({}))["workers"] == {"turns": 10.0}, "once"
