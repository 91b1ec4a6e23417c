"""The readiness queue: the same suite for the Redis and the in-memory implementation."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import StreamFailed
from cluster.link import without_password
from cluster.memory import MemoryQueue
from cluster.ports import Queue
from cluster.stream import RedisQueue
from cluster.types import (
    Call,
    End,
    EndKind,
    Order,
    Purpose,
    Segment,
    StepRecord,
    StopReason,
    Task,
    Turn,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from cluster.valkey import ValkeyServer

RUNS = itertools.count()
TASK = Task(id="t", env="coin", seed=1)
EndSpec = tuple[EndKind, str]
FINISHED: EndSpec = (EndKind.FINISHED, "")
FAILED: EndSpec = (EndKind.FAILED, "env")


def order(group: str, size: int = 2, attempt: int = 0, **more: Any) -> Order:
    members = tuple(f"{group}.{i}" for i in range(size))
    return Order(group=group, task=TASK, members=members, attempt=attempt, **more)


def segment(group: str, member: int, turn: int = 0, attempt: int = 0, text: str = "") -> Segment:
    call = Call(
        call=0,
        keep=0,
        added=pack_ids([1, 2]),
        output=pack_ids([3, turn]),
        logprobs=pack_floats([-0.5, -0.25]),
        versions=(VersionSpan(attempt, 0, 2),),
        stop=StopReason.STOP,
        temperature=1.0,
    )
    return Segment(
        trajectory=f"{group}.{member}",
        group=group,
        attempt=attempt,
        turn=Turn(turn=turn, calls=(call,), observation=text),
    )


def end(group: str, member: int, attempt: int = 0, spec: EndSpec = FINISHED, turns: int = 0) -> End:
    kind, reason = spec
    name = f"{group}.{member}"
    return End(trajectory=name, group=group, attempt=attempt, kind=kind, turns=turns, reason=reason)


def step_of(step: int, *groups: str, size: int = 2) -> StepRecord:
    names = tuple(f"{g}.{i}" for g in groups for i in range(size))
    return StepRecord(step=step, groups=groups, trajectories=names, lags=(0,) * len(groups))


async def finish(queue: Queue, *groups: str, size: int = 2) -> None:
    """Roll groups out: admitted, two turns each, ended, ready."""
    for group in groups:
        await queue.admit(order(group, size))
        await queue.append([segment(group, m, t) for m in range(size) for t in range(2)])
        await queue.end([end(group, m, turns=2) for m in range(size)])
        assert await queue.ready(group, 0, 1)


async def check(queue: Queue) -> None:
    ledger = await queue.ledger()
    assert ledger.balanced
    assert ledger == await queue.audit()


def fresh(url: str, **more: Any) -> RedisQueue:
    return RedisQueue(url, "test", f"run{next(RUNS)}", **more)


@pytest.fixture(params=["memory", "redis"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[Queue]:
    made: Queue = MemoryQueue(notices=True)
    if request.param == "redis":
        made = fresh(request.getfixturevalue("valkey_url"), notices=True)
    yield made
    await made.aclose()


async def test_group_goes_from_admission_to_training(queue: Queue) -> None:
    await finish(queue, "a", "b")
    assert (await queue.depth())[0] == 2
    assert await queue.claim("feeder", 5, 1.0) == ["a", "b"]
    assert await queue.depth() == (0, 0.0)
    second, first = await queue.load(["b", "a"])
    assert (first.id, second.id, first.size, first.task) == ("a", "b", 2, TASK)
    assert [t.turn for t in first.members[1].turns] == [0, 1]
    assert first.members[1].turns[1] == segment("a", 1, 1).turn
    await queue.plan(step_of(1, "a", "b"))
    assert not (await queue.steps(0))[0].committed
    assert await queue.commit(step_of(1, "a", "b"))
    assert not await queue.commit(step_of(1, "a", "b"))
    assert (await queue.steps(0))[0].committed
    assert await queue.get("version") == b"1"
    assert await queue.claim("feeder", 5, 0.0) == []
    assert await queue.reclaim("feeder") == []
    assert (await queue.ledger()).trained == 4
    await check(queue)


async def test_repeats_change_nothing(queue: Queue) -> None:
    assert await queue.admit(order("a"))
    assert not await queue.admit(order("a"))
    assert await queue.append([segment("a", 0), segment("a", 0), segment("a", 1)]) == 2
    assert await queue.append([segment("a", 0, text="other")]) == 0
    assert await queue.end([end("a", 0, turns=1), end("a", 0, spec=FAILED), end("a", 1, turns=1)]) == 2
    assert await queue.ready("a", 0, 1) and await queue.ready("a", 0, 1)
    assert await queue.claim("f", 9, 0.0) == ["a"]
    assert await queue.ready("a", 0, 1)
    assert await queue.claim("f", 9, 0.0) == []
    (group,) = await queue.load(["a"])
    assert group.members[0].turns[0].observation == ""
    assert (await queue.ledger()).admitted == 2
    await check(queue)


async def test_reorder_discards_the_earlier_attempt(queue: Queue) -> None:
    await queue.admit(order("a", 3))
    await queue.append([segment("a", 0), segment("a", 1)])
    await queue.end([end("a", 0, turns=1), end("a", 2, spec=FAILED)])
    assert await queue.reorder(order("a", 3, attempt=1))
    assert not await queue.reorder(order("a", 3, attempt=1))
    assert (await queue.orders())[0].attempt == 1
    assert await queue.append([segment("a", 0, 1)]) == 0
    assert await queue.end([end("a", 1)]) == 0
    assert not await queue.ready("a", 0, 1)
    with pytest.raises(ValueError, match=r"a\.0 of group a has not ended"):
        await queue.ready("a", 1, 1)
    new = [segment("a", m, attempt=1) for m in range(3)]
    assert await queue.append(new) == 2  # the third has failed for good
    await queue.end([end("a", m, attempt=1, turns=1) for m in range(3)])
    assert await queue.ready("a", 1, 2)
    assert not await queue.reorder(order("a", 3, attempt=2))
    (group,) = await queue.load(["a"])
    assert [m.id for m in group.members] == ["a.0", "a.1"] and group.size == 3
    assert {m.versions for m in group.members} == {(1, 1)}
    assert (await queue.ledger()).failed == {"env": 1}
    await check(queue)


async def test_too_few_valid_members_drops_the_group(queue: Queue) -> None:
    await queue.admit(order("a", 3))
    await queue.end([end("a", 0), end("a", 1, spec=FAILED), end("a", 2, spec=(EndKind.ABANDONED, "slow"))])
    assert not await queue.ready("a", 0, 2)
    ledger = await queue.ledger()
    assert (ledger.dropped, ledger.failed, ledger.abandoned) == (
        {"too_few_members": 1},
        {"env": 1},
        {"slow": 1},
    )
    assert await queue.orders() == [] and await queue.claim("f", 1, 0.0) == []
    with pytest.raises(KeyError):
        await queue.load(["a"])
    assert not await queue.admit(order("a", 3))  # deleted, yet known
    assert await queue.append([segment("a", 0)]) == 0
    await check(queue)


async def test_close_and_abandon(queue: Queue) -> None:
    await finish(queue, "a", "b")
    await queue.admit(order("c"))
    await queue.admit(order("d"))
    assert await queue.claim("f", 1, 0.0) == ["a"]
    assert await queue.abandon("a", "late") == 0  # not open any more
    assert await queue.close(["a", "b", "c"], "lag") == 6
    assert await queue.close(["a", "b", "c"], "lag") == 0
    assert await queue.abandon("d", "worker_lost") == 2
    assert await queue.claim("f", 9, 0.0) == [] and await queue.reclaim("f") == []
    assert await queue.groups() == {"open": 0, "ready": 0, "claimed": 0, "trained": 0, "lost": 4}
    ledger = await queue.ledger()
    assert (ledger.dropped, ledger.abandoned, ledger.pending) == ({"lag": 6}, {"worker_lost": 2}, 0)
    await check(queue)


async def test_commit_works_when_end_and_ready_were_lost(queue: Queue) -> None:
    await queue.admit(order("a", 3))
    await queue.append([segment("a", 0)])
    assert await queue.commit(step_of(1, "a", size=2))  # the third was not trained on
    ledger = await queue.ledger()
    assert (ledger.trained, ledger.dropped) == (2, {"excluded": 1})
    assert await queue.append([segment("a", 0, 1)]) == 0
    assert await queue.end([end("a", m) for m in range(3)]) == 0
    assert not await queue.ready("a", 0, 1)
    assert await queue.claim("f", 1, 0.0) == []
    assert await queue.orders() == []
    await check(queue)


async def test_commit_refuses_what_was_trained_before(queue: Queue) -> None:
    await finish(queue, "a", "b")
    await queue.commit(step_of(1, "a"))
    with pytest.raises(ValueError, match=r"a\.0 of step 2 was trained"):
        await queue.commit(step_of(2, "b", "a"))
    await queue.release(1)
    with pytest.raises(ValueError, match=r"a\.0 of step 2 was trained"):
        await queue.commit(step_of(2, "a"))
    with pytest.raises(ValueError, match=r"x\.0 of step 2 is in none"):
        await queue.commit(StepRecord(step=2, groups=("b",), trajectories=("x.0",), lags=(0,)))
    with pytest.raises(ValueError, match="twice"):
        await queue.commit(StepRecord(step=2, groups=("b", "b"), trajectories=(), lags=(0, 0)))
    assert (await queue.ledger()).trained == 2 and len(await queue.steps(0)) == 1
    await check(queue)


async def test_release_deletes_payload_and_keeps_counts(queue: Queue) -> None:
    await finish(queue, "a", "b", "c", "d")
    await queue.admit(order("e"))
    await queue.claim("f", 3, 0.0)
    assert await queue.groups() == {"open": 1, "ready": 1, "claimed": 3, "trained": 0, "lost": 0}
    for step, group in enumerate("abc", start=1):
        await queue.commit(step_of(step, group))
    assert [g.id for g in await queue.load(["a", "c"])] == ["a", "c"]  # until a checkpoint covers them
    assert await queue.release(2) == 2
    assert await queue.release(2) == 0
    with pytest.raises(KeyError, match="a"):
        await queue.load(["c", "a"])
    assert (await queue.load(["c"]))[0].members[0].turns
    assert [r.step for r in await queue.steps(0)] == [1, 2, 3]
    assert await queue.groups() == {"open": 1, "ready": 1, "claimed": 0, "trained": 3, "lost": 0}
    assert (await queue.ledger()).trained == 6
    await check(queue)


async def test_rewind_lets_steps_be_executed_again(queue: Queue) -> None:
    await finish(queue, "a", "b", "c")
    await queue.claim("f", 3, 0.0)
    for step, group in enumerate("ab", start=1):
        await queue.plan(step_of(step, group))
        await queue.commit(step_of(step, group))
    await queue.plan(step_of(3, "c"))
    before = await queue.ledger()
    await queue.rewind(0)
    assert await queue.get("version") == b"0"
    log = await queue.steps(0)
    assert [(r.step, r.committed) for r in log] == [(1, True), (2, True), (3, False)]
    for record in log[:2]:
        assert len(await queue.load(record.groups)) == 1
        await queue.plan(record)
        assert not await queue.commit(record)
        assert await queue.get("version") == str(record.step).encode()
    with pytest.raises(ValueError, match="step 2 is committed with other groups"):
        await queue.plan(step_of(2, "c"))
    assert await queue.ledger() == before
    assert await queue.commit(step_of(3, "c"))
    await check(queue)


async def test_claim_waits_and_wakes(queue: Queue) -> None:
    start = time.monotonic()
    assert await queue.claim("f", 1, 0.3) == []
    assert 0.25 < time.monotonic() - start < 10.0
    waiting = asyncio.create_task(queue.claim("f", 1, 60.0))
    await asyncio.sleep(0.1)
    await finish(queue, "a")
    assert await asyncio.wait_for(waiting, 20.0) == ["a"]
    await finish(queue, "b")
    await asyncio.sleep(0.05)
    count, age = await queue.depth()
    assert count == 1 and 0.04 < age < 20.0


async def test_cancelled_claim_loses_nothing(queue: Queue) -> None:
    waiting = asyncio.create_task(queue.claim("f", 1, 10.0))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await finish(queue, "a")
    await asyncio.sleep(0.1)
    assert await queue.claim("f", 1, 1.0) == ["a"]


async def test_two_consumers_share_without_overlap(queue: Queue) -> None:
    names = [f"g{i}" for i in range(20)]
    await finish(queue, *names)
    got = await asyncio.gather(*(queue.claim(f"f{i % 2}", 3, 0.1) for i in range(8)))
    assert sorted(itertools.chain(*got)) == sorted(names)


async def test_unknown_and_contradictory_orders_are_refused(queue: Queue) -> None:
    await queue.admit(order("a"))
    with pytest.raises(KeyError, match="group x attempt 0"):
        await queue.append([segment("x", 0), segment("a", 0)])
    assert await queue.append([segment("a", 0)]) == 0  # the good one was stored
    with pytest.raises(KeyError, match="group a attempt 4"):
        await queue.end([end("a", 0, attempt=4)])
    with pytest.raises(KeyError):
        await queue.ready("x", 0, 1)
    with pytest.raises(KeyError):
        await queue.close(["a", "x"], "lag")
    with pytest.raises(ValueError, match="belongs to another group"):
        await queue.admit(Order(group="b", task=TASK, members=("a.0",)))
    with pytest.raises(ValueError, match="other members"):
        await queue.reorder(order("a", 3, attempt=1))
    with pytest.raises(ValueError, match="purpose 'eval'"):
        await queue.admit(order("e", purpose=Purpose.EVAL))
    with pytest.raises(ValueError, match="version"):
        await queue.put("version", b"9")
    ledger = await queue.ledger()
    assert ledger.admitted == ledger.pending == 2
    await check(queue)


async def test_text_that_utf8_cannot_carry_is_stored_sanitised(queue: Queue) -> None:
    odd = "half \ud83d, NUL \x00, right-to-left \u202e, whole \U0001f600"
    await queue.admit(order("a"))
    assert await queue.append([segment("a", 0, text=odd), segment("a", 1)]) == 2
    await queue.end([end("a", 0, turns=1), end("a", 1, spec=(EndKind.FAILED, "env\udc00"))])
    await queue.ready("a", 0, 1)
    (group,) = await queue.load(["a"])
    assert group.members[0].turns[0].observation == odd.replace("\ud83d", "\ufffd")
    assert group.members[0].turns[0].calls == segment("a", 0).turn.calls
    assert (await queue.ledger()).failed == {"env\ufffd": 1}


async def heard(queue: Queue, after: str = "", count: int = 1000) -> tuple[str, list[str]]:
    """What is told at once, as ``a.0 turn 0`` or ``a.0 end``, with the attempt if it is not the first."""
    place, found = await queue.news(after, count, 0.0)
    told = []
    for record in found:
        what = f"turn {record.turn.turn}" if isinstance(record, Segment) else "end"
        told.append(f"{record.trajectory} {what}" + f" again {record.attempt}" * (record.attempt > 0))
    return place, told


async def test_news_are_told_in_order(queue: Queue) -> None:
    assert await queue.news("", 5, 0.0) == ("", [])
    await queue.admit(order("a"))
    sent = [segment("a", 0), segment("a", 1), segment("a", 0, 1, text="whole")]
    await queue.append(sent[:2])
    await queue.append([segment("a", 0), segment("a", 1, text="other"), sent[2]])  # repeats tell nothing
    place, found = await queue.news("", 2, 0.0)
    assert found == sent[:2]
    last, found = await queue.news(place, 5, 0.0)
    assert found == sent[2:]
    assert await queue.news(last, 5, 0.0) == (last, [])
    assert (await queue.news("", 5, 0.0))[1] == sent  # a reader that starts again hears them again
    ends = [end("a", m, turns=2 - m) for m in range(2)]
    await queue.end(ends)
    assert await queue.ready("a", 0, 1)
    assert (await queue.news(last, 5, 0.0))[1] == ends
    await check(queue)


async def test_a_reader_of_news_waits_and_wakes(queue: Queue) -> None:
    await queue.admit(order("a"))
    begun = time.monotonic()
    assert await queue.news("", 5, 0.2) == ("", [])
    assert 0.15 < time.monotonic() - begun < 10.0
    waiting = asyncio.create_task(queue.news("", 5, 60.0))
    await asyncio.sleep(0.1)
    await queue.append([segment("a", 1)])
    assert (await asyncio.wait_for(waiting, 20.0))[1] == [segment("a", 1)]


async def test_a_reader_that_is_cancelled_ends(queue: Queue) -> None:
    """A loop over reads; the Redis client swallows a cancellation now and then."""

    async def listen() -> None:
        place = ""
        while True:
            place, _ = await queue.news(place, 16, 0.02)

    for delay in range(25):
        tasks = [asyncio.create_task(listen()) for _ in range(8)]
        await asyncio.sleep(delay / 500)
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=20.0)
        for task in left:
            task.cancel()
        assert not left


async def test_turns_that_nobody_will_train_are_no_news(queue: Queue) -> None:
    await queue.admit(order("a"))
    for group in "bcd":
        await queue.admit(order(group, 1))
        await queue.append([segment(group, 0)])
        await queue.end([end(group, 0, turns=1)])
        assert await queue.ready(group, 0, 1)
    await queue.append([segment("a", 0), segment("a", 1)])
    await queue.end([end("a", 1, spec=FAILED)])
    await queue.commit(step_of(1, "b", size=1))
    await queue.close(["c"], "lag")
    place, found = await heard(queue)
    assert found == ["b.0 end", "d.0 turn 0", "d.0 end", "a.0 turn 0", "a.1 end"]
    await queue.reorder(order("a", attempt=1))
    assert (await heard(queue))[1] == ["b.0 end", "d.0 turn 0", "d.0 end", "a.1 end"]  # the first one is gone
    await queue.append([segment("a", 0, attempt=1)])
    assert (await heard(queue, place))[1] == ["a.0 turn 0 again 1"]
    await check(queue)


async def test_old_notices_are_forgotten(queue: Queue) -> None:
    """The stream of notices is bounded; what it carried is not touched."""
    kept = 200
    if isinstance(queue, RedisQueue):
        queue._notices = kept
    else:
        queue._notices = deque(maxlen=kept)  # type: ignore[attr-defined]
    await queue.admit(order("a", 1))
    for first in range(0, 1000, 100):
        await queue.append([segment("a", 0, turn) for turn in range(first, first + 100)])
    found = (await heard(queue))[1]
    assert kept <= len(found) <= kept + 200  # a server trims by whole blocks
    assert found == [f"a.0 turn {turn}" for turn in range(1000 - len(found), 1000)]
    await queue.end([end("a", 0, turns=1000)])
    assert await queue.ready("a", 0, 1)
    assert len((await queue.load(["a"]))[0].members[0].turns) == 1000


async def test_facts(queue: Queue) -> None:
    assert await queue.get("cursor") is None
    await queue.put("cursor", b"\x00\xff")
    assert await queue.get("cursor") == b"\x00\xff"


async def test_load_refuses_a_member_with_missing_turns(queue: Queue) -> None:
    await queue.admit(order("a", 1))
    await queue.append([segment("a", 0, 0), segment("a", 0, 2)])
    await queue.end([end("a", 0, turns=3)])
    await queue.ready("a", 0, 1)
    with pytest.raises(KeyError, match="2 of 3 turns"):
        await queue.load(["a"])


async def test_load_refuses_an_open_group(queue: Queue) -> None:
    await queue.admit(order("a"))
    await queue.append([segment("a", m) for m in range(2)])
    await queue.end([end("a", 0, turns=1)])
    with pytest.raises(KeyError, match="group a: it is open"):
        await queue.load(["a"])
    await queue.end([end("a", 1, turns=1)])
    assert await queue.ready("a", 0, 2)
    assert len((await queue.load(["a"]))[0].members) == 2


# Random orders: both implementations must agree, and conserve, at every step.

GROUPS = st.sampled_from(["p", "q", "r"])
MEMBERS = st.integers(0, 1)
ATTEMPTS = st.sampled_from([0, 0, 0, 1, 2])
STEPS = st.integers(1, 4)
SPECS = st.sampled_from([FINISHED, FINISHED, (EndKind.TRUNCATED, "turns"), FAILED, (EndKind.ABANDONED, "x")])
Action = Callable[[Queue], Awaitable[Any]]


def finishing(group: str, attempt: int, least: int) -> Action:
    async def act(queue: Queue) -> bool:
        await queue.append([segment(group, m, attempt=attempt) for m in range(2)])
        await queue.end([end(group, m, attempt, turns=1) for m in range(2)])
        return await queue.ready(group, attempt, least)

    return act


ACTIONS: st.SearchStrategy[Action] = st.one_of(
    st.builds(lambda g: lambda q: q.admit(order(g)), GROUPS),
    st.builds(lambda g: lambda q: q.admit(order(g)), GROUPS),
    st.builds(lambda g, a: lambda q: q.reorder(order(g, attempt=a)), GROUPS, ATTEMPTS),
    st.builds(lambda g, m, a: lambda q: q.append([segment(g, m, attempt=a)]), GROUPS, MEMBERS, ATTEMPTS),
    st.builds(lambda g, m, a, s: lambda q: q.end([end(g, m, a, s)]), GROUPS, MEMBERS, ATTEMPTS, SPECS),
    st.builds(lambda g, a, n: lambda q: q.ready(g, a, n), GROUPS, ATTEMPTS, st.integers(1, 2)),
    st.builds(finishing, GROUPS, ATTEMPTS, st.integers(1, 2)),
    st.builds(finishing, GROUPS, ATTEMPTS, st.integers(1, 2)),
    st.builds(lambda n: lambda q: q.claim("f", n, 0.0), st.integers(1, 3)),
    st.builds(lambda: lambda q: q.reclaim("f")),
    st.builds(lambda g: lambda q: q.close([g], "lag"), GROUPS),
    st.builds(lambda g: lambda q: q.abandon(g, "lost"), GROUPS),
    st.builds(lambda s, g: lambda q: q.plan(step_of(s, *g)), STEPS, st.sets(GROUPS, max_size=2).map(sorted)),
    st.builds(
        lambda s, g, n: lambda q: q.commit(step_of(s, *g, size=n)),
        STEPS,
        st.sets(GROUPS, min_size=1, max_size=2).map(sorted),
        st.integers(1, 2),
    ),
    st.builds(lambda s: lambda q: q.release(s), STEPS),
    st.builds(lambda s: lambda q: q.rewind(s), st.integers(0, 3)),
    st.builds(lambda g: lambda q: q.load([g]), GROUPS),
    st.builds(lambda: lambda q: heard_now(q)),
)


async def heard_now(queue: Queue) -> list[Segment | End]:
    return (await queue.news("", 1000, 0.0))[1]


async def outcome(action: Action, queue: Queue) -> Any:
    try:
        return await action(queue)
    except (KeyError, ValueError) as error:
        return type(error), str(error).replace("trajectory:", "")


async def facts_of(queue: Queue) -> Any:
    ledger = await queue.ledger()
    assert ledger.balanced and ledger.pending >= 0
    assert ledger == await queue.audit()
    groups = await queue.groups()
    assert (await queue.depth())[0] == groups["ready"]
    return ledger, groups, await queue.get("version"), await queue.orders()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(actions=st.lists(ACTIONS, min_size=5, max_size=25))
async def test_random_orders_conserve_and_agree(valkey_url: str, actions: Sequence[Action]) -> None:
    model, real = MemoryQueue(notices=True), fresh(valkey_url, notices=True)
    try:
        for action in actions:
            assert await outcome(action, real) == await outcome(action, model)
            assert await facts_of(real) == await facts_of(model)
        assert await real.steps(0) == await model.steps(0)
        assert await real.lost_entries() == 0
    finally:
        await real.aclose()


# What only a server can do.


def keys_of(url: str, queue: RedisQueue) -> tuple["redis.Redis", str]:
    return redis.Redis.from_url(url), queue._base


async def test_wire_bytes_are_msgpack(valkey_url: str) -> None:
    queue = fresh(valkey_url)
    await finish(queue, "a")
    client, base = keys_of(valkey_url, queue)
    raw = client.hget(f"{base}trajectory:a.1", "turn:0:1")
    assert isinstance(raw, bytes) and raw[0] == 1
    plain = msgpack.unpackb(raw[1:])
    assert plain["trajectory"] == "a.1" and plain["turn"]["turn"] == 1
    assert plain["turn"]["calls"][0]["output"] == pack_ids([3, 1])
    client.hset(f"{base}trajectory:a.1", "turn:0:1", raw[:-3])
    with pytest.raises(ValueError, match=r"trajectory:a\.1 turn:0:1 is damaged"):
        await queue.load(["a"])
    client.close()
    await queue.aclose()


async def test_without_readers_no_notice_is_written(valkey_url: str) -> None:
    queue = fresh(valkey_url)
    await finish(queue, "a")
    client, base = keys_of(valkey_url, queue)
    assert not client.exists(f"{base}news")
    client.close()
    assert await queue.news("", 5, 0.0) == ("", [])
    await queue.aclose()


async def test_a_damaged_segment_is_named(valkey_url: str) -> None:
    queue = fresh(valkey_url, notices=True)
    await finish(queue, "a")
    client, base = keys_of(valkey_url, queue)
    client.hset(f"{base}trajectory:a.1", "turn:0:1", b"\x01broken")
    client.close()
    with pytest.raises(ValueError, match=r"trajectory:a\.1 turn:0:1 is damaged"):
        await queue.news("", 10, 0.0)
    await queue.aclose()


async def test_release_leaves_no_payload_behind(valkey_url: str) -> None:
    queue = fresh(valkey_url)
    await finish(queue, "a", "b")
    await queue.claim("f", 2, 0.0)
    await queue.commit(step_of(1, "a"))
    await queue.close(["b"], "lag")
    await queue.release(1)
    client, base = keys_of(valkey_url, queue)
    left = {k.decode().removeprefix(base) for k in client.scan_iter(f"{base}*")}
    assert not [name for name in left if name.startswith(("group:", "trajectory:"))]
    assert client.xlen(f"{base}ready") == 0
    client.close()
    await queue.aclose()


async def test_audit_shows_a_wrong_counter(valkey_url: str) -> None:
    queue = fresh(valkey_url)
    await finish(queue, "a")
    client, base = keys_of(valkey_url, queue)
    client.hincrby(f"{base}ledger", "trained", 1)
    assert not (await queue.ledger()).balanced
    assert await queue.audit() != await queue.ledger()
    client.close()
    await queue.aclose()


async def test_reclaim_takes_over_from_the_dead(valkey_url: str) -> None:
    first = fresh(valkey_url)
    await finish(first, "a", "b", "c", "d")
    assert await first.claim("old", 1, 0.0) == ["a"]
    assert await first.claim("feeder", 2, 0.0) == ["b", "c"]
    second = RedisQueue(valkey_url, "test", first._base[1:-2].partition(":")[2])
    await second.close(["b"], "lag")
    assert await second.reclaim("feeder") == ["a", "c"]
    assert await second.claim("feeder", 5, 0.0) == ["d"]
    third = RedisQueue(valkey_url, "test", first._base[1:-2].partition(":")[2])
    assert await third.claim("feeder", 2, 0.0) == ["a", "c"]  # what its predecessor held, first
    assert await third.claim("feeder", 2, 0.0) == ["d"]
    assert await third.claim("feeder", 2, 0.0) == []
    for queue in (first, second, third):
        await queue.aclose()


async def test_vanished_stream_entries_are_counted_and_repaired(valkey_url: str) -> None:
    queue = fresh(valkey_url)
    await finish(queue, "a", "b", "c")
    assert await queue.claim("f", 2, 0.0) == ["a", "b"]
    client, base = keys_of(valkey_url, queue)
    client.xtrim(f"{base}ready", maxlen=0, approximate=False)
    assert await queue.reclaim("f") == []
    assert await queue.claim("f", 5, 0.0) == ["a", "b", "c"]
    assert await queue.lost_entries() == 3
    client.close()
    await queue.aclose()


class Proxy:
    """Forwards TCP; loses the next ``losses`` replies of the server, and the connection with them."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.losses = 0

    async def start(self) -> int:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port: int = self.server.sockets[0].getsockname()[1]
        return port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, reply: bool) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if reply and self.losses > 0:
                        self.losses -= 1
                        break
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, up_writer, False), pump(up_reader, writer, True))


