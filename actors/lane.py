"""One generator as seen from one worker: outgoing requests in batches, one long poll for answers."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from cluster.ports import Generator
from cluster.types import Completion, Request

_log = logging.getLogger(__name__)

_POLL_S = 2.0  # one long poll
_GRACE_S = 10.0  # what a remote call may take beyond the wait it was asked for
_RELEASE_S = 0.01  # in which sessions that end gather
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0


class Lost(Exception):
    """The fate of a request is unknown or its generator failed: ask again, elsewhere if possible."""


class Counters(Protocol):
    """Where a lane counts its remote calls."""

    submits: int


class Lane:
    """Outbox, requests in flight, and the two tasks that serve them (alive only while needed)."""

    def __init__(
        self,
        name: str,
        caller: str,
        handle: Generator,
        window_s: float,
        counters: Counters,
        elsewhere: Callable[[], int],
    ) -> None:
        """``elsewhere``: most tokens free at another generator, told with each poll."""
        self.name = name
        self.healthy = True
        self.suspect_until = 0.0  # monotonic time before which it is not asked again
        self._caller = caller
        self._handle = handle
        self._window_s = window_s
        self._counters = counters
        self._elsewhere = elsewhere
        self._failures = 0
        self._outbox: list[Request] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._submits: set[asyncio.Task[None]] = set()
        self._ended: set[str] = set()  # sessions to release with the next batch
        self._releasing: set[str] = set()  # those of the batch under way
        self._order = asyncio.Lock()  # of release batches
        self._releaser: asyncio.Task[None] | None = None
        self._reported = -1
        self.room = 0  # tokens that its ledger could promise, by the table, less what went there since
        self._sender: asyncio.Task[None] | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Requests that wait for an answer."""
        return len(self._waiting)

    def usable(self, now: float) -> bool:
        """Healthy by the table and not resting after a failure of its handle."""
        return self.healthy and now >= self.suspect_until

    async def ask(self, request: Request, timeout_s: float) -> Completion:
        """Send with the next batch and wait for the answer. Raises Lost, also after ``timeout_s``."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._outbox.append(request)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name=f"send:{self.name}")
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise Lost(f"generator {self.name} did not answer within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(request.id, None)

    def report(self, free: int, number: int) -> None:
        """The table's word on its room. The table repeats itself: only a new report counts."""
        if number != self._reported:
            self._reported, self.room = number, free

    def release(self, session: str) -> None:
        """A session has ended: its place is free. Sent soon, with others; not repeated if that fails."""
        self._ended.add(session)
        if self._releaser is None or self._releaser.done():
            self._releaser = asyncio.create_task(self._release(), name=f"release:{self.name}")

    def drop(self, why: str) -> None:
        """Give up everything in flight; each waiting ``ask`` raises Lost."""
        waiting, self._waiting = self._waiting, {}
        self._outbox.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(Lost(why))

    def close(self, why: str) -> None:
        """Drop everything and stop the tasks."""
        self.drop(why)
        for task in self._tasks():
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the tasks have ended after ``close``."""
        await asyncio.gather(*self._tasks(), return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [
            task for task in (self._sender, self._pump, self._releaser, *self._submits) if task is not None
        ]

    async def _send(self) -> None:
        """Let requests gather for the window, then send them together; repeat until none is left."""
        while self._outbox:
            await asyncio.sleep(self._window_s)
            batch = [request for request in self._outbox if request.id in self._waiting]
            self._outbox.clear()
            if not batch:
                continue
            # Submits may overlap: a slow one (cold engine) must not hold the next window back.
            task = asyncio.create_task(self._submit(batch), name=f"submit:{self.name}")
            self._submits.add(task)
            task.add_done_callback(self._submits.discard)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._collect(), name=f"collect:{self.name}")

    async def _release(self) -> None:
        while self._ended:
            await asyncio.sleep(_RELEASE_S)
            await self._release_now()

    async def _release_now(self) -> None:
        """Returns when all that have ended by now are released, or that has failed."""
        async with self._order:
            if not self._ended:
                return
            self._releasing, self._ended = self._ended, set()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._handle.release(self._caller, sorted(self._releasing))
            except Exception as error:  # its place is taken from it when somebody needs the room
                _log.warning("release at generator %s failed: %r", self.name, error)
            finally:
                self._releasing = set()

    async def _submit(self, batch: list[Request]) -> None:
        gone = self._ended | self._releasing
        if any(request.session in gone for request in batch):
            await self._release_now()  # left and back (a new attempt): what it asks now must not be dropped
        self._counters.submits += 1
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._handle.submit(self._caller, batch)
        except Exception as error:  # any failure of a remote call, whatever library raises it
            self._failed("submit", error, [request.id for request in batch])

    async def _collect(self) -> None:
        """Poll while anything is in flight. A failed poll may have lost answers: all are asked again."""
        while self._waiting:
            try:
                async with asyncio.timeout(_POLL_S + _GRACE_S):
                    completions = await self._handle.collect(self._caller, _POLL_S, self._elsewhere())
            except Exception as error:  # any failure of a remote call, whatever library raises it
                self._failed("collect", error, list(self._waiting))
                continue
            self._failures = 0
            for completion in completions:
                future = self._waiting.get(completion.id)
                if future is not None and not future.done():
                    future.set_result(completion)
            # Let the callers take their answers, so that the loop sees what is really in flight.
            await asyncio.sleep(0)

    def _failed(self, what: str, error: Exception, ids: list[str]) -> None:
        """Rest the lane, longer each time, and hand its requests back."""
        self._failures += 1
        rest = min(_BACKOFF_S * 2 ** (self._failures - 1), _BACKOFF_MAX_S)
        self.suspect_until = time.monotonic() + rest
        why = f"{what} at generator {self.name} failed: {type(error).__name__}: {error}"
        _log.warning("%s; it rests for %.1f s", why, rest)
        for key in ids:
            future = self._waiting.pop(key, None)
            if future is not None and not future.done():
                future.set_exception(Lost(why))
