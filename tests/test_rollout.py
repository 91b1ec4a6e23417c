"""Trajectories, rewards and the env worker, with scripted policies and the in-memory queue."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_tools
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.harness.chat import ChatHarness, History
from actors.outcomes import group_deadline_s
from actors.reward import Reward
from actors.rollout import Member, Tools, derived_seed, run_trajectory
from actors.router import Router
from actors.scripted import (
    ScriptedEnvironments,
    ScriptedGenerator,
    ScriptedPolicy,
    ScriptedSession,
    character_tokenizer,
)
from actors.slots import Slots
from actors.tokenizer import Tokenizer
from actors.worker import Worker
from cluster.config import Config, EnvConfig, GeneratorConfig, HarnessConfig, RunConfig
from cluster.errors import BadRequest, EngineFailed, EnvFailed, EnvTimeout, StreamFailed, TooManyFailures
from cluster.memory import MemoryQueue
from cluster.messages import EvalEpisode, GeneratorRow, Grant, Pull, Table
from cluster.types import (
    Completion,
    ContextOp,
    End,
    EndKind,
    Order,
    Purpose,
    Request,
    Segment,
    StopReason,
    Task,
    Trajectory,
    Turn,
    full_ids,
    ids,
)
from envs.base import StepResult
from learner.batch import compile_trajectory

END = 2  # <|im_end|>
CONFIG = Config(
    env=EnvConfig(name="scripted", max_turns=4, slots=8),
    harness=HarnessConfig(max_context=512, max_new_tokens=8),
    run=RunConfig(min_members=2),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def order(group: str = "g0", size: int = 4, attempt: int = 0, **changes: object) -> Order:
    plain = Order(
        group=group,
        task=Task(id=f"task-{group}", env="scripted", seed=7),
        members=tuple(f"{group}.{index}" for index in range(size)),
        attempt=attempt,
        seed=11,
    )
    return replace(plain, **changes)


def saying(tokenizer: Tokenizer, text: str) -> ScriptedPolicy:
    return ScriptedPolicy(lambda prompt, rng: [*tokenizer.encode(text), END])


def lasting(turns: int) -> Callable[[Task, int, list[str]], StepResult]:
    """Done, with success, at the given turn."""

    def play(task: Task, turn: int, actions: list[str]) -> StepResult:
        done = turn + 1 >= turns
        return StepResult("wall", rewards={"success": float(done), "step": 1.0}, done=done)

    return play


def tools(
    tokenizer: Tokenizer,
    policy: ScriptedPolicy,
    environments: ScriptedEnvironments,
    max_turns: int = 4,
    seeded: bool = False,
    **limits: int,
) -> Tools:
    harness = ChatHarness(tokenizer, replace(CONFIG.harness, **limits))
    return Tools(harness, policy, environments, max_turns, seeded=seeded)


async def played(
    kit: Tools, segments: list[Segment] | None = None, wait_s: float = 5.0
) -> tuple[Member, End]:
    deadline = asyncio.get_running_loop().time() + wait_s
    into = segments if segments is not None else []
    member = await run_trajectory(kit, order(), "g0.0", into.append, deadline)
    assert member.end is not None
    return member, member.end


# -- one trajectory ---------------------------------------------------------------------


async def test_every_prompt_sent_is_the_stored_prefix(tokenizer: Tokenizer) -> None:
    policy = saying(tokenizer, "left")
    segments: list[Segment] = []
    member, end = await played(tools(tokenizer, policy, ScriptedEnvironments(lasting(4))), segments)
    assert (end.kind, end.turns, [s.turn for s in segments]) == (EndKind.FINISHED, 4, member.turns)
    calls = [call for turn in member.turns for call in turn.calls]
    for call, row, request in zip(calls, full_ids(calls), policy.requests, strict=True):
        assert row.tobytes() == request.prompt + call.output
    assert all(turn.actions == ("left",) for turn in member.turns)
    assert [len(call.added) for call in calls[1:]] == [len(calls[1].added)] * 3  # linear storage


async def test_re_rendering_the_recorded_play_gives_the_recorded_ids(tokenizer: Tokenizer) -> None:
    policy = ScriptedPolicy(lambda prompt, rng: [rng.randrange(4, 90) for _ in range(rng.randrange(1, 12))])
    member, _ = await played(tools(tokenizer, policy, ScriptedEnvironments(lasting(4))))
    harness = ChatHarness(tokenizer, CONFIG.harness)
    history = harness.start("go")
    for turn in member.turns:
        prompt = harness.prompt(history)
        assert prompt is not None
        call = turn.calls[0]
        assert (prompt.keep, prompt.added) == (call.keep, call.added)
        assert harness.reply(history, prompt, call.output).actions == turn.actions
        harness.observe(history, turn.observation)


@pytest.mark.parametrize("spare", [-1, 0, 1])
@pytest.mark.parametrize("last", [False, True])
async def test_context_limit_and_done_wins(tokenizer: Tokenizer, spare: int, last: bool) -> None:
    free, _ = await played(tools(tokenizer, saying(tokenizer, "left"), ScriptedEnvironments(lasting(3))))
    rows = full_ids([call for turn in free.turns for call in turn.calls])
    need = len(rows[1]) - len(ids(free.turns[1].calls[0].output)) + 8  # second prompt, a whole reply
    env = ScriptedEnvironments(lasting(2 if last else 3))
    _, end = await played(tools(tokenizer, saying(tokenizer, "left"), env, max_context=need + spare))
    if spare < 0:
        assert (end.kind, end.reason, end.turns) == (EndKind.TRUNCATED, "context", 1)
    elif last:
        assert (end.kind, end.reason, end.turns) == (EndKind.FINISHED, "", 2)
    else:
        assert (end.kind, end.reason, end.turns) == (EndKind.TRUNCATED, "context", 2)


@pytest.mark.parametrize(("turns", "kind"), [(4, EndKind.FINISHED), (5, EndKind.TRUNCATED)])
async def test_turn_limit_and_done_wins(tokenizer: Tokenizer, turns: int, kind: EndKind) -> None:
    kit = tools(tokenizer, saying(tokenizer, "left"), ScriptedEnvironments(lasting(turns)))
    _, end = await played(kit)
    assert (end.kind, end.turns) == (kind, 4)
    assert end.reason == ("" if kind is EndKind.FINISHED else "turns")


async def test_the_turn_cap_does_not_bound_the_row(tokenizer: Tokenizer) -> None:
    policy = ScriptedPolicy(lambda prompt, rng: [40] * 20)
    kit = tools(tokenizer, policy, ScriptedEnvironments(lasting(6)), max_turns=6)
    member, end = await played(kit)
    assert (end.kind, end.turns) == (EndKind.FINISHED, 6)
    calls = [turn.calls[0] for turn in member.turns]
    assert [len(ids(call.output)) for call in calls] == [8] * 6
    assert {call.stop for call in calls} == {StopReason.LENGTH}
    assert len(full_ids(calls)[-1]) > 8 * 6


async def test_a_first_prompt_beyond_the_context_is_a_bad_request(tokenizer: Tokenizer) -> None:
    kit = tools(tokenizer, saying(tokenizer, "x"), ScriptedEnvironments(lasting(1)), max_context=10)
    _, end = await played(kit)
    assert (end.kind, end.reason, end.turns) == (EndKind.FAILED, "request", 0)
    assert "harness.max_context = 10" in end.detail


class Raising(ScriptedPolicy):
    """Fails with the given error at the second call."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda prompt, rng: [40, END])
        self.error = error

    async def generate(self, request: Request) -> Completion:
        if self.requests:
            raise self.error
        return await super().generate(request)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineFailed("dead"), "engine"),
        (BadRequest("id beyond"), "request"),
        (ZeroDivisionError("bug"), "internal"),
    ],
)
async def test_policy_errors_by_boundary(tokenizer: Tokenizer, error: Exception, reason: str) -> None:
    env = ScriptedEnvironments(lasting(3))
    member, end = await played(tools(tokenizer, Raising(error), env))
    assert (end.kind, end.reason, len(member.turns), env.live) == (EndKind.FAILED, reason, 1, 0)
    assert str(error) in end.detail and end.outcome is None