async def test_lost_replies_duplicate_nothing(valkey_url: str) -> None:
    password, _, address = valkey_url.removeprefix("redis://:").partition("@")
    proxy = Proxy(int(address.partition(":")[2].partition("/")[0]))
    port = await proxy.start()
    queue = fresh(f"redis://:{password}@127.0.0.1:{port}/0")
    actions: list[Action] = [
        lambda q: q.admit(order("a")),
        lambda q: q.append([segment("a", 0), segment("a", 1)]),
        lambda q: q.end([end("a", 0, turns=1), end("a", 1, turns=1)]),
        lambda q: q.ready("a", 0, 2),
        lambda q: q.claim("f", 1, 1.0),
        lambda q: q.commit(step_of(1, "a")),
    ]
    await queue.connect()
    for action in actions:
        proxy.losses = 1
        answer = await action(queue)
        assert proxy.losses == 0
        if isinstance(answer, list):
            assert answer == ["a"]
        await check(queue)
    assert await queue.claim("f", 1, 0.0) == []
    ledger = await queue.ledger()
    assert (ledger.admitted, ledger.trained, ledger.pending) == (2, 2, 0)
    assert await queue.steps(0) and (await queue.steps(0))[0].committed
    await queue.aclose()
    proxy.server.close()


def forget(folder: Path) -> None:
    """Lose even what the kernel had kept of the append-only file."""
    parts = list(folder.glob("appendonlydir/*.aof"))
    assert parts
    for part in parts:
        part.write_bytes(b"")


