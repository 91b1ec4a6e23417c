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


async def test_one_that_leaves_or_joins_is_told_to_forget_its_tasks_under_the_epoch() -> None:
    fakes = Fakes()
    async with running(fakes, "a", "b") as fleet:
        await healthy(fleet, "a", "b")
        port = fakes.ports["a"]
        assert port.cleared == [], "a new controller takes over what is being played"
        await fleet.leave("a", "test")
        left = fleet.epoch
        while not port.cleared:
            await asyncio.sleep(0.01)
        await fleet.join("a")
        assert fleet.table().generators[0].healthy is False
        await healthy(fleet, "a", "b")
        assert port.cleared[0] == left < port.cleared[1] and len(port.cleared) == 2
        port.alive = False
        await fleet.leave("a", "dead")  # it cannot be told now
        await fleet.join("a")
        await asyncio.sleep(0.1)
        assert not fleet.slots["a"].healthy and len(port.cleared) == 2
        port.alive = True
        fleet.notify()
        await healthy(fleet, "a", "b")
        assert len(port.cleared) == 3, "it is cleared before it counts as healthy"


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


class SlowQueue(MemoryQueue):
    """Its answers to a new epoch take as long as they are told; a later one may be the sooner."""

    def __init__(self) -> None:
        super().__init__()
        self.delays: list[float] = []

    async def put(self, name: str, raw: bytes) -> None:
        if name == "epoch" and self.delays:
            await asyncio.sleep(self.delays.pop(0))
        await super().put(name, raw)


async def test_an_epoch_is_given_once_and_told_when_it_is_durable() -> None:
    queue = SlowQueue()
    async with running(Fakes(), queue=queue) as fleet:
        first = fleet.epoch
        queue.delays = [0.1, 0.05]
        growing = [asyncio.create_task(fleet.grow()) for _ in range(2)]
        while not all(task.done() for task in growing):
            assert fleet.table().epoch == int(await queue.get("epoch") or b"0")
            await asyncio.sleep(0.01)
        assert sorted(task.result() for task in growing) == [first + 1, first + 2]
        assert int(await queue.get("epoch") or b"0") == fleet.epoch == first + 2


async def test_members_that_are_unclear_at_the_start_are_cleared() -> None:
    fakes = Fakes()
    fleet = Fleet(config(), MemoryQueue(), fakes, lambda event, fields: None)
    await fleet.start(["a", "b"], ["b"])
    loop = asyncio.create_task(fleet.run())
    async with asyncio.timeout(10):
        await healthy(fleet, "a", "b")
    assert (len(fakes.ports["a"].cleared), len(fakes.ports["b"].cleared)) == (0, 1)
    await fleet.stop()
    await asyncio.wait_for(loop, 10)


async def test_a_fleet_that_has_ended_starts_nothing_any_more() -> None:
    """Its process may live on for a moment, in which a call is answered."""
    fakes = Fakes()
    fleet = Fleet(config(), MemoryQueue(), fakes, lambda event, fields: None)
    await fleet.start(["a"])
    loop = asyncio.create_task(fleet.run())
    async with asyncio.timeout(10):
        await healthy(fleet, "a")
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await fleet.join("b")
    await fleet.leave("a", "test")
    assert list(fleet.slots) == ["b"] and fakes.ports["a"].cleared == []


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


async def test_places_given_and_taken_are_counted_over_generators_and_processes() -> None:
    fakes = Fakes()
    async with running(fakes, "a", "b") as fleet:
        await healthy(fleet, "a", "b")
        a, b = fleet.slots["a"], fleet.slots["b"]
        a.note(report(parks=5, resumes=3, moved=1, resident=4, parked=2), "no_work")
        b.note(report(name="b", parks=1, resident=1, queued=6), "no_work")
        assert fleet.totals().admission() == {"parked": 6, "resumed": 3, "moved": 1}
        assert fleet.tasks() == {"resident": 5, "parked": 2, "queued": 6}
        a.note(report(parks=2, instance="two", parked=2), "no_work")
        b.healthy = False
        assert fleet.totals().admission() == {"parked": 8, "resumed": 3, "moved": 1}
        assert fleet.tasks() == {"resident": 0, "parked": 2, "queued": 0}, "who is not at work has no tasks"


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
        slot = fleet.slots["a"]
        rows = []
        for _ in range(2):
            slot.note(report(capacity_tokens=100, promised_tokens=30, free_tokens=65), "no_work")
            rows.append(fleet.table().generators[0])
        assert [row.free for row in rows] == [65, 65], "what it may promise, not what is left"
        assert rows[1].report == rows[0].report + 1, "new, though it says the same"


async def test_a_refresh_does_not_wait_for_one_that_hangs() -> None:
    fakes = Fakes()
    async with running(fakes, "a", "b") as fleet:
        await healthy(fleet, "a", "b")
        never = asyncio.Event()

        async def hang() -> GeneratorHealth:
            await never.wait()
            raise AssertionError

        fakes.ports["b"].health = hang  # type: ignore[method-assign]
        before = fleet.slots["a"].reports
        async with asyncio.timeout(5.0):
            await fleet.refresh()
        assert fleet.slots["a"].reports > before