@pytest.mark.parametrize("error", [EnvFailed("died"), EnvTimeout("late")])
@pytest.mark.parametrize("at_start", [False, True])
async def test_env_errors_are_data(tokenizer: Tokenizer, error: EnvFailed, at_start: bool) -> None:
    def fail(*_: object) -> StepResult:
        raise error

    def fail_start(task: Task, seed: int) -> str:
        raise error

    env = ScriptedEnvironments(fail, start=fail_start if at_start else None)
    _, end = await played(tools(tokenizer, saying(tokenizer, "x"), env))
    assert (end.kind, end.reason, end.turns, env.live) == (EndKind.FAILED, "env", 0, 0)


async def test_deadline_abandons_and_releases(tokenizer: Tokenizer) -> None:
    env = ScriptedEnvironments(lasting(1), delay_s=30.0)
    _, end = await played(tools(tokenizer, saying(tokenizer, "x"), env), wait_s=0.05)
    assert (end.kind, end.reason, env.live) == (EndKind.ABANDONED, "deadline", 0)


async def test_cancellation_escapes_and_releases(tokenizer: Tokenizer) -> None:
    env = ScriptedEnvironments(lasting(1), delay_s=30.0)
    task = asyncio.create_task(played(tools(tokenizer, saying(tokenizer, "x"), env)))
    await asyncio.sleep(0.05)
    assert env.live == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.live == 0