async def test_killed_server_loses_nothing_acknowledged(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, fsync="no")  # the worst case: nothing reaches the disk in time
    server.start()
    run = f"run{next(RUNS)}"
    controller, worker, feeder = (RedisQueue(server.url, "test", run) for _ in range(3))
    try:
        await controller.admit(order("early"))
        await controller.put("cursor", b"7")
        await finish(worker, "mine")
        assert await feeder.claim("f", 1, 1.0) == ["mine"]
        await worker.append([segment("early", 0), segment("early", 1)])
        server.kill()
        forget(tmp_path)
        writing = asyncio.create_task(worker.end([end("early", m, turns=1) for m in range(2)]))
        await asyncio.sleep(0.3)
        server.restart()
        await asyncio.sleep(0.5)
        assert not writing.done()  # its group is unknown until the controller replays
        assert await controller.get("cursor") == b"7"
        assert await asyncio.wait_for(writing, 20.0) == 2
        assert await worker.ready("early", 0, 2)
        assert await feeder.claim("f", 5, 20.0) == ["early"]  # "mine" is not handed out twice
        assert len((await feeder.load(["mine", "early"]))[1].members) == 2
        assert await feeder.commit(step_of(1, "mine", "early"))
        assert (await worker.ledger()).trained == 4
        await check(controller)
    finally:
        for queue in (controller, worker, feeder):
            await queue.aclose()
        server.stop()


