"""Durations on a machine that others use too: measured beside a plain sleep, which is late by as much."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def beside(call: Awaitable[T], sleep_s: float) -> tuple[T, float, float]:
    """(what ``call`` gives, seconds that it took, seconds that a sleep of ``sleep_s`` took meanwhile)."""

    async def clocked() -> tuple[T, float]:
        begun = time.monotonic()
        return await call, time.monotonic() - begun

    async def sleeping() -> float:
        begun = time.monotonic()
        await asyncio.sleep(sleep_s)
        return time.monotonic() - begun

    (got, spent), slept = await asyncio.gather(clocked(), sleeping())
    return got, spent, slept
