"""The end of background tasks, also of those whose cancellation was swallowed on its way.

The Redis client drops a cancellation now and then (at a blocking read about one in twenty-five). A task that
loops over such calls goes on, and whoever waits for it waits for ever.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.5
DEADLINE_S = 10.0


async def cancelled(tasks: Iterable[asyncio.Task[Any]], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Cancel them, again and again, until all have ended; those that have not by the deadline are returned.

    What they raised is theirs to tell before: nothing is raised here.
    """
    left = set(tasks)
    deadline = time.monotonic() + deadline_s
    while left and time.monotonic() < deadline:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen
    return list(left)
