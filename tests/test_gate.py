"""The gate before an engine: what enters when, what is answered if nothing can; ids stay the same."""

import asyncio
import time
import zlib
from pathlib import Path

import pytest
from fake_engine import LOADED, FakeEngine, answers, opened, request, until

from actors.gate import NO_PLACE, Gate
from actors.harness.chat import ChatHarness
from actors.rollout import Member, Tools, run_trajectory
from actors.router import Router
from actors.scripted import ScriptedEnvironments, character_tokenizer
from cluster.config import AdmissionConfig, GeneratorConfig, HarnessConfig
from cluster.messages import GeneratorRow, Table
from cluster.types import Order, Purpose, Task, ids
from envs.base import StepResult


async def test_requests_enter_as_places_become_free() -> None:
    async with opened() as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0") for n in range(4)])
        assert engine.entered == ["0", "1"]  # 1100 each, and room for the turns after
        health = gate.stats()
        assert (health.running, health.waiting, health.queued, health.resident) == (2, 2, 2, 2)
        assert (health.capacity_tokens, health.promised_tokens) == (3000, 2200)
        await asyncio.sleep(0.05)
        assert gate.stats().demand_s - health.demand_s > 0.05, "four want what two have"
        engine.answer("0")
        assert (await answers(gate, 1))["0"].error == ""
        await gate.release("w", ["g0.0"])
        assert engine.entered == ["0", "1", "2"] and engine.released == ["g0.0"]


async def test_what_is_outstanding_is_not_asked_twice() -> None:
    async with opened() as (gate, engine):
        await gate.submit("w", [request("0", "g0.0"), request("0", "g0.0")])
        await gate.submit("w", [request("0", "g0.0")])
        assert engine.entered == ["0"]
        await gate.submit("w", [request("0#1", "g0.0")])  # asked again under a new name, the first is inside
        assert engine.entered == ["0", "0#1"]


async def test_a_place_is_held_until_its_hold_runs_out() -> None:
    async with opened(capacity=2000, timeout_s=30.0) as (gate, engine):
        await gate.submit("w", [request("a", "ga.0"), request("b", "gb.0", tokens=900)])
        assert engine.entered == ["a"]
        engine.answer("a")
        await answers(gate, 1)
        assert engine.entered == ["a", "b"]  # replies are short: both fit
        await gate.submit("w", [request("c", "gc.0", tokens=900)])
        # 1 s to recompute, half of the memory: held for about 2 s
        assert gate.stats().parked == 0
        await until(lambda: engine.entered == ["a", "b", "c"])
        assert gate.stats().parked == 1


async def test_an_evaluation_enters_where_training_waits() -> None:
    async with opened(capacity=2400) as (gate, engine):
        await gate.submit("w", [request("a", "ga.0"), request("b", "gb.0", tokens=1000)])
        engine.answer("a")
        await answers(gate, 1)
        await gate.submit("w", [request("e", "e0.0", tokens=1100, evaluation=True)])
        assert engine.entered[-1] == "e" and gate.stats().parked >= 1


async def test_no_place_in_time_is_answered_and_asked_again_without_counting() -> None:
    async with opened(timeout_s=0.3) as (gate, engine):
        await gate.submit("w", [request("a", "ga.0", tokens=2900), request("b", "gb.0")])
        found = await answers(gate, 1)
        assert found["b"].error.startswith(NO_PLACE) and found["b"].retryable
        assert gate.stats().queued == 0
        engine.answer("a")
        assert (await answers(gate, 1))["a"].error == ""


async def test_the_router_does_not_count_a_missing_place_as_failure() -> None:
    async with opened(timeout_s=0.3, max_tasks=1) as (gate, engine):
        router = Router(
            "w", GeneratorConfig(request_timeout_s=5.0, max_retries=0), lambda _: gate, gated=True
        )
        router.set_table(Table(epoch=1, generators=(GeneratorRow("g0", True, 0),)))
        first = asyncio.create_task(router.generate(request("a", "ga.0")))
        await until(lambda: bool(engine.entered))
        second = asyncio.create_task(router.generate(request("b", "gb.0", evaluation=True)))
        await until(lambda: router.stats.no_place >= 1)
        engine.answer("a")
        assert (await first).id == "a"
        router.forget("ga.0")
        await until(lambda: len(engine.entered) == 2)
        assert engine.entered[1].startswith("b#") and engine.requests[-1].waited_s >= 0.3
        engine.answer(engine.entered[1])
        assert (await second).id == "b" and router.stats.retries == 0
        await until(lambda: engine.released == ["ga.0"])
        await router.aclose()


