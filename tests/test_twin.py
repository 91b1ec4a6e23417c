"""Timed twins: the engine's contract without an engine, the load environment, what is not imported."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from actors.gate import Gate
from actors.harness.chat import ChatHarness
from actors.rollout import Tools, run_trajectory
from actors.tokenizer import Tokenizer
from actors.twin import TwinEngine
from cluster.config import Config, build
from cluster.errors import ConfigError, EnvFailed, EnvTimeout, StaleEpoch, WeightsFailed
from cluster.sim.catalogue import load_profile
from cluster.types import (
    Completion,
    EndKind,
    Order,
    Request,
    Sampling,
    StopReason,
    Weights,
    floats,
    ids,
    pack_ids,
)
from deploy.tokens import make_tokens
from envs.inline import InlinePool, make_pool
from envs.load import GLUE, MEMBERS, Place, coin, place_of, text, workload
from envs.pool import EnvPool
from envs.registry import build_tasks, builder
from tests.clocked import beside

SPEED = 20.0  # profile seconds per second: a reply of a second comes in 50 ms
SLACK_S = 0.3  # beyond what a sleep of the same length took meanwhile; at speed 1 it is far more


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"seed": 5, "group_size": 4},
        "model": {"maker": "tokens"},
        "env": {"name": "load", "sandbox": "inline"},
        "harness": {"max_context": 1024, "max_new_tokens": 48},
        "learner": {"row_tokens": 1024},
        "twin": {"profile": "twin", "speed": SPEED},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return build(tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("twin") / "model"
    make_tokens(path)
    return path


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TwinEngine]:
    twin = TwinEngine(config(), folder, "generator-0", seed=0)
    await twin.start(version=3)
    yield twin
    await twin.close()


@pytest_asyncio.fixture
async def unhurried(folder: Path) -> AsyncIterator[TwinEngine]:
    """One that is still at work when this process had to wait for its turn: a reply takes a second."""
    twin = TwinEngine(config(twin={"speed": 1.0}), folder, "generator-0", seed=0)
    await twin.start(version=3)
    yield twin
    await twin.close()


def request(session: str, turn: int = 0, prompt: int = 200, attempt: int = 0, **more: Any) -> Request:
    sampling = Sampling(max_tokens=48, stop_ids=(1,), **more.pop("sampling", {}))
    name = f"{session}/{attempt}/{turn}" + more.pop("suffix", "")
    return Request(id=name, prompt=pack_ids([7] * prompt), sampling=sampling, session=session, **more)


async def answers(engine: TwinEngine, requests: list[Request], caller: str = "w") -> dict[str, Completion]:
    await engine.submit(caller, requests)
    return await collected(engine, len(requests), caller)


async def collected(engine: TwinEngine, count: int, caller: str = "w") -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    deadline = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers"
        found |= {completion.id: completion for completion in await engine.collect(caller, 2.0)}
    return found


def weights(version: int, checksum: str = "") -> Weights:
    return Weights(version=version, location=f"twin:{version}", checksum=checksum or f"c{version}", nbytes=0)


# -- the generator ------------------------------------------------------------------------------------


async def test_replies_have_the_planned_lengths_and_whole_spans(engine: TwinEngine) -> None:
    asked = [request(f"g0000003.{member}", turn) for member in range(4) for turn in range(2)]
    got = await answers(engine, asked)
    for one in asked:
        place = place_of(one.session)
        assert place is not None
        plan = workload("twin").plan(5, place.group, place.member)
        turn = int(one.id.rpartition("/")[2])
        answer = got[one.id]
        assert not answer.error and len(ids(answer.output)) == plan.turns[turn].output
        assert len(floats(answer.logprobs)) == len(ids(answer.output))
        assert [(s.version, s.start, s.end) for s in answer.versions] == [(3, 0, plan.turns[turn].output)]
        assert answer.stop is StopReason.STOP and ids(answer.output)[-1] == 1
        assert (ids(answer.output)[:-1] > 5).all(), "a special token in the middle of a reply"
        assert answer.t_start <= answer.t_end


async def test_service_takes_the_profiles_time(engine: TwinEngine) -> None:
    profile = load_profile("twin").generator
    plan = workload("twin").plan(5, 8, 0)
    decode = (plan.turns[0].output - 1) * (profile.step_base_s + profile.step_seq_s)
    expected = (400 / profile.prefill_tok_s + decode) / SPEED
    _, spent, slept = await beside(answers(engine, [request("g0000008.0", prompt=400)]), expected)
    assert 0.98 * expected < spent < 1.5 * slept + SLACK_S


async def test_a_prefix_is_hit_again_and_not_across_a_sync(engine: TwinEngine) -> None:
    group = next(g for g in range(99) if len(workload("twin").plan(5, g, 0).turns) >= 3)
    session, turns = f"g{group:07d}.0", workload("twin").plan(5, group, 0).turns
    prompts = [sum(t.added + t.output for t in turns[:n]) + turns[n].added for n in range(3)]
    got = [await answers(engine, [request(session, n, prompts[n])]) for n in range(2)]
    await engine.load_weights(weights(4), epoch=1)
    got.append(await answers(engine, [request(session, 2, prompts[2])]))
    cached = [answer.cached_tokens for (answer,) in (one.values() for one in got)]
    block = load_profile("twin").generator.block
    assert cached[0] == cached[2] == 0
    assert prompts[1] - turns[1].added - 2 * block <= cached[1] < prompts[1]


async def test_an_update_in_flight_leaves_spans_of_both_versions(unhurried: TwinEngine) -> None:
    engine = unhurried
    asked = [request(f"g0000002.{member}") for member in range(4)]
    await engine.submit("w", asked)
    await asyncio.sleep(0.1)
    assert await engine.load_weights(weights(4), epoch=1) == 4
    got = await collected(engine, 4)
    mixed = [answer for answer in got.values() if len(answer.versions) == 2]
    assert mixed, [answer.versions for answer in got.values()]
    for answer in got.values():
        assert [s.version for s in answer.versions] in ([3], [3, 4], [4])
        assert answer.versions[0].start == 0 and answer.versions[-1].end == len(ids(answer.output))
        assert all(a.end == b.start for a, b in zip(answer.versions, answer.versions[1:], strict=False))


async def test_orders_of_weights(engine: TwinEngine) -> None:
    assert await engine.load_weights(weights(3), epoch=2) == 3  # the same version, with its checksum
    assert await engine.load_weights(weights(5), epoch=2) == 5
    spent = engine.stats().sync_s
    assert await engine.load_weights(weights(5), epoch=2) == 5
    assert engine.stats().sync_s == spent, "a repeated order took time"
    with pytest.raises(StaleEpoch, match="order of epoch 1, already at 2"):
        await engine.load_weights(weights(6), epoch=1)
    with pytest.raises(WeightsFailed, match="version 4 after 5 in epoch 2"):
        await engine.load_weights(weights(4), epoch=2)
    assert await engine.load_weights(weights(4), epoch=3) == 4  # another history
    with pytest.raises(WeightsFailed, match="cannot load '/dev/shm/v9"):
        await engine.load_weights(Weights(version=9, location="/dev/shm/v9", checksum="x", nbytes=1), epoch=3)
    assert engine.version == 4 and engine.healthy


async def test_bad_requests_are_answered_with_their_error(engine: TwinEngine) -> None:
    wrong = [
        request("g0000001.0", prompt=0),
        request("g0000001.1", prompt=1000),
        Request(id="far", prompt=pack_ids([4000]), sampling=Sampling(max_tokens=2), session="s"),
    ]
    got = await answers(engine, wrong)
    said = {answer.error.partition(":")[0] for answer in got.values()}
    assert said == {"BadRequest"} and not any(answer.retryable for answer in got.values())
    assert not (await answers(engine, [request("g0000001.2")]))["g0000001.2/0/0"].error


async def test_repeating_and_cancelling(unhurried: TwinEngine) -> None:
    engine = unhurried
    asked = [request(f"g0000004.{member}") for member in range(3)]
    await engine.submit("w", asked)
    await engine.submit("w", asked)
    assert len(await collected(engine, 3)) == 3
    assert not await engine.collect("w", 0.1)
    await engine.submit("w", asked)
    assert await engine.withdraw("w", [asked[0].id, "unknown"]) == [asked[0].id]
    assert await engine.cancel("w") == 2
    assert not await engine.collect("w", 2.0)
    assert engine.stats().running == engine.stats().waiting == 0


async def test_a_trajectory_is_the_same_whatever_happens_on_its_way(folder: Path) -> None:
    """Withdrawn half way, asked again elsewhere, under other load, at another version: the same ids."""
    calm, busy = (TwinEngine(config(), folder, f"generator-{n}", seed=n) for n in range(2))
    await calm.start()
    await busy.start(version=7)
    session = "g0000011.2"
    once = [await answers(calm, [request(session, turn, 200 + 60 * turn)]) for turn in range(3)]
    crowd = [request(f"g00000{20 + n}.0") for n in range(12)]
    await busy.submit("crowd", crowd)
    again = []
    for turn in range(3):
        await busy.submit("w", [request(session, turn, 200 + 60 * turn)])
        await asyncio.sleep(0.01)
        await busy.withdraw("w", [f"{session}/0/{turn}"])
        again.append(await answers(busy, [request(session, turn, 200 + 60 * turn, attempt=1, suffix="#2")]))
    for first, second in zip(once, again, strict=True):
        (a,), (b,) = first.values(), second.values()
        assert a.output == b.output and a.logprobs == b.logprobs
    await calm.close()
    await busy.close()


async def test_death_and_deadline(folder: Path) -> None:
    twin = TwinEngine(config(generator={"request_timeout_s": 0.6}, twin={"speed": 0.05}), folder, "g", seed=0)
    await twin.start()
    got = await answers(twin, [request("g0000001.0")])
    assert "no answer within 0.6 s" in got["g0000001.0/0/0"].error and got["g0000001.0/0/0"].retryable
    await twin.submit("w", [request("g0000001.1")])
    await twin.close()
    (left,) = (await collected(twin, 1)).values()
    assert left.retryable and "closed" in left.error
    assert await twin.run_until_dead() == "closed" and not twin.healthy
    assert twin.stats().error == "closed"


async def test_replies_without_a_plan(folder: Path) -> None:
    """Any environment may be played: lengths are drawn then."""
    twin = TwinEngine(config(env={"name": "coin"}), folder, "g", seed=0)
    await twin.start()
    asked = [request("g0000001.0", turn, prompt=40) for turn in range(20)]
    got = await answers(twin, [replace(one, fresh=7) for one in asked])
    lengths = {len(ids(answer.output)) for answer in got.values()}
    assert len(lengths) > 5 and max(lengths) <= 48
    sampled = sum(len(ids(answer.output)) for answer in got.values())
    told = twin.stats()
    assert (told.tokens, told.grown_tokens) == (sampled, sampled + 20 * 7)
    await answers(twin, [replace(request("e.0", 0, prompt=40), fresh=7, evaluation=True)])
    assert twin.stats().tokens > sampled and twin.stats().grown_tokens == told.grown_tokens
    await twin.close()


# -- the environment ----------------------------------------------------------------------------------


def test_places_have_names() -> None:
    assert place_of("g0000017.3") == Place(17, 3)
    held_out = place_of("before-greedy-00002.0")
    assert held_out is not None and held_out.group > 10**8 and held_out.member == 0
    assert place_of("something else") is None
    assert len(text(5000, 3).split()) == 5000 and len(text(0, 3).split()) == 1


async def test_an_episode_has_exactly_the_planned_tokens(folder: Path) -> None:
    made = config()
    harness = ChatHarness(Tokenizer(folder), made.harness)
    twin = TwinEngine(made, folder, "g", seed=0)
    await twin.start()
    pool = make_pool(made, 4)
    assert isinstance(pool, InlinePool)
    await pool.start()
    task = build_tasks("load", {}, 5).task("train", 6)
    for member in range(2):
        plan = workload("twin").plan(5, 6, member)
        handle = await pool.acquire()
        history = harness.start(await handle.start(task, task.seed))
        for turn, planned in enumerate(plan.turns):
            prompt = harness.prompt(history)
            assert prompt is not None and len(ids(prompt.added)) == planned.added
            asked = Request(
                id=f"g0000006.{member}/0/{turn}", prompt=prompt.ids, session=f"g0000006.{member}",
                sampling=Sampling(max_tokens=prompt.max_tokens, stop_ids=harness.stop_ids),
            )  # fmt: skip
            (answer,) = (await answers(twin, [asked])).values()
            reply = harness.reply(history, prompt, answer.output)
            assert reply.actions[0].split()[0] == MEMBERS[member]
            begun = time.monotonic()
            result = await handle.step(list(reply.actions))
            assert time.monotonic() - begun >= planned.env_s / SPEED
            assert result.done == (turn == len(plan.turns) - 1)
            if not result.done:
                harness.observe(history, result.observation)
        assert result.rewards == {"success": coin(5, 6, member)}
        await handle.release()
    assert pool.stats().in_use == 0 and pool.stats().ended == 2
    await twin.close()


async def test_the_inline_pool_keeps_the_pools_contract() -> None:
    made = config(twin={"speed": 0.01}, env={"step_timeout_s": 0.2})
    pool = InlinePool(builder("load"), made.env, 1, speed=0.01)
    task = build_tasks("load", {}, 5).task("train", 6)
    handle = await pool.acquire()
    with pytest.raises(EnvTimeout, match="no environment became free"):
        await pool.acquire(0.05)
    await handle.start(task, 0)
    with pytest.raises(EnvTimeout, match=r"step took longer than 0\.2 s"):
        await handle.step(["m0 w1"])
    with pytest.raises(EnvFailed, match="has failed"):
        await handle.step(["m0 w1"])
    await handle.release()
    await handle.release()
    other = await pool.acquire(0.05)
    await other.start(task, 0)
    with pytest.raises(EnvFailed, match="begins with its member's word"):
        await other.step(["hello"])
    await other.release()
    assert pool.stats().failures == 2 and pool.stats().timeouts == 1 and pool.stats().in_use == 0
    await pool.close()
    with pytest.raises(EnvFailed, match="closed"):
        await pool.acquire(0.05)


def test_load_is_refused_where_nobody_waits_for_it() -> None:
    with pytest.raises(ConfigError, match=r"env\.sandbox = 'bwrap': load only tells"):
        make_pool(config(env={"sandbox": "bwrap"}), 1)
    assert isinstance(make_pool(config(env={"name": "coin", "sandbox": "process"}), 1), EnvPool)
    with pytest.raises(ConfigError, match="twin"):
        build_tasks("load", {"workload": "twinn"})
    assert GLUE == 2


# -- what it costs ------------------------------------------------------------------------------------


HEAVY = ("torch", "vllm", "transformers")
LIGHT = (
    "actors.remote", "learner.twin", "learner.twins.remote", "learner.drive.remote", "deploy.remote",
    "deploy.run",
)  # fmt: skip


@pytest.mark.parametrize("module", LIGHT)
def test_no_twin_imports_a_model_library(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- trajectories through the gate --------------------------------------------------------------------


class AtTheGate:
    """``Policy``: one caller's requests through a gate, answers by request id."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waiting: dict[str, asyncio.Future[Completion]] = {}

    async def generate(self, request: Request) -> Completion:
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        await self._gate.submit("w", [request])
        return await future

    async def carry(self) -> None:
        while True:
            for completion in await self._gate.collect("w", 1.0):
                self._waiting.pop(completion.id).set_result(completion)


