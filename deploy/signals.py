"""Ctrl-C and SIGTERM: one orderly end, however often they come.

The first signal cancels the task; what the task does to clean up is protected by ``settled``, so
that neither a second Ctrl-C nor anything else cuts it short. Exit codes follow the shell's custom:
128 + the number of the signal, so 130 after Ctrl-C and 143 after SIGTERM.
"""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 0.5
LEAVE_S = 10.0
"""What tasks may take to end after the work that is run."""


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


def run(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, except that a task which will not end is named and left behind after ``LEAVE_S``."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        for task in loop.run_until_complete(cancelled(asyncio.all_tasks(loop), LEAVE_S)):
            sys.stderr.write(f"springtide: {task.get_name()} has not ended and is left behind\n")
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


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
        done, left = await asyncio.wait(left, timeout=min(AGAIN_S, rest))
        for task in done:
            if not task.cancelled():
                task.exception()  # seen
    return left


def bounded(work: Callable[[], object], deadline_s: float) -> bool:
    """Run ``work`` in a thread that nobody has to wait for; False if it has not ended by then.

    A thread of ``asyncio.to_thread`` would be waited for by the end of the loop, and of the interpreter.
    Raises what ``work`` raises.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if raised:
        raise raised[0]
    return not thread.is_alive()


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