async def test_seeds_are_distinct_and_derived(tokenizer: Tokenizer) -> None:
    policy = saying(tokenizer, "x")
    await played(tools(tokenizer, policy, ScriptedEnvironments(lasting(3)), seeded=True))
    seeds = [request.sampling.seed for request in policy.requests]
    assert seeds == [derived_seed(11, "g0.0", 0, turn) for turn in range(3)]
    assert len(set(seeds)) == 3
    keys = [(s, f"g{t}.0", a, k) for s in range(3) for t in range(5) for a in range(2) for k in range(5)]
    assert len({derived_seed(*key) for key in keys}) == len(keys)


async def test_a_turn_that_is_long_in_coming_pauses_the_environment(tokenizer: Tokenizer) -> None:
    policy = saying(tokenizer, "left")
    policy.delay_s = 0.08
    environments = ScriptedEnvironments(lasting(3))  # its sessions refuse a step while paused
    kit = replace_tools(tools(tokenizer, policy, environments), pause_after_s=0.02)
    _, end = await played(kit)
    assert (end.kind, environments.pauses) == (EndKind.FINISHED, 3)
    quick = replace_tools(tools(tokenizer, policy, environments), pause_after_s=0.5)
    _, end = await played(quick)
    assert (end.kind, environments.pauses) == (EndKind.FINISHED, 3)


class Sticking(ScriptedSession):
    """Cannot be paused, and says so too late."""

    async def pause(self) -> None:
        raise EnvFailed("the clock is stuck")


async def test_an_environment_that_fails_to_pause_ends_its_trajectory(tokenizer: Tokenizer) -> None:
    policy = saying(tokenizer, "left")
    policy.delay_s = 5.0
    environments = ScriptedEnvironments(lasting(3))

    async def acquire() -> ScriptedSession:
        environments.live += 1
        return Sticking(environments)

    environments.acquire = acquire  # type: ignore[method-assign]
    _, end = await played(replace_tools(tools(tokenizer, policy, environments), pause_after_s=0.02))
    assert (end.kind, end.reason) == (EndKind.FAILED, "env")
    assert "the clock is stuck" in end.detail and environments.live == 0


async def test_requests_say_whose_turn_it_is(tokenizer: Tokenizer) -> None:
    def play(task: Task, turn: int, actions: list[str]) -> StepResult:
        return StepResult("wall", done=turn == 2, info={"tool": "search"} if turn == 0 else {})

    policy = saying(tokenizer, "left")
    kit = tools(tokenizer, policy, ScriptedEnvironments(play))
    deadline = asyncio.get_running_loop().time() + 5
    done = iter([0.0, 0.25, 0.5])
    asked = order(purpose=Purpose.EVAL)
    await run_trajectory(kit, asked, "g0.1", lambda _: None, deadline, lambda: next(done))
    assert [(r.group, r.session, r.evaluation, r.kind) for r in policy.requests] == [
        ("g0", "g0.1", True, "scripted")
    ] * 3
    assert [r.group_done for r in policy.requests] == [0.0, 0.25, 0.5]
    assert [r.tool for r in policy.requests] == ["", "search", "scripted"]


