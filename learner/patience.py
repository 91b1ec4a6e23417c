"""How long a scorer's answer is waited for, and when it is asked again."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ANSWER_SHARE = 0.4
"""Of the deadline of a rank that waits for scores: then another scorer still has time to answer."""
RETRY_S = 0.5
"""Before asking again where an ask failed: a process that died is back in seconds, not at once."""


class Patience:
    """A scorer works on one request after the other, so an answer may have many others before it.

    It is given up when it has answered nobody for a share of ``timeout_s`` and ``others`` (scorers, itself
    among them) are more than one; alone, after all of it.
    """

    def __init__(self, timeout_s: float, others: Callable[[], int]) -> None:
        self._timeout_s = timeout_s
        self._others = others
        self._heard: dict[int, float] = {}  # when each last answered, monotonic

    async def answer(self, scorer: int, call: Coroutine[Any, Any, T]) -> T:
        """What ``call`` returns or raises. Raises TimeoutError when its scorer was silent for too long."""
        asked = asyncio.create_task(call)
        begun = time.monotonic()
        try:
            while True:
                limit = self._timeout_s * (ANSWER_SHARE if self._others() > 1 else 1.0)
                left = max(begun, self._heard.get(scorer, begun)) + limit - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"scorer {scorer} answered nobody for {limit:g} s")
                done, _ = await asyncio.wait({asked}, timeout=left)
                if done:
                    found = asked.result()
                    self._heard[scorer] = time.monotonic()
                    return found
        finally:
            asked.cancel()
