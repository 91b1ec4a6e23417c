"""Ctrl-C and SIGTERM: one orderly end, however often they come.

The first signal cancels the task; what the task does to clean up is protected by ``settled``, so
that neither a second Ctrl-C nor anything else cuts it short. Exit codes follow the shell's custom:
128 + the number of the signal, so 130 after Ctrl-C and 143 after SIGTERM.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 0.5


class Terminated(KeyboardInterrupt):
    """SIGTERM outside an event loop: leaves the program like Ctrl-C, with its own exit code."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises ``Terminated`` in the main thread instead of ending the process at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stopper:
    """Turns the first SIGINT or SIGTERM into the cancellation of one task.

    ``number`` is that signal, 0 while there was none; ``on_first`` may tell the user.
    """

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self.number = 0
        self._on_first = on_first
        self._task: asyncio.Task[Any] | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; one that a library's handler took can only have been SIGTERM."""
        return 128 + (self.number or signal.SIGTERM)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``; raises CancelledError after it was interrupted and has cleaned up."""
        task = asyncio.create_task(work)
        self._task = task
        self.install()
        return await task

    def install(self) -> None:
        """Put our handlers in place, again if a library has replaced them."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop, number)

    def stop(self, number: int) -> None:
        """What a signal does."""
        if self.number:
            sys.stderr.write("springtide: already stopping, a few seconds more\n")
            return
        self.number = number
        self._on_first()
        if self._task is not None:
            self._task.cancel()


async def cancelled(tasks: Iterable["asyncio.Task[Any]"], deadline_s: float) -> set["asyncio.Task[Any]"]:
    """Cancel tasks and wait until they have ended; returns those that have not within ``deadline_s``.

    Libraries lose a cancellation now and then (one that arrives together with an answer), so it is
    repeated. What a task raises at its end is dropped.
    """
    left, until = set(tasks), time.monotonic() + deadline_s
    while left and (rest := until - time.monotonic()) > 0:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=min(AGAIN_S, rest))
    return left


async def settled(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even if cancelled meanwhile; only then pass the cancellation on.

    The caller bounds the time that ``work`` may take.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failed := task.exception()) is not None:
        raise cancelled from failed
    raise cancelled