@pytest.mark.parametrize("evicting", [False, True])
async def test_requests_tell_what_training_rows_gain(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, evicting: bool
) -> None:
    """With what is sampled it adds up to the tokens that learners will get, also where a context is cut."""
    observe = ChatHarness.observe

    def forget(self: ChatHarness, history: History, observation: str) -> None:
        observe(self, history, observation)
        if len(history.messages) > 5:
            history.keep, history.op = history.keep - 7, ContextOp.EVICT

    if evicting:
        monkeypatch.setattr(ChatHarness, "observe", forget)
    policy = saying(tokenizer, "left")
    member, end = await played(tools(tokenizer, policy, ScriptedEnvironments(lasting(4))))
    trajectory = Trajectory(id="t", group="g0", attempt=0, turns=tuple(member.turns), end=end)
    rows = compile_trajectory(trajectory, "g0")
    assert len(rows) == (2 if evicting else 1)
    sampled = sum(len(ids(turn.calls[0].output)) for turn in member.turns)
    assert sum(request.fresh for request in policy.requests) + sampled == sum(len(row.ids) for row in rows)


# -- rewards ----------------------------------------------------------------------------


def member_with(kind: EndKind, *rewards: dict[str, float]) -> Member:
    turns = [Turn(turn=index, calls=(), rewards=given) for index, given in enumerate(rewards)]
    return Member("t", turns, End(trajectory="t", group="g", attempt=0, kind=kind, turns=len(turns)))


def test_outcome_is_the_weighted_sum_of_episode_values() -> None:
    reward = Reward({"success": 1.0, "step": -0.1})
    short, long, failed = reward(
        [
            member_with(EndKind.FINISHED, {"success": 1.0, "step": 1.0}),
            member_with(EndKind.TRUNCATED, *[{"step": 1.0}] * 20),
            member_with(EndKind.FAILED, {"success": 1.0}),
        ]
    )
    assert short.outcome == pytest.approx(0.9) and short.rewards == {"success": 1.0, "step": 1.0}
    assert long.outcome == pytest.approx(-2.0) and long.rewards == {"step": 20.0}
    assert failed.outcome is None and failed.rewards == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_a_failure(value: float) -> None:
    (end,) = Reward()([member_with(EndKind.FINISHED, {"success": value})])
    assert (end.kind, end.reason, end.outcome) == (EndKind.FAILED, "env", None)


# -- slots ------------------------------------------------------------------------------


