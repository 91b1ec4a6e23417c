"""Generators that join and leave while the job runs: table, epoch, counters, weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from test_controller import ScriptedGenerator, config, weights

from cluster.fleet import Fleet, Slot
from cluster.memory import MemoryQueue
from cluster.messages import GeneratorHealth


class Fakes:
    """Ports by name, made when first asked for; ``missing`` names have no actor yet."""

    def __init__(self) -> None:
        self.ports: dict[str, ScriptedGenerator] = {}
        self.missing: set[str] = set()
        self.make = ScriptedGenerator

    def __call__(self, name: str) -> ScriptedGenerator:
        if name in self.missing:
            raise ValueError(f"no actor {name}")
        return self.ports.setdefault(name, self.make(name))


@asynccontextmanager
async def running(fakes: Fakes, *names: str, queue: MemoryQueue | None = None) -> AsyncIterator[Fleet]:
    events: list[tuple[str, dict[str, Any]]] = []
    fleet = Fleet(
        config(), queue or MemoryQueue(), fakes, lambda event, fields: events.append((event, fields))
    )
    fleet.events = events  # type: ignore[attr-defined]
    await fleet.start(names)
    loop = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(20):
            yield fleet
    finally:
        await fleet.stop()
        await asyncio.wait_for(loop, 10)


async def healthy(fleet: Fleet, *names: str) -> None:
    while {row.name for row in fleet.table().generators if row.healthy} != set(names):
        await asyncio.sleep(0.01)


async def test_one_joins_with_the_published_weights_and_one_leaves() -> None:
    fakes = Fakes()
    async with running(fakes, "a") as fleet:
        await healthy(fleet, "a")
        await fleet.publish(weights(3))
        fleet.notify()
        epoch = fleet.epoch
        await fleet.join("b")
        await healthy(fleet, "a", "b")
        assert fakes.ports["b"].version == 3, "loaded before it counts as healthy"
        assert fleet.epoch > epoch
        epoch = fleet.epoch
        await fleet.leave("a", "test")
        assert [row.name for row in fleet.table().generators] == ["b"]
        assert fleet.epoch == epoch + 1
        await fleet.leave("a", "twice")
        assert fleet.epoch == epoch + 1, "nothing changed"
        await fleet.join("a")
        await healthy(fleet, "a", "b")


async def test_an_actor_that_does_not_exist_yet_is_waited_for() -> None:
    fakes = Fakes()
    fakes.missing.add("b")
    async with running(fakes, "a", "b") as fleet:
        await healthy(fleet, "a")
        fakes.missing.clear()
        await healthy(fleet, "a", "b")


async def test_an_epoch_is_never_used_twice() -> None:
    queue, fakes = MemoryQueue(), Fakes()
    async with running(fakes, "a", queue=queue) as fleet:
        await healthy(fleet, "a")
        await fleet.leave("a", "test")
        last = fleet.epoch
    async with running(fakes, "a", queue=queue) as again:
        assert again.epoch == last + 1


def report(**changed: Any) -> GeneratorHealth:
    return GeneratorHealth(**{"name": "a", "instance": "one", "ready": True, "version": 0, **changed})


def test_totals_count_over_processes_and_causes() -> None:
    slot = Slot("a")
    slot.note(report(tokens=10, starved_s=5.0), "capacity")
    assert slot.totals.starved_s == {}, "what it waited before it was known is nobody's loss"
    slot.note(report(tokens=15, starved_s=6.0, busy=((0.0, 2.0),)), "capacity")
    slot.note(report(tokens=15, starved_s=6.5), "no_work")
    slot.note(report(tokens=4, starved_s=1.0, instance="two", busy=((5.0, 6.0),)), "no_work")
    assert slot.totals.tokens == 19
    assert slot.totals.starved_s == {"capacity": 1.0, "no_work": 0.5}
    slot.back = True  # it was away, and a member again
    slot.note(report(tokens=4, starved_s=70.0, instance="two"), "no_work")
    slot.note(report(tokens=4, starved_s=70.5, instance="two"), "no_work")
    assert slot.totals.starved_s == {"capacity": 1.0, "no_work": 1.0}, "waited while away: nobody's loss"
    assert slot.totals.busy_s == 3.0
    assert slot.restarts == 1


async def test_one_that_left_keeps_its_counters_and_its_process_is_not_counted_again() -> None:
    fakes = Fakes()
    async with running(fakes, "a") as fleet:
        await healthy(fleet, "a")
        fleet.slots["a"].note(report(tokens=7), "no_work")
        await fleet.leave("a", "test")
        assert fleet.totals().tokens == 7
        await fleet.join("a")
        fleet.slots["a"].note(report(tokens=9), "no_work")
        assert fleet.totals().tokens == 9


async def test_the_table_tells_free_tokens() -> None:
    fakes = Fakes()
    async with running(fakes, "a") as fleet:
        await healthy(fleet, "a")
        fleet.slots["a"].note(report(capacity_tokens=100, promised_tokens=30), "no_work")
        assert fleet.table().generators[0].free == 70


async def test_a_refresh_does_not_wait_for_one_that_hangs() -> None:
    fakes = Fakes()
    async with running(fakes, "a", "b") as fleet:
        await healthy(fleet, "a", "b")
        never = asyncio.Event()

        async def hang() -> GeneratorHealth:
            await never.wait()
            raise AssertionError

        fakes.ports["b"].health = hang  # type: ignore[method-assign]
        async with asyncio.timeout(5.0):
            await fleet.refresh()
