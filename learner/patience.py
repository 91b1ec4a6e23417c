"""How long a scorer's answer is waited for, and when it is asked again."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ANSWER_SHARE = 0.4
"""Of the deadline of a rank that waits for scores: then another scorer still has time to answer."""
RETRY_S = 0.5
"""Before asking again where an ask failed: a process that died is back in seconds, not at once."""


class Patience:
    """A scorer works on one request after the other, so an answer may have many others before it.

    It is given up when it has answered nobody for a share of ``timeout_s``, if another of ``scorers`` is not
    silent; else after all of it. A scorer is silent for ``timeout_s`` after it was given up, or until it
    answers.
    """

    def __init__(self, timeout_s: float, scorers: Callable[[], Collection[int]]) -> None:
        self._timeout_s = timeout_s
        self._scorers = scorers
        self._heard: dict[int, float] = {}  # when each last answered, monotonic
        self._given_up: dict[int, float] = {}  # when each was, if it has not answered since

    def silent(self, scorer: int) -> bool:
        """It was given up lately: others are asked, if there are any."""
        given_up = self._given_up.get(scorer)
        return given_up is not None and time.monotonic() - given_up < self._timeout_s

    async def answer(self, scorer: int, call: Coroutine[Any, Any, T]) -> T:
        """What ``call`` returns or raises.

        Raises TimeoutError when its scorer was silent for too long, ConnectionError when somebody cancelled
        the call but not who waits for it.
        """
        asked = asyncio.create_task(call)
        begun = time.monotonic()
        try:
            while True:
                limit = self._timeout_s * (ANSWER_SHARE if self._another(scorer) else 1.0)
                left = max(begun, self._heard.get(scorer, begun)) + limit - time.monotonic()
                if left <= 0:
                    self._given_up[scorer] = time.monotonic()
                    raise TimeoutError(f"scorer {scorer} answered nobody for {limit:g} s")
                done, _ = await asyncio.wait({asked}, timeout=left)
                if done:
                    if asked.cancelled():
                        raise ConnectionError(f"scorer {scorer}: the call was cancelled")
                    found = asked.result()
                    self._heard[scorer] = time.monotonic()
                    self._given_up.pop(scorer, None)
                    return found
        finally:
            asked.cancel()

    def _another(self, scorer: int) -> bool:
        return any(other != scorer and not self.silent(other) for other in self._scorers())
