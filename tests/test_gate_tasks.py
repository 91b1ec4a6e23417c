"""Tasks at the gate: what decides their order, where else they may go, how they leave; room for routers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_engine import LOADED, Clock, FakeEngine, answers, opened, request, until

from actors.gate import MOVED, NO_PLACE, Gate
from actors.router import Router
from cluster.config import GeneratorConfig
from cluster.errors import StaleEpoch
from cluster.fleet import Slot
from cluster.messages import GeneratorRow, Table
from cluster.tool_waits import ToolWaits

WATCHED_S = 0.6  # real seconds in which the gate has looked for deadlines at least once


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Job:
    """A router before gates, and the controller's table as the gates' reports fill it."""

    def __init__(self, gates: dict[str, Gate]) -> None:
        self.gates = gates
        self.slots = {name: Slot(name) for name in gates}
        self.router = Router("w", GeneratorConfig(), lambda name: gates[name], gated=True)
        self.epoch = 0

    def tell(self, *names: str) -> None:
        self.epoch += 1
        rows = []
        for name in names or self.gates:
            slot = self.slots[name]
            slot.note(self.gates[name].stats(), "no_work")
            rows.append(GeneratorRow(name, True, 0, slot.free, slot.reports))
        self.router.set_table(Table(epoch=self.epoch, generators=tuple(rows)))

    def rooms(self) -> list[int]:
        return [lane.room for lane in self.router._lanes.values()]


@asynccontextmanager
async def job(**settings: object) -> AsyncIterator[tuple[Job, list[Gate], list[FakeEngine]]]:
    async with opened(name="g0", **settings) as (a, inner_a), opened(name="g1", **settings) as (b, inner_b):  # type: ignore[arg-type]
        made = Job({"g0": a, "g1": b})
        made.tell()
        try:
            yield made, [a, b], [inner_a, inner_b]
        finally:
            await made.router.aclose()


# -- what decides -----------------------------------------------------------------------------------


async def test_what_a_request_says_of_its_task_reaches_the_ledger() -> None:
    class Heard(ToolWaits):
        def observe(self, tool: str, seconds: float) -> None:
            tools.append(tool)

    tools: list[str] = []
    async with opened(max_tasks=1) as (gate, engine):
        assert gate.admission is not None
        gate.admission.waits = Heard()
        await gate.submit("w", [request("first", "ga.0")])
        engine.answer("first")
        await answers(gate, 1)
        await gate.submit("w", [request("again", "ga.0", tool="bash")])
        assert tools == ["bash"]
        plain, done = request("plain", "gb.0"), request("done", "gc.0", group_done=0.75)
        waited = request("waited", "gd.0", waited_s=10_000.0)
        await gate.submit("w", [plain, done, waited])
        for name, session in (("again", "ga.0"), ("waited", "gd.0"), ("done", "gc.0")):
            engine.answer(name)
            await answers(gate, 1)
            await gate.release("w", [session])
        assert engine.entered == ["first", "again", "waited", "done", "plain"]


async def test_no_kind_takes_more_than_its_share() -> None:
    async with opened(capacity=100_000, max_tasks=2, diversity=0.5) as (gate, engine):
        await gate.submit("w", [request(f"a{n}", f"g{n}.0", kind="a") for n in range(4)])
        await gate.submit("w", [request("b", "gb.0", kind="b")])
        engine.answer("a0")
        await answers(gate, 1)
        await gate.release("w", ["g0.0"])
        assert engine.entered == ["a0", "a1", "b"]


async def test_pressure_cuts_what_is_promised_and_what_routers_are_told() -> None:
    async with opened(capacity=100_000, headroom=0.1) as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0", tokens=900) for n in range(200)])
        before, told = gate.figures, gate.stats()
        assert before is not None and before.queued > 0 and before.budget == 90_000
        assert told.free_tokens == before.free <= 1000, "full"
        assert told.capacity_tokens - told.promised_tokens > 9000, "of which nothing may be promised"
        engine.preemptions, engine.kv_usage = 1, 0.95
        told = gate.stats()
        after = gate.figures
        assert after is not None and after.budget < before.budget and told.free_tokens == after.free == 0


async def test_a_hold_that_runs_out_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gate._WATCH_S", "gate_core._POLL_S"):  # nothing else looks
        monkeypatch.setattr(f"actors.{name}", 60.0)
    async with opened(capacity=2000, prefill_tok_s=10_000.0) as (gate, engine):
        await gate.submit("w", [request("a", "ga.0"), request("b", "gb.0", tokens=900)])
        engine.answer("a")
        await answers(gate, 1)
        await gate.submit("w", [request("c", "gc.0", tokens=900)])
        assert engine.entered == ["a", "b"]
        await until(lambda: engine.entered == ["a", "b", "c"])  # about 0.2 s


# -- where else -------------------------------------------------------------------------------------


async def test_a_parked_task_moves_to_a_generator_with_room_but_not_at_once(clock: Clock) -> None:
    async with opened(capacity=1300, timeout_s=60.0, clock=clock) as (gate, engine):
        await gate.submit("w", [request("a", "ga.0")])
        engine.answer("a")
        await answers(gate, 1)
        await gate.submit("w", [request("b", "gb.0")])  # takes the place of a
        assert engine.entered == ["a", "b"] and gate.stats().parked == 1
        settled = request("c", "gc.0", tokens=500)
        await gate.submit("w", [request("a2", "ga.0", tokens=1050, mobile=True), settled])
        assert await gate.collect("w", WATCHED_S, 5000) == []
        clock.now = 1.03  # it takes 1.05 s to compute it again
        assert await gate.collect("w", WATCHED_S, 5000) == []
        clock.now = 2.0
        assert await gate.collect("w", WATCHED_S, 1000) == [], "too little room there"
        (moved,) = await gate.collect("w", 5.0, 5000)
        assert (moved.id, moved.error) == ("a2", MOVED)
        told = gate.stats()
        assert (told.parks, told.resumes, told.moved) == (1, 0, 1)
        known = (told.resident, told.queued, told.parked)
        assert known == (1, 1, 0), "it is not known here; c asked not to be moved"


async def test_room_elsewhere_is_given_away_once(clock: Clock) -> None:
    async with opened(capacity=1300, timeout_s=60.0, clock=clock) as (gate, _):
        await gate.submit("w", [request("a", "ga.0")])
        await gate.submit("w", [request(f"{n}", f"g{n}.0", mobile=True) for n in range(4)])
        assert await gate.collect("w", 0.0, 2500) == []
        clock.now = 3.0
        await until(lambda: gate.moved > 0)
        assert gate.moved == 2, "1100 each"
        assert len(await gate.collect("w", 0.0, 0)) == 2


async def test_a_task_queued_before_another_generator_became_idle_goes_there(clock: Clock) -> None:
    async with job(timeout_s=60.0, clock=clock) as (made, gates, engines):
        big = [
            asyncio.create_task(made.router.generate(request(f"b{n}", f"gb{n}.0", tokens=2600)))
            for n in range(2)
        ]
        await until(lambda: all(engine.entered for engine in engines))
        made.tell()
        late = asyncio.create_task(made.router.generate(request("late", "gl.0")))
        await until(lambda: any(gate.stats().queued for gate in gates))
        at = 0 if gates[0].stats().queued else 1
        free = engines[1 - at]
        free.answer(free.entered[0])
        done, _ = await asyncio.wait(big, return_when=asyncio.FIRST_COMPLETED)
        made.router.forget(f"g{done.pop().result().id}.0")
        await until(lambda: gates[1 - at].stats().resident == 0)
        clock.now = 4.0
        async with asyncio.timeout(10):
            while len(free.entered) == 1:
                made.tell()
                await asyncio.sleep(0.1)
        assert gates[at].moved == 1 and free.entered[1].startswith("late#")
        free.answer(free.entered[1])
        await late
        for task in big:
            task.cancel()
        await asyncio.gather(*big, return_exceptions=True)


async def test_tasks_do_not_bounce_between_full_generators(clock: Clock) -> None:
    async with job(timeout_s=600.0, capacity=10_000, headroom=0.2, clock=clock) as (made, gates, _):
        sent = [
            asyncio.create_task(made.router.generate(request(f"r{n}", f"g{n}.0", tokens=900)))
            for n in range(20)
        ]
        await until(lambda: sum(gate.stats().queued + gate.stats().resident for gate in gates) == 20)
        for seconds in (5.0, 10.0):
            clock.now = seconds
            made.tell()
            await asyncio.sleep(WATCHED_S)
        assert [gate.moved for gate in gates] == [0, 0] and made.router.stats.no_place == 0
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)


async def test_a_task_is_moved_once_whatever_the_others_promise(clock: Clock) -> None:
    async with job(timeout_s=600.0, capacity=1300, clock=clock) as (made, gates, engines):
        full = [
            asyncio.create_task(made.router.generate(request(f"b{n}", f"gb{n}.0", tokens=1200)))
            for n in range(2)
        ]
        await until(lambda: all(engine.entered for engine in engines))
        lost = asyncio.create_task(made.router.generate(request("r", "gr.0")))
        await until(lambda: any(gate.stats().queued for gate in gates))
        for _ in range(4):
            clock.now += 5.0
            for lane in made.router._lanes.values():
                lane.room = 5000  # a table that is always wrong
            await asyncio.sleep(WATCHED_S)
            for gate in gates:
                gate._elsewhere["w"] = 5000
        await until(lambda: sum(gate.moved for gate in gates) > 0)
        await asyncio.sleep(WATCHED_S)
        assert sum(gate.moved for gate in gates) == 1
        for task in (*full, lost):
            task.cancel()
        await asyncio.gather(*full, lost, return_exceptions=True)


async def test_the_routers_rooms_come_back_with_every_report() -> None:
    async with job(capacity=10_000, delay_s=0.0) as (made, gates, _):
        for n in range(20):
            await made.router.generate(request(f"r{n}", f"g{n}.0", tokens=900))
            made.router.forget(f"g{n}.0")
            await until(lambda: not any(gate.stats().resident for gate in gates))
            made.tell()
            assert made.rooms() == [10_000, 10_000], "though every report says the same"


# -- how they leave ---------------------------------------------------------------------------------


async def test_a_released_task_takes_its_requests_along() -> None:
    async with opened() as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0") for n in range(5)])
        assert engine.entered == ["0", "1"]
        await gate.release("w", ["g0.0", "g2.0", "g3.0", "unknown"])
        assert engine.entered == ["0", "1", "4"], "the dead are not in the way of the living"
        assert engine.inside() == ["1", "4"] and gate.stats().resident == 2 and gate.stats().waiting == 0
        for name in ("1", "4"):
            engine.answer(name)
        assert set(await answers(gate, 2)) == {"1", "4"}
        assert await gate.collect("w", 0.1) == [], "the released get no answer"


async def test_abandoned_trajectories_do_not_enter() -> None:
    async with job(timeout_s=60.0) as (made, gates, engines):
        made.tell("g0")
        gate, engine = gates[0], engines[0]
        first = [asyncio.create_task(made.router.generate(request(f"a{n}", f"ga{n}.0"))) for n in range(2)]
        await until(lambda: len(engine.entered) == 2)
        dead = [asyncio.create_task(made.router.generate(request(f"d{n}", f"gd{n}.0"))) for n in range(4)]
        await until(lambda: gate.stats().queued == 4)
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)
        for n in range(4):
            made.router.forget(f"gd{n}.0")
        live = asyncio.create_task(made.router.generate(request("live", "gl.0")))
        await until(lambda: gate.stats().queued == 1)
        engine.answer("a0")
        await first[0]
        made.router.forget("ga0.0")
        await until(lambda: engine.entered[2:] == ["live"])
        for name in ("live", "a1"):
            engine.answer(name)
        await asyncio.gather(live, first[1])


async def test_a_release_leaves_what_another_worker_plays() -> None:
    async with opened() as (gate, engine):
        await gate.submit("old", [request("ga.0/0/1", "ga.0")])
        await gate.submit("new", [request("ga.0/1/0", "ga.0")])  # the group was ordered again
        await gate.release("old", ["ga.0"])
        assert engine.inside() == ["ga.0/1/0"] and gate.stats().resident == 1 and engine.released == []
        engine.answer("ga.0/1/0", "new")
        assert set(await answers(gate, 1, "new")) == {"ga.0/1/0"}
        await gate.release("new", ["ga.0"])
        assert gate.stats().resident == 0 and engine.released == ["ga.0"]


async def test_a_request_cancelled_while_it_is_handed_over_is_withdrawn() -> None:
    async with opened() as (gate, engine):
        engine.hand_over.clear()
        entering = asyncio.create_task(gate.submit("w", [request("a", "ga.0"), request("b", "gb.0")]))
        await until(lambda: gate.stats().resident == 2)
        await gate.release("w", ["ga.0"])
        engine.hand_over.set()
        await entering
        assert engine.entered == ["a", "b"] and engine.inside() == ["b"]


async def test_who_does_not_ask_for_answers_does_not_queue(clock: Clock) -> None:
    async with opened(timeout_s=400.0, clock=clock) as (gate, engine):
        await gate.submit("dead", [request(f"d{n}", f"gd{n}.0") for n in range(6)])
        await gate.submit("w", [request("live", "gl.0")])
        for clock.now in (20.0, 40.0):
            assert await gate.collect("w", 0.0) == []
            await asyncio.sleep(WATCHED_S)
        assert gate.stats().queued == 1, "only who polls"
        found = await answers(gate, 4, "dead")
        assert all(answer.error.startswith(NO_PLACE) and answer.retryable for answer in found.values())
        assert engine.entered == ["d0", "d1"]


async def test_a_caller_not_heard_of_for_long_gives_up_its_places(clock: Clock) -> None:
    async with opened(timeout_s=100.0, clock=clock) as (gate, engine):
        for caller in ("dead", "w"):
            await gate.submit(caller, [request("a", f"g{caller}.0", evaluation=True)])
            engine.answer("a", caller)
            await answers(gate, 1, caller)
        clock.now = 500.0
        assert await gate.collect("w", WATCHED_S) == [] and gate.stats().resident == 2
        clock.now = 650.0  # ten minutes after it was heard of
        await until(lambda: gate.stats().resident == 1)
        assert await gate.collect("w", WATCHED_S) == [] and gate.stats().resident == 1


async def test_a_generator_that_left_or_joined_forgets_everyone() -> None:
    async with opened(capacity=2000, timeout_s=60.0) as (gate, engine):
        await gate.submit("w", [request("e", "ge.0", evaluation=True), request("a", "ga.0", tokens=500)])
        engine.answer("e")
        await answers(gate, 1)
        await gate.submit("w", [request("b", "gb.0"), request("c", "gc.0")])
        assert gate.stats().resident == 2 and gate.stats().queued == 2
        await gate.clear(3)
        told = gate.stats()
        assert (told.resident, told.queued, told.waiting, told.free_tokens) == (0, 0, 0, 2000)
        found = await answers(gate, 3)
        assert {name: answer.error for name, answer in found.items()} == dict.fromkeys("abc", MOVED)
        assert engine.inside() == [] and set(engine.released) == {"ga.0", "gb.0", "gc.0", "ge.0"}
        await gate.submit("w", [request("d", "ga.0")])  # played here again
        with pytest.raises(StaleEpoch, match="order of epoch 2, already at 3"):
            await gate.clear(2)
        await gate.load_weights(LOADED, 5)
        with pytest.raises(StaleEpoch, match="already at 5"):
            await gate.clear(4)
        assert engine.inside() == ["d"]


async def test_a_generator_that_was_away_has_no_ghosts() -> None:
    async with job(capacity=50_000, timeout_s=60.0, delay_s=0.01) as (made, gates, _):
        sessions = [f"g{n}.0" for n in range(40)]
        ask = made.router.generate
        await asyncio.gather(*(ask(request(f"1-{s}", s, tokens=900, evaluation=True)) for s in sessions))
        assert all(gate.stats().resident == 20 for gate in gates)
        made.tell("g1")  # g0 trains for a while
        await gates[0].clear(made.epoch)
        await asyncio.gather(*(ask(request(f"2-{s}", s, evaluation=True)) for s in sessions))
        for session in sessions:
            made.router.forget(session)
        await gates[0].clear(made.epoch + 1)
        made.tell()
        await until(lambda: gates[1].stats().resident == 0)
        assert gates[0].stats().resident == 0 and gates[0].stats().free_tokens == 50_000


async def test_everyone_is_answered_when_it_closes() -> None:
    async with opened() as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0") for n in range(5)])
        assert len(engine.entered) == 2
        await gate.close()
        found = {answer.id: answer for answer in await gate.collect("w", 0.0)}
        assert set(found) == set("01234")
        assert all("closed" in answer.error and answer.retryable for answer in found.values())