async def test_a_task_goes_where_there_is_room() -> None:
    async with opened(capacity=1350, delay_s=0.01) as (other, there), opened(capacity=2400) as (gate, engine):
        there.name = "g1"
        gates = {"g0": gate, "g1": other}
        router = Router("w", GeneratorConfig(), lambda name: gates[name], gated=True)
        rows = (GeneratorRow("g0", True, 0, 2400), GeneratorRow("g1", True, 0, 1350))
        router.set_table(Table(epoch=1, generators=rows))
        pushed = asyncio.create_task(router.generate(request("a", "ga.0")))
        await until(lambda: engine.entered == ["a"])  # both are idle
        engine.answer("a")
        await pushed
        big = asyncio.create_task(router.generate(request("b", "gb.0", tokens=1220, growth=100)))
        await until(lambda: len(engine.entered) + len(there.entered) == 2)
        assert there.entered == ["b"]  # by the router's own count the first has 1300 left
        await big
        await router.aclose()


async def test_those_at_the_gate_are_told_when_the_engine_dies() -> None:
    async with opened() as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0") for n in range(5)])
        engine.die("out of memory")
        found = await answers(gate, 5)
        assert all(
            "out of memory" in completion.error and completion.retryable for completion in found.values()
        )
        await gate.submit("w", [request("late", "g9.0")])
        assert "not running" in (await answers(gate, 1))["late"].error


async def test_who_waits_while_nothing_runs_is_told_when_the_engine_dies() -> None:
    async with opened(capacity=1300) as (gate, engine):
        await gate.submit("w", [request("a", "ga.0", evaluation=True)])
        engine.answer("a")
        await answers(gate, 1)
        await gate.submit("w", [request("b", "gb.0", evaluation=True)])
        assert engine.entered == ["a"] and gate.stats().queued == 1
        engine.die("out of memory")
        assert "out of memory" in (await answers(gate, 1))["b"].error


async def test_cancelling_a_caller_covers_the_gate() -> None:
    async with opened() as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0") for n in range(4)])
        await gate.submit("v", [request("v", "gv.0")])
        assert await gate.cancel("w") == 4
        assert engine.entered == ["0", "1", "v"]
        figures = gate.figures
        assert figures is not None and (figures.active, figures.queued, figures.resident) == (1, 0, 1)
        assert await gate.collect("w", 0.05) == []


async def test_new_weights_end_the_holds() -> None:
    async with opened(capacity=2400, timeout_s=60.0) as (gate, engine):
        gate.admission.waits.observe("", 0.0)  # type: ignore[union-attr]
        await gate.submit("w", [request("a", "ga.0"), request("b", "gb.0", tokens=900)])
        engine.answer("a")
        await answers(gate, 1)
        await gate.submit("w", [request("c", "gc.0", tokens=900)])
        assert engine.entered == ["a", "b"]
        assert await gate.load_weights(LOADED, 1) == 1
        assert engine.entered == ["a", "b", "c"]


async def test_requests_without_a_session_are_tasks_of_one_turn() -> None:
    async with opened(delay_s=0.0) as (gate, _):
        await gate.submit("w", [request(f"{n}", "") for n in range(8)])
        assert len(await answers(gate, 8)) == 8
        assert gate.stats().resident == 0


@pytest.mark.parametrize(("capacity", "policy"), [(3000, "request"), (0, "task")])
async def test_everything_enters_at_once_by_request_or_without_a_capacity(capacity: int, policy: str) -> None:
    async with opened(capacity=capacity, policy=policy) as (gate, engine):
        await gate.submit("w", [request(f"{n}", f"g{n}.0") for n in range(50)])
        assert engine.entered == [f"{n}" for n in range(50)]
        for n in range(50):
            engine.answer(f"{n}")
        assert len(await answers(gate, 50)) == 50
        assert gate.admission is not None and not gate.admission._tasks  # nothing to remember