@contextlib.asynccontextmanager
async def claimed_and_forgotten(tmp_path: Path) -> AsyncIterator[tuple[RedisQueue, RedisQueue, RedisQueue]]:
    """Controller, worker, feeder: group "a" is claimed, and the restarted server knows nothing of it."""
    server = ValkeyServer(tmp_path, fsync="no")
    server.start()
    controller, worker, feeder = queues = tuple(RedisQueue(server.url, "test", "run") for _ in range(3))
    try:
        await controller.admit(order("a"))
        await finish(worker, "a")
        assert await feeder.claim("f", 1, 1.0) == ["a"]
        server.kill()
        forget(tmp_path)
        server.restart()
        yield controller, worker, feeder
    finally:
        for queue in queues:
            await queue.aclose()
        server.stop()


async def test_load_waits_until_a_restarted_server_knows_the_group_again(tmp_path: Path) -> None:
    async with claimed_and_forgotten(tmp_path) as (controller, worker, feeder):
        loading = asyncio.create_task(feeder.load(["a"]))
        await asyncio.sleep(0.25)
        assert not loading.done()  # the group is unknown
        await controller.connect()
        await asyncio.sleep(0.25)
        assert not loading.done()  # it is open, and nobody has ended
        await worker.connect()
        (group,) = await asyncio.wait_for(loading, 20.0)
        assert [len(member.turns) for member in group.members] == [2, 2]
        await check(controller)


