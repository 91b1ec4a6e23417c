"""How long a scorer's answer is waited for, when it is asked again, and when its process is ended."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ANSWER_SHARE = 0.4
"""Of the deadline of a rank that waits for scores: then another scorer, or another process of this one, still
has time to answer."""
LONGER = 2.0
"""Times as long as it ever took to answer: then it has hung."""
RETRY_S = 0.5
"""Before asking again where an ask failed: a process that died is back in seconds, not at once."""


class Patience:
    """A scorer works on one request after the other, so an answer may have many others before it.

    It is given up when it has answered nobody for a share of ``timeout_s``, if another of ``scorers`` is not
    silent; else after all of it. A scorer is silent for ``timeout_s`` after it was given up, or until it
    answers.

    One that has answered before, and now nobody for that share and ``LONGER`` than ever, hangs: it is given
    up too, and ``restart`` ends its process. One that has not answered yet may still be loading its model.
    """

    def __init__(
        self,
        timeout_s: float,
        scorers: Callable[[], Collection[int]],
        restart: Callable[[int, str], Awaitable[None]],
    ) -> None:
        self._timeout_s = timeout_s
        self._scorers = scorers
        self._restart = restart
        self._heard: dict[int, float] = {}  # when each process last answered, monotonic
        self._longest: dict[int, float] = {}  # seconds in which it answered nobody and answered then
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
                hangs = self._hangs_after(scorer)
                limit = min(hangs, self._timeout_s * (ANSWER_SHARE if self._another(scorer) else 1.0))
                left = self._since(scorer, begun) + limit - time.monotonic()
                if left <= 0:
                    await self._give_up(scorer, limit, hangs <= limit)
                done, _ = await asyncio.wait({asked}, timeout=left)
                if done:
                    found = self._result(scorer, asked)
                    silence = time.monotonic() - self._since(scorer, begun)  # others were answered meanwhile
                    self._longest[scorer] = max(self._longest.get(scorer, 0.0), silence)
                    self._heard[scorer] = time.monotonic()
                    self._given_up.pop(scorer, None)
                    return found
        finally:
            asked.cancel()

    def _since(self, scorer: int, begun: float) -> float:
        """From when on it has answered nobody, as one who asked at ``begun`` sees it."""
        return max(begun, self._heard.get(scorer, begun))

    def _result(self, scorer: int, asked: "asyncio.Task[T]") -> T:
        if asked.cancelled():
            raise ConnectionError(f"scorer {scorer}: the call was cancelled")
        if asked.exception() is not None:
            self._forget(scorer)  # its process may have died: the next one starts first
        return asked.result()

    async def _give_up(self, scorer: int, seconds: float, hangs: bool) -> None:
        self._given_up[scorer] = time.monotonic()
        why = f"scorer {scorer} answered nobody for {seconds:g} s"
        if hangs:
            self._forget(scorer)
            await self._restart(scorer, why)
        raise TimeoutError(why)

    def _hangs_after(self, scorer: int) -> float:
        """Seconds without an answer."""
        if scorer not in self._heard:
            return math.inf
        return max(ANSWER_SHARE * self._timeout_s, LONGER * self._longest[scorer])

    def _forget(self, scorer: int) -> None:
        self._heard.pop(scorer, None)
        self._longest.pop(scorer, None)

    def _another(self, scorer: int) -> bool:
        return any(other != scorer and not self.silent(other) for other in self._scorers())
