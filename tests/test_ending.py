"""Background tasks end, whatever becomes of a cancellation."""

import asyncio
import random
from pathlib import Path

import pytest

from cluster.ending import cancelled
from cluster.stream import RedisQueue


async def stubborn(swallows: int) -> None:
    """Goes on after so many cancellations."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            swallows -= 1
            if swallows < 0:
                raise


async def broken() -> None:
    raise ValueError("told before")


async def test_tasks_end_that_swallowed_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.ending.AGAIN_S", 0.01)
    tasks = [asyncio.create_task(work) for work in (stubborn(0), stubborn(2), broken())]
    await asyncio.sleep(0)
    assert await cancelled(tasks) == []
    assert all(task.done() for task in tasks)
    assert await cancelled([]) == []


async def test_one_that_does_not_end_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.ending.AGAIN_S", 0.01)
    task = asyncio.create_task(stubborn(1000))
    await asyncio.sleep(0)
    assert await cancelled([task], deadline_s=0.05) == [task]
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def test_a_reader_of_news_ends(valkey_url: str) -> None:
    """The client swallows a cancellation now and then: none may keep a job from ending."""
    queue = RedisQueue(valkey_url, prefix="ending", run=Path(__file__).stem)

    async def listen() -> None:
        place = ""
        while True:
            place, _ = await queue.news(place, 16, 0.02)

    try:
        for _ in range(20):
            tasks = [asyncio.create_task(listen()) for _ in range(8)]
            await asyncio.sleep(random.random() * 0.05)
            assert await cancelled(tasks) == []
    finally:
        await queue.aclose()
