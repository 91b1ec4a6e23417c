"""Durations on a machine that others use too: measured beside a plain sleep, which is late by as much.

A job whose steps are mostly sleep runs on while engines, nodes and commands start, which takes the longer the
slower the machine is: its sleeps are made longer by ``slowness()``.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

IDLE_S = 3.0  # an import of torch and Ray on two idle cores takes 2 to 3 s
SLOWEST = 4.0  # so that jobs still end


def slowness() -> float:
    """How many times longer than on two idle cores a process takes to start now: 1 to ``SLOWEST``."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, ray"], check=True, timeout=120.0)
    return min(SLOWEST, max(1.0, (time.monotonic() - begun) / IDLE_S))


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