async def test_load_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.link.SETTLE_S", 0.6)
    async with claimed_and_forgotten(tmp_path) as (controller, _, feeder):
        await controller.connect()
        with pytest.raises(KeyError, match="group a: it is open"):
            await asyncio.wait_for(feeder.load(["a"]), 10.0)
        assert not feeder._link.settling


async def test_writes_through_a_kill_are_all_there(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, fsync="everysec")
    server.start()
    queue = RedisQueue(server.url, "test", "run")
    stored: list[Segment] = []
    try:
        await queue.admit(order("a", 1))

        async def write() -> None:
            for turn in range(200):
                await queue.append([segment("a", 0, turn)])
                stored.append(segment("a", 0, turn))
                await asyncio.sleep(0.005)

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.3)
        server.kill()
        server.restart()
        await asyncio.wait_for(writing, 60.0)
        await queue.end([end("a", 0, turns=200)])
        assert await queue.ready("a", 0, 1)
        (group,) = await queue.load(["a"])
        assert [t.turn for t in group.members[0].turns] == list(range(200)) and len(stored) == 200
        await check(queue)
    finally:
        await queue.aclose()
        server.stop()


async def test_a_reader_of_news_outlives_the_server(tmp_path: Path) -> None:
    """Even if the server forgets every notice: those appended or replayed afterwards are told."""
    server = ValkeyServer(tmp_path, fsync="no")
    server.start()
    controller, worker, reader = (RedisQueue(server.url, "test", "run", notices=True) for _ in range(3))
    try:
        await controller.admit(order("a"))
        await worker.append([segment("a", 0)])
        place, found = await reader.news("", 5, 1.0)
        assert found == [segment("a", 0)]
        waiting = asyncio.create_task(reader.news(place, 5, 20.0))
        server.kill()
        forget(tmp_path)
        server.restart()
        await controller.connect()
        await worker.append([segment("a", 0, 1)])
        place, found = await asyncio.wait_for(waiting, 20.0)
        while segment("a", 0, 1) not in found:  # the replayed one may come first
            place, more = await reader.news(place, 5, 5.0)
            assert more
            found += more
        assert len(found) <= 2
        await check(controller)
    finally:
        for queue in (controller, worker, reader):
            await queue.aclose()
        server.stop()


