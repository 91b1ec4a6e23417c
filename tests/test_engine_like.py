"""What the gate relies on, held to by the timed twin and by the fake that its tests use."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fake_engine import FakeEngine

from actors.engine import Engine
from actors.engine_like import EngineLike
from actors.gate import Gate
from actors.pending import Pending
from actors.twin import TwinEngine
from cluster.config import AdmissionConfig, GeneratorConfig, build
from cluster.types import Completion, Request, Sampling, Weights, pack_ids
from deploy.tokens import make_tokens


def twin(folder: Path) -> TwinEngine:
    make_tokens(folder)
    tree = {
        "run": {"seed": 5},
        "model": {"maker": "tokens"},
        "env": {"name": "load", "sandbox": "inline"},
        "harness": {"max_context": 1024, "max_new_tokens": 48},
        "learner": {"row_tokens": 1024},
        "twin": {"profile": "twin", "speed": 5.0},
    }
    return TwinEngine(build(tree), folder, "g0", seed=0)


@pytest_asyncio.fixture(params=["fake", "twin"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineLike]:
    made: EngineLike = FakeEngine(3000, delay_s=0.1) if request.param == "fake" else twin(tmp_path / "model")
    yield made
    await made.close()


def asked(count: int, first: int = 0) -> list[Request]:
    sampling = Sampling(max_tokens=16, stop_ids=(2,))
    return [
        Request(id=f"g{n:07d}.0/0/0", prompt=pack_ids([7] * 100), sampling=sampling, session=f"g{n:07d}.0")
        for n in range(first, first + count)
    ]


async def collected(engine: EngineLike | Gate, count: int, caller: str = "w") -> list[Completion]:
    found: list[Completion] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            found += await engine.collect(caller, 1.0)
    return found


def names(found: list[Request] | list[Completion]) -> list[str]:
    return sorted(one.id for one in found)


def load(engine: EngineLike | Gate) -> int:
    return engine.stats().running + engine.stats().waiting


async def test_each_caller_gets_each_answer_once(engine: EngineLike) -> None:
    await engine.start(3)
    mine, theirs = asked(4), asked(3, first=10)
    await engine.submit("w", mine)
    await engine.submit("v", theirs)
    await engine.submit("w", mine)  # outstanding: nothing changes
    assert load(engine) == 7
    found = await collected(engine, 4)
    assert names(found) == names(mine) and not any(one.error for one in found)
    assert {one.versions[0].version for one in found} == {engine.version}
    assert names(await collected(engine, 3, "v")) == names(theirs)
    assert await engine.collect("w", 0.3) == []


async def test_what_is_withdrawn_or_cancelled_is_not_answered(engine: EngineLike) -> None:
    await engine.start()
    mine, theirs = asked(4), asked(1, first=10)
    await engine.submit("w", mine)
    await engine.submit("v", theirs)
    assert await engine.withdraw("w", [mine[0].id, "unknown", theirs[0].id]) == [mine[0].id]
    assert await engine.cancel("w") == 3
    assert names(await collected(engine, 1, "v")) == names(theirs)
    assert await engine.collect("w", 0.3) == [] and load(engine) == 0
    await engine.submit("w", mine[:1])  # the same name may be used again
    assert names(await collected(engine, 1)) == names(mine[:1])


async def test_unknown_tasks_may_be_released_and_running_ones_go_on(engine: EngineLike) -> None:
    await engine.start()
    await engine.submit("w", asked(1))
    await engine.release(["nobody", "g0000000.0"])
    assert names(await collected(engine, 1)) == names(asked(1))


async def test_weights_change_between_answers(engine: EngineLike) -> None:
    await engine.start()
    assert await engine.load_weights(Weights(version=4, location="twin:4", checksum="c", nbytes=0), 1) == 4
    assert engine.version == engine.stats().version == 4


async def test_the_end_is_told_to_everyone(engine: EngineLike) -> None:
    assert not engine.healthy and not engine.stats().ready
    await engine.start()
    assert engine.healthy and engine.stats().ready and engine.capacity_tokens > 0
    waiting = asyncio.create_task(engine.run_until_dead())
    await engine.submit("w", asked(3))
    await engine.close()
    found = await collected(engine, 3)
    assert all("closed" in one.error and one.retryable for one in found)
    assert await waiting == "closed" and not engine.healthy
    await engine.submit("w", asked(1, first=5))
    (late,) = await collected(engine, 1)
    assert late.retryable and late.error.startswith("EngineFailed")


async def test_a_gate_before_it_drops_who_left_and_forgets_when_told(engine: EngineLike) -> None:
    gate = Gate(engine, AdmissionConfig(headroom=0.0), 30.0, prefill_tok_s=lambda: 1000.0)
    await gate.start()
    mine = asked(3)
    await gate.submit("w", mine)
    assert load(gate) == 3
    await gate.release("w", [mine[0].session])
    assert load(gate) == 2 and gate.stats().resident == 2
    assert names(await collected(gate, 2)) == names(mine[1:])
    await gate.submit("w", asked(1, first=7))
    await gate.clear(2)
    assert [one.retryable for one in await collected(gate, 1)] == [True]
    assert load(gate) == 0 and gate.stats().resident == 0
    await gate.close()


async def test_an_engine_that_cannot_be_watched_is_dead() -> None:
    """Else it would seem healthy for ever, with nobody to end what is late or to notice its death."""

    class Core:
        errored = False

        async def abort(self, names: list[str], internal: bool) -> None:
            raise RuntimeError("the core does not answer")

    engine = Engine("/nowhere", GeneratorConfig(), 64, "g0", 0, vocabulary=10)
    engine._llm = Core()
    (request,) = asked(1)
    late = Pending("w", request, 0.0, engine._finished)
    late.core_id = "1"
    engine._pending["w", request.id] = late
    async with asyncio.timeout(10):
        await engine._watch()
    assert not engine.healthy and "does not answer" in await engine.run_until_dead()
    (told,) = await collected(engine, 1)
    assert told.retryable and told.error.startswith("EngineFailed: it cannot be watched")