async def test_slots_resize_and_survive_cancelled_waiters() -> None:
    slots = Slots(1)
    await slots.acquire()
    waiters = [asyncio.create_task(slots.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    slots.resize(2)
    await asyncio.sleep(0.01)
    assert [waiter.done() for waiter in waiters] == [True, True, False]
    slots.release()
    waiters[2].cancel()  # granted in this very tick: the place must not be lost
    await asyncio.gather(*waiters, return_exceptions=True)
    assert slots.used == 1
    await asyncio.wait_for(slots.acquire(), 1)


async def until(condition: Callable[[], bool], wait_s: float = 10.0) -> None:
    """Look again every few milliseconds; TimeoutError after ``wait_s``."""
    async with asyncio.timeout(wait_s):
        while not condition():
            await asyncio.sleep(0.003)


# -- worker -----------------------------------------------------------------------------


class Desk:
    """A controller that hands out prepared grants, then nothing."""

    def __init__(self, *grants: Grant) -> None:
        self.grants = list(grants)
        self.pulls: list[Pull] = []
        self.episodes: list[EvalEpisode] = []
        self.groups_closed: list[str] = []

    async def pull(self, pull: Pull) -> Grant:
        self.pulls.append(pull)
        return self.grants.pop(0) if self.grants else Grant()

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        self.episodes += episodes

    async def closed(self, groups: list[str]) -> None:
        self.groups_closed += groups


def make_worker(
    tokenizer: Tokenizer,
    queue: MemoryQueue,
    desk: Desk,
    environments: ScriptedEnvironments,
    policy: ScriptedPolicy | Router | None = None,
    folder: Path | None = None,
    config: Config = CONFIG,
) -> Worker:
    policy = policy or saying(tokenizer, "left")
    return Worker("w0", config, queue, policy, environments, tokenizer, desk, folder=folder)


async def run_until_idle(worker: Worker, desk: Desk) -> None:
    """Run until every grant was taken and every group has ended, then stop."""
    task = asyncio.create_task(worker.run())
    await until(lambda: task.done() or not (desk.grants or worker._running or len(desk.pulls) < 2))
    worker.stop()
    async with asyncio.timeout(10):
        await task


async def admit(queue: MemoryQueue, orders: Sequence[Order]) -> Grant:
    for one in orders:
        assert await queue.admit(one)
    return Grant(orders=tuple(orders))


def mixed(task: Task, turn: int, actions: list[str]) -> StepResult:
    """Ends by the task's number: finished, or one of the failures, or never done."""
    kind = int(task.id.removeprefix("task-g")) % 4
    if kind == 1 and turn == 1:
        raise EnvTimeout("late")
    if kind == 2:
        raise EnvFailed("died")
    return StepResult("wall", {"success": 1.0}, done=kind == 0 and turn == 1)


async def test_requests_carry_how_far_their_group_is(tokenizer: Tokenizer) -> None:
    def play(task: Task, turn: int, actions: list[str]) -> StepResult:
        return StepResult("wall", done=actions == ["stop"] or turn == 3)

    queue = MemoryQueue()
    desk = Desk(await admit(queue, [order("g0", 8)]))
    policy = ScriptedPolicy(lambda prompt, rng: [*tokenizer.encode(rng.choice(["stop", "left"])), END])
    await run_until_idle(make_worker(tokenizer, queue, desk, ScriptedEnvironments(play), policy), desk)
    shares = [request.group_done for request in policy.requests]
    assert shares[:8] == [0.0] * 8 and shares == sorted(shares)
    assert shares[-1] > 0 and {share * 8 for share in shares} <= set(map(float, range(8)))


async def test_ledger_balances_and_matches_the_workers_log(tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue, env = MemoryQueue(), ScriptedEnvironments(mixed, delay_s=0.001)
    orders = [order(f"g{index}") for index in range(8)]
    desk = Desk(await admit(queue, orders))
    worker = make_worker(tokenizer, queue, desk, env, folder=tmp_path)
    await run_until_idle(worker, desk)
    ledger = await queue.ledger()
    assert ledger.balanced and ledger == await queue.audit()
    lines = [json.loads(line) for line in (tmp_path / "ends-w0.jsonl").read_text().splitlines()]
    kinds = Counter((line["kind"], line["reason"]) for line in lines)
    assert kinds == {("finished", ""): 8, ("truncated", "turns"): 8, ("failed", "env"): 16}
    assert (ledger.admitted, ledger.pending, ledger.failed) == (32, 16, {"env": 16})
    ready = await queue.claim("c", 10, 0.0)
    assert sorted(ready) == ["g0", "g3", "g4", "g7"]
    assert sorted(desk.groups_closed) == ["g1", "g2", "g5", "g6"]
    for group in await queue.load(ready):
        assert [len(member.turns) for member in group.members] == [m.end.turns for m in group.members]
        assert all(member.end.outcome is not None for member in group.members)
    assert env.live == 0 and worker.metrics()["env_failures.env"] == 16
    assert worker.metrics()["turns"] == sum(line["turns"] for line in lines)


async def test_one_failed_member_leaves_its_group_alive(tokenizer: Tokenizer) -> None:
    steps = 0

    def play(task: Task, turn: int, actions: list[str]) -> StepResult:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise EnvFailed("died")
        return StepResult("", {"success": 1.0}, done=True)

    queue = MemoryQueue()
    desk = Desk(await admit(queue, [order()]))
    await run_until_idle(make_worker(tokenizer, queue, desk, ScriptedEnvironments(play)), desk)
    (group,) = await queue.load(await queue.claim("c", 1, 0.0))
    assert (group.size, len(group.members)) == (4, 3)


async def test_group_after_group_failing_ends_the_worker_with_the_cause(tokenizer: Tokenizer) -> None:
    """A ready group starts the count anew; generators' failures don't count, others heal those."""
    good = {"g2"}

    def play(task: Task, turn: int, actions: list[str]) -> StepResult:
        if task.id.removeprefix("task-") in good:
            return StepResult("", {"success": 1.0}, done=True)
        raise EnvFailed("the licence server is gone")

    queue = MemoryQueue()
    orders = [order(f"g{index}") for index in range(6)]
    config = replace(CONFIG, run=replace(CONFIG.run, max_failed_groups=3))
    desk = Desk(*[await admit(queue, [one]) for one in orders])
    worker = make_worker(tokenizer, queue, desk, ScriptedEnvironments(play), config=config)
    worker.set_slots(4)  # one group after the other
    with pytest.raises(TooManyFailures, match=r"3 groups in a row failed .*: env: .*licence server is gone"):
        async with asyncio.timeout(10):
            await worker.run()
    assert desk.groups_closed == ["g0", "g1", "g3", "g4"]

    def broken(prompt: object, rng: object) -> list[int]:
        raise EngineFailed("no generator")

    queue = MemoryQueue()
    desk = Desk(*[await admit(queue, [one]) for one in orders])
    policy = ScriptedPolicy(broken)
    worker = make_worker(tokenizer, queue, desk, ScriptedEnvironments(play), policy, config=config)
    await run_until_idle(worker, desk)
    assert len(desk.groups_closed) == len(orders)


async def test_evaluation_stays_out_of_the_ledger(tokenizer: Tokenizer) -> None:
    queue = MemoryQueue()
    orders = [
        order(f"g{index}", size=1, purpose=Purpose.EVAL, suite="s", temperature=0.0) for index in (0, 2)
    ]
    desk = Desk(Grant(orders=tuple(orders)))
    policy = saying(tokenizer, "left")
    await run_until_idle(make_worker(tokenizer, queue, desk, ScriptedEnvironments(mixed), policy), desk)
    assert (await queue.ledger()).admitted == 0 and await queue.depth() == (0, 0.0)
    by_group = {episode.group: episode for episode in desk.episodes}
    assert by_group["g0"].success == 2.0 and by_group["g0"].turns == 2 and not by_group["g0"].error
    assert by_group["g0"].tokens == 10
    assert by_group["g2"].error.startswith("failed(env)") and by_group["g2"].success == 0.0
    assert {request.sampling.temperature for request in policy.requests} == {0.0}


async def test_a_finished_evaluation_is_played_again_when_a_new_controller_asks(tokenizer: Tokenizer) -> None:
    """The report died with the controller that had ordered it; the same order while it runs is ignored."""
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(2), delay_s=0.1)
    one = order("e0", size=1, purpose=Purpose.EVAL, suite="s", temperature=0.0)
    desk = Desk(Grant(orders=(one,)), Grant(orders=(one,)))
    worker = make_worker(tokenizer, queue, desk, env)
    running = asyncio.create_task(worker.run())
    await until(lambda: len(desk.episodes) == 1 and not worker._running)
    assert worker.counters["orders_ignored"] == 1
    desk.grants.append(Grant(orders=(one,)))
    await until(lambda: len(desk.episodes) == 2)
    worker.stop()
    async with asyncio.timeout(5):
        await running


async def test_repeated_orders_are_ignored_and_newer_attempts_replace(tokenizer: Tokenizer) -> None:
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(2), delay_s=0.1)
    first = order()
    second = order(attempt=1)
    desk = Desk(await admit(queue, [first]), Grant(orders=(first,)))
    worker = make_worker(tokenizer, queue, desk, env)
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.counters["orders_ignored"] == 1 and worker.counters["turns"] >= 4)
    assert await queue.reorder(second)
    desk.grants += [Grant(orders=(second,)), Grant(orders=(first,))]
    claimed = await queue.claim("c", 1, 5.0)
    worker.stop()
    async with asyncio.timeout(5):
        await running
    (group,) = await queue.load(claimed)
    assert {member.attempt for member in group.members} == {1}
    assert (env.acquired, env.live) == (8, 0)
    assert worker.counters["groups_cancelled"] == 1
    assert (await queue.ledger()).balanced