async def played(folder: Path, admission: dict[str, Any], kv_tokens: int, sync: bool) -> tuple[Any, int]:
    """Five groups of four: ids and log-probs by trajectory, and how many tasks were parked at most."""
    made = config(admission=admission, twin={"speed": 60.0})
    profile = load_profile("twin")
    profile = replace(profile, generator=replace(profile.generator, kv_tokens=kv_tokens))
    gate = Gate(TwinEngine(made, folder, "g", seed=0, profile=profile), made.admission, 60.0)
    await gate.start()
    policy, pool = AtTheGate(gate), make_pool(made, 20)
    tools = Tools(ChatHarness(Tokenizer(folder), made.harness), policy, pool, max_turns=16)
    tasks = build_tasks("load", {}, 5)
    carrier = asyncio.create_task(policy.carry())
    deadline = asyncio.get_running_loop().time() + 60
    playing = []
    for group in range(5):
        members = tuple(f"g{group:07d}.{n}" for n in range(4))
        order = Order(group=f"g{group:07d}", task=tasks.task("train", group), members=members)
        playing += [
            asyncio.create_task(run_trajectory(tools, order, name, lambda segment: None, deadline))
            for name in members
        ]
    parked, version = 0, 0
    while not all(task.done() for task in playing):
        await asyncio.sleep(0.02)
        parked = max(parked, gate.stats().parked)
        if sync:
            version += 1
            await gate.load_weights(weights(version), epoch=1)
        for task in playing:
            if task.done():
                await gate.release("w", [task.result().trajectory])
    carrier.cancel()
    await gate.close()
    found = {}
    for member in (task.result() for task in playing):
        assert member.end is not None and member.end.kind is EndKind.FINISHED, member.end
        calls = [call for turn in member.turns for call in turn.calls]
        found[member.trajectory] = [(call.added, call.output, call.logprobs) for call in calls]
    return found, parked


async def test_parked_tasks_end_as_those_that_never_waited(folder: Path) -> None:
    """Memory for a few of twenty tasks, weights that change all the time: the same tokens in the end."""
    free, never = await played(folder, {"policy": "request"}, 100_000, sync=False)
    tight, parked = await played(folder, {}, 1800, sync=True)
    assert never == 0 and parked > 0
    assert tight == free and len(free) == 20