async def test_starvation_is_time_without_any_request() -> None:
    async with opened() as (gate, engine):
        await asyncio.sleep(0.1)
        begun, first = time.monotonic(), gate.stats().starved_s
        assert first >= 0.1
        await gate.submit("w", [request("a", "ga.0")])
        submitted = time.monotonic() - begun
        await asyncio.sleep(submitted + 0.1)
        between = gate.stats().starved_s
        engine.answer("a")
        await answers(gate, 1)
        await asyncio.sleep(0.1)
        assert between <= first + submitted and gate.stats().starved_s >= between + 0.1


# -- the same trajectories --------------------------------------------------------------------------


async def episodes(tmp_path: Path, policy: str, capacity: int) -> tuple[dict[str, Member], FakeEngine, Gate]:
    """Twelve groups of four on one engine, played at once, every environment with its own pace."""
    tokenizer = character_tokenizer(tmp_path / "tokenizer")

    def play(task: Task, turn: int, actions: list[str]) -> StepResult:
        seen = zlib.crc32(f"{task.id} {turn} {actions}".encode())
        return StepResult("o" * (seen % 60), rewards={"success": 1.0}, done=turn + 1 >= 2 + seen % 6)

    engine = FakeEngine(capacity, delay_s=0.002)
    gate = Gate(engine, AdmissionConfig(policy=policy), 30.0, prefill_tok_s=lambda: 20_000.0)  # type: ignore[arg-type]
    await gate.start()
    router = Router("w", GeneratorConfig(), lambda _: gate, gated=policy == "task")
    router.set_table(Table(epoch=1, generators=(GeneratorRow("g0", True, 0, capacity),)))
    harness = ChatHarness(tokenizer, HarnessConfig(max_context=1500, max_new_tokens=16))
    environments = ScriptedEnvironments(play, start=lambda task, seed: f"begin {task.id} " * 4)
    kit = Tools(
        harness,
        router,
        environments,
        max_turns=8,
        delay=lambda seed, turn: (seed % 97) / 4000,
        pause_after_s=0.01,
    )
    deadline = asyncio.get_running_loop().time() + 30
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    run_trajectory(kit, order(f"g{g}", g), f"g{g}.{m}", lambda _: None, deadline)
                )
                for g in range(12)
                for m in range(4)
            ]
        members = [task.result() for task in tasks]
        for member in members:
            router.forget(member.trajectory)
        await until(lambda: gate.stats().resident == 0)
    finally:
        await router.aclose()
        await gate.close()
    assert environments.live == 0 and (policy == "request" or environments.pauses > 0)
    return {member.trajectory: member for member in members}, engine, gate


def order(group: str, number: int) -> Order:
    return Order(
        group=group,
        task=Task(id=f"t{group}", env="scripted", seed=number),
        members=tuple(f"{group}.{m}" for m in range(4)),
        seed=5,
        purpose=Purpose.EVAL if number == 3 else Purpose.TRAIN,
    )


async def test_parking_changes_no_id(tmp_path: Path) -> None:
    by_request, _, _ = await episodes(tmp_path / "r", "request", 10**6)
    by_task, engine, gate = await episodes(tmp_path / "t", "task", 2500)
    assert gate.figures is not None and gate.figures.parks > 20 and engine.most < 48
    told = gate.stats()
    assert told.parks == gate.figures.parks and 0 < told.resumes == gate.figures.resumes <= told.parks
    assert by_task.keys() == by_request.keys()
    for name, member in by_task.items():
        other = by_request[name]
        assert member.end == other.end
        assert [ids(t.calls[0].output).tolist() for t in member.turns] == [
            ids(t.calls[0].output).tolist() for t in other.turns
        ]
        assert [t.calls[0].added for t in member.turns] == [t.calls[0].added for t in other.turns]