async def test_cancelled_groups_stop(tokenizer: Tokenizer) -> None:
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(1), delay_s=30.0)
    desk = Desk(await admit(queue, [order()]), Grant(), Grant(cancel=("g0", "unknown")))
    await run_until_idle(make_worker(tokenizer, queue, desk, env), desk)
    assert (env.acquired, env.live) == (4, 0)


async def test_slots_bound_what_runs_at_once(tokenizer: Tokenizer) -> None:
    most = 0
    env = ScriptedEnvironments(lasting(1), delay_s=0.005)
    acquire = env.acquire

    async def watched() -> ScriptedSession:
        nonlocal most
        session = await acquire()
        most = max(most, env.live)
        return session

    env.acquire = watched  # type: ignore[method-assign]
    queue = MemoryQueue()
    desk = Desk(replace(await admit(queue, [order(f"g{i}") for i in range(6)]), slots=3))
    worker = make_worker(tokenizer, queue, desk, env)
    await run_until_idle(worker, desk)
    assert most == 3 and worker.metrics()["groups_ready"] == 6


async def test_group_deadline_abandons_what_is_left(tokenizer: Tokenizer) -> None:
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(1), delay_s=30.0)
    config = replace(CONFIG, run=replace(CONFIG.run, deadline_s=0.4), env=replace(CONFIG.env, slots=2))
    assert group_deadline_s(config) == 0.2
    desk = Desk(await admit(queue, [order()]))
    await run_until_idle(make_worker(tokenizer, queue, desk, env, config=config), desk)
    ledger = await queue.ledger()
    assert (ledger.abandoned, ledger.pending, env.live) == ({"deadline": 4}, 0, 0)