async def test_emptied_script_cache_is_refilled(valkey_url: str) -> None:
    queue = fresh(valkey_url)
    await queue.admit(order("a"))
    client, _ = keys_of(valkey_url, queue)
    client.script_flush()
    client.close()
    assert await queue.append([segment("a", 0)]) == 1
    await queue.aclose()


async def test_unreachable_server_is_one_clear_error() -> None:
    queue = RedisQueue("redis://:secret@127.0.0.1:1/0", first_s=0.5)
    start = time.monotonic()
    with pytest.raises(StreamFailed, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await queue.connect()
    assert time.monotonic() - start < 20.0 and "secret" not in str(caught.value)
    await queue.aclose()


async def test_server_that_never_answers_is_an_error() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    queue = RedisQueue(f"redis://127.0.0.1:{port}/0", first_s=0.5)
    with pytest.raises(StreamFailed):
        await asyncio.wait_for(queue.connect(), 20.0)
    await queue.aclose()
    server.close()


async def test_lost_server_is_an_error_after_the_deadline(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    server.start()
    queue = RedisQueue(server.url, deadline_s=2.5)
    await queue.admit(order("a"))
    assert await queue.claim("f", 1, 3.0) == []  # waiting is no failure
    server.stop()
    start = time.monotonic()
    with pytest.raises(StreamFailed, match=r"2\.5 s"):
        await queue.claim("f", 1, 30.0)
    assert time.monotonic() - start < 20.0
    await queue.aclose()


async def test_wrong_password_fails_at_once(valkey_url: str) -> None:
    queue = RedisQueue("redis://:wrong@" + valkey_url.partition("@")[2])
    with pytest.raises(StreamFailed, match="login"):
        await queue.connect()
    await queue.aclose()


def test_password_is_never_shown() -> None:
    assert without_password("redis://user:pa@ss@host:6379/2") == "redis://host:6379/2"
