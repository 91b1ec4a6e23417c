"""Mailboxes lose nothing and mix nothing up; busy time is a union of intervals."""

import asyncio
import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from actors.mailbox import BusyTime, Mailboxes
from cluster.types import Completion


async def test_each_caller_gets_its_own_once_and_in_order() -> None:
    boxes = Mailboxes(keep_s=60)
    for n in range(4):
        boxes.put("ab"[n % 2], Completion(id=f"{n}"))
    assert [c.id for c in await boxes.take("a", 0)] == ["0", "2"]
    assert await boxes.take("a", 0) == []
    assert [c.id for c in await boxes.take("b", 0)] == ["1", "3"]


async def test_take_wakes_for_the_first_and_ends_at_its_deadline() -> None:
    boxes = Mailboxes(keep_s=60)
    waiting = asyncio.create_task(boxes.take("a", 5.0))
    await asyncio.sleep(0.01)
    boxes.put("b", Completion(id="other"))
    boxes.put("a", Completion(id="mine"))
    started = time.monotonic()
    assert [c.id for c in await waiting] == ["mine"]
    assert time.monotonic() - started < 4, "it waited for its deadline"
    assert await boxes.take("a", 0.05) == []
    assert time.monotonic() - started >= 0.05


async def test_a_cancelled_take_loses_nothing() -> None:
    boxes = Mailboxes(keep_s=60)
    waiting = asyncio.create_task(boxes.take("a", 5.0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    boxes.put("a", Completion(id="mine"))
    await asyncio.wait([waiting])
    assert [c.id for c in await boxes.take("a", 1.0)] == ["mine"]


async def test_boxes_that_nobody_opens_are_forgotten() -> None:
    now = [0.0]
    boxes = Mailboxes(keep_s=10, clock=lambda: now[0])
    boxes.put("gone", Completion(id="1"))
    await boxes.take("here", 0)
    boxes.put("here", Completion(id="2"))
    now[0] = 9.0
    await boxes.take("here", 0)
    boxes.put("here", Completion(id="3"))
    now[0] = 15.0
    assert boxes.prune() == 1
    assert [c.id for c in await boxes.take("here", 0)] == ["3"]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), min_size=1, max_size=30))
def test_busy_time_is_the_union(pairs: list[tuple[int, int]]) -> None:
    intervals = sorted(((start, start + length) for start, length in pairs), key=lambda i: i[1])
    busy = BusyTime()
    for start, end in intervals:
        busy.add(float(start), float(end))
    merged = busy.drain()
    covered = {2 * at + half for a, b in intervals for at in range(a, b) for half in (0, 1)}
    found = {2 * at + half for a, b in merged for at in range(int(a), int(b)) for half in (0, 1)}
    assert found == covered
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(merged))
    assert busy.drain() == ()