class Broken(MemoryQueue):
    """A queue that is gone for good."""

    async def append(self, segments: Sequence[Segment]) -> int:
        raise StreamFailed("server lost")


async def test_a_lost_queue_ends_the_worker_with_its_error(tokenizer: Tokenizer) -> None:
    queue, env = Broken(), ScriptedEnvironments(lasting(3), delay_s=0.02)
    desk = Desk(await admit(queue, [order()]))
    worker = make_worker(tokenizer, queue, desk, env)
    with pytest.raises(StreamFailed, match="server lost"):
        async with asyncio.timeout(5):
            await worker.run()
    assert env.live == 0


async def test_a_grant_of_a_replaced_controller_is_refused(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(saying(tokenizer, "left"))
    router = Router("w0", GeneratorConfig(request_timeout_s=2.0), lambda name: generator)
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(2))
    rows = (GeneratorRow("a", True, 0),)
    current = replace(await admit(queue, [order("g0")]), table=Table(epoch=5, generators=rows))
    stale = replace(await admit(queue, [order("g1")]), table=Table(epoch=4, generators=rows))
    desk = Desk(current, stale)
    worker = make_worker(tokenizer, queue, desk, env, router)
    await run_until_idle(worker, desk)
    await router.aclose()
    assert await queue.claim("c", 9, 0.0) == ["g0"]
    metrics = worker.metrics()
    assert (metrics["stale_grants"], metrics["calls"]) == (1, 8)
    assert metrics["kv_calls.first_turn"] == metrics["kv_calls.same_rank"] == 4
    assert metrics["submits"] < metrics["calls"]


async def test_stop_lets_groups_end_within_the_grace(tokenizer: Tokenizer) -> None:
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(2), delay_s=0.05)
    desk = Desk(await admit(queue, [order()]))
    worker = make_worker(tokenizer, queue, desk, env)
    task = asyncio.create_task(worker.run())
    await until(lambda: env.live == 4)
    worker.stop(grace_s=5.0)
    async with asyncio.timeout(5):
        await task
    assert await queue.claim("c", 1, 0.0) == ["g0"]


async def test_pulls_report_what_runs(tokenizer: Tokenizer) -> None:
    queue, env = MemoryQueue(), ScriptedEnvironments(lasting(1), delay_s=0.1)
    desk = Desk(await admit(queue, [order(attempt=2)]))
    worker = make_worker(tokenizer, queue, desk, env)
    await run_until_idle(worker, desk)
    assert (desk.pulls[0].free, desk.pulls[0].running) == (8, {})
    busy = [pull for pull in desk.pulls if pull.running]
    assert busy and busy[0].running == {"g0": 2} and busy[0].free == 4  # from the first pull on
    assert {pull.incarnation for pull in desk.pulls} == {worker.incarnation}
