"""Keeps the job's actors running: a component that ends, even cleanly, is an event.

Every actor has a ``run`` method that lasts as long as the job. When its process dies Ray starts
a new one under the same handle, and ``run`` is called again after a pause that grows, as it is
when ``run`` raises. A start that fails, and a component that fails too often in a row, end the job
with its name and cause.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cluster.errors import ConfigError, SpringtideError, TooManyFailures
from cluster.processes import REPLACED
from deploy.signals import cancelled

CALM_S = 60.0
"""An actor that ran this long is healthy again: its restart count starts anew."""

SETTLED_S = 5.0
"""A ``run`` that raises before this on its first start is a start-up error: the job ends at once."""

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)

REPLACED_PAUSE_S = 0.5

RETURN_S = 300.0
"""How long Ray may take to start a dead actor's next process."""

RETURN_POLL_S = 0.2

STOP_S = 10.0
"""What a watcher may take to end; the job is taken down without it then."""


class ComponentFailed(SpringtideError, RuntimeError):
    """A component raised, or died too often; carries the first cause."""

    boundary = "component"


class Supervisor:
    """Runs one watching task per actor; ``failed`` is set by the first fatal cause."""

    def __init__(self, on_event: Callable[[str, dict[str, Any]], None], max_restarts: int) -> None:
        self.on_event = on_event
        self.max_restarts = max_restarts
        self.restarts: dict[str, int] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retired: set[str] = set()  # told to end: their run may return
        self._late: set[str] = set()  # made while the job ran: the job can do without them
        self._stopping = False
        self._ran: set[str] = set()

    def watch(self, name: str, handle: Any, *arguments: Any, late: bool = False) -> None:
        """Call ``handle.run(*arguments)`` now and again after each death.

        A ``late`` component, made while the job runs, is tried again as long as it is watched: one that
        never gets ready is for the controller to see, who undoes the move it was made for.
        """
        self._retired.discard(name)
        if late:
            self._late.add(name)
        self.adopt(name, self._watch(name, handle, arguments))

    def forget(self, name: str) -> None:
        """Watch this one no more: its node is gone, or it is about to be ended."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
        self._ran.discard(name)
        self._late.discard(name)

    async def retire(self, name: str, stop: Callable[[], Any], deadline_s: float) -> bool:
        """Tell a component to end and wait for its run to return; False if it did not in time."""
        task = self._tasks.get(name)
        if task is None:
            return True
        self._retired.add(name)
        try:
            async with asyncio.timeout(deadline_s):
                await stop()
                await asyncio.wait({task})
                return True
        except (TimeoutError, RayError):
            return False
        finally:
            self.forget(name)

    def adopt(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a watcher; if it raises, the job fails with its cause."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._fail(name, str(error))

        self._tasks[name] = asyncio.create_task(guarded(), name=name)

    def run_to_end(self, name: str, handle: Any) -> asyncio.Future[Any]:
        """Like ``watch`` for an actor whose ``run`` has an end: the future holds its result."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.adopt(name, self._watch(name, handle, (), result))
        return result

    async def stop(self) -> list[str]:
        """Stop watching; actors may end from now on. Returns the watchers that would not end."""
        self._stopping = True
        left = await cancelled(self._tasks.values(), STOP_S)
        if not self.failed.done():
            self.failed.cancel()
        return [task.get_name() for task in left]

    async def _watch(
        self,
        name: str,
        handle: Any,
        arguments: tuple[Any, ...],
        result: asyncio.Future[Any] | None = None,
    ) -> None:
        in_a_row = 0
        while not self._stopping:
            begun, detail = time.monotonic(), ""
            first = name not in self._ran
            settled = asyncio.get_running_loop().call_later(SETTLED_S, self._ran.add, name)
            try:
                value = await handle.run.remote(*arguments)
                if result is not None and not result.done():
                    result.set_result(value)
                if self._stopping or result is not None or name in self._retired:
                    return
                if value == REPLACED:
                    await asyncio.sleep(REPLACED_PAUSE_S)
                    if not await returned(handle):
                        self._fail(name, f"no new process within {RETURN_S:.0f} s; it was being replaced")
                        return
                    continue
                cause = "its run ended although the job goes on"
            except RayError as error:
                if name in self._retired:
                    return  # it died of being told to end
                if isinstance(error, RayActorError) and not isinstance(error, RayTaskError):
                    cause, detail = "its process is gone", str(error)
                else:
                    cause, raised = cause_of(error), getattr(error, "cause", None)
                    begins = first and name not in self._late
                    if begins or isinstance(raised, (ConfigError, TooManyFailures)):
                        self._fail(name, cause, getattr(raised, "boundary", ""))
                        return
            finally:
                settled.cancel()
            in_a_row = 1 if time.monotonic() - begun > CALM_S else in_a_row + 1
            self.restarts[name] = self.restarts.get(name, 0) + 1
            told = {"component": name, "cause": cause, "in_a_row": in_a_row, "detail": detail}
            self.on_event("component_died", told)
            why = detail.partition("\n")[0] or cause
            if in_a_row > self.max_restarts and name not in self._late:
                self._fail(name, f"died {in_a_row} times in a row; last: {why}")
                return
            await asyncio.sleep(BACKOFF_S[min(in_a_row, len(BACKOFF_S)) - 1])
            if not await returned(handle):
                self._fail(name, f"no new process within {RETURN_S:.0f} s; it had died: {why}")
                return

    def _fail(self, name: str, cause: str, boundary: str = "") -> None:
        error = ComponentFailed(f"{name}: {cause}")
        error.boundary = boundary or error.boundary
        if not self.failed.done():
            self.failed.set_exception(error)


def cause_of(error: RayError) -> str:
    """What a component raised. Of an error that cannot be handed over Ray tells the text alone, last."""
    raised = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and not raised:
        return str(error)
    said = str(raised) if raised else str(error).rstrip().rpartition("\n")[2]
    return f"{type(raised or error).__name__}: {said}"


async def returned(handle: Any) -> bool:
    """Wait until a restarting actor's next process answers; False after ``RETURN_S``.

    Calls to an actor whose process is not there yet fail at once: they are no further deaths.
    """
    deadline = time.monotonic() + RETURN_S
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await handle.__ray_ready__.remote()
            return True
        except (ActorUnavailableError, TimeoutError):
            await asyncio.sleep(RETURN_POLL_S)
        except RayActorError:
            return True  # gone for good: the next call says why
    return False


async def answer(name: str, call: Callable[[], Any], deadline_s: float) -> Any:
    """Call an actor that may be restarting: try until the deadline, then say which one is missing."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                return await call()
        except (RayActorError, TimeoutError) as error:
            if time.monotonic() >= deadline:
                raise ComponentFailed(f"{name} did not answer within {deadline_s:.0f} s: {error}") from error
            await asyncio.sleep(0.3)
        except RayError as error:
            raise ComponentFailed(f"{name}: {cause_of(error)}") from error


def kill(handles: list[Any]) -> None:
    """End actors for good."""
    for handle in handles:
        ray.kill(handle, no_restart=True)
