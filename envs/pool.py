"""A pool of sandboxed environment processes, one live trajectory each.

::

    pool = EnvPool(builder("coin"), config.env, size=64)
    await pool.start()                       # launches and verifies; EnvFailed early and clear
    handle = await pool.acquire()
    try:
        observation = await handle.start(task, seed)
        result = await handle.step(["12"])
    finally:
        await handle.release()               # always: frees the slot, on failure too
    await pool.close()

A failure (deadline, crash, exception, nonsense) ends that one process, which the pool replaces;
the others never notice. ``fresh=True`` gives every trajectory a sandbox of its own, for
environments that run code written by a model.
"""

import asyncio
import math
import time

import msgspec

from cluster.codec import clean
from cluster.config import EnvConfig
from cluster.errors import EnvFailed, EnvTimeout
from cluster.types import Task
from envs.base import StepResult
from envs.child import SPENT, Answer, Ask
from envs.launcher import ZygoteClient
from envs.process import Process
from envs.registry import EnvBuilder

ACQUIRE_TIMEOUT_S = 600.0
MAX_LAUNCH_FAILURES = 5  # in a row; then acquire fails at once, one try per RETRY_AFTER_S excepted
RETRY_AFTER_S = 30.0
_BACKOFF_S, _BACKOFF_MAX_S = 0.02, 1.0


class PoolStats(msgspec.Struct, frozen=True):
    """Counters since the pool began; ``step_s`` is the sum of all steps' durations in seconds."""

    size: int
    in_use: int
    idle: int
    spawned: int
    ended: int  # processes replaced, or used up when fresh
    launches: int  # sandboxes
    failures: int  # of start, step and close, timeouts included
    timeouts: int
    cut: int  # observations shortened to env.output_limit
    steps: int
    step_s: float
    pauses: int = 0


class EnvHandle:
    """One environment process, lent for one trajectory. Not for concurrent use."""

    def __init__(self, pool: "EnvPool", process: Process, zygote: ZygoteClient) -> None:
        self.cut = 0  # characters removed from this trajectory's observations
        self.failed = False
        self._pool, self._process, self._zygote = pool, process, zygote
        self._released = False
        self._pauses = self._paused = False

    async def start(self, task: Task, seed: int) -> str:
        """Make the environment and begin the episode; returns the first observation.

        Raises EnvTimeout after ``env.start_timeout_s``, EnvFailed on any other failure.
        """
        answer = await self._ask(Ask("start", task, seed), self._pool.config.start_timeout_s)
        self._pool.started(True)
        self._pauses = answer.pauses
        return answer.text

    async def step(self, actions: list[str]) -> StepResult:
        """Apply the actions of one turn.

        Raises EnvTimeout after ``env.step_timeout_s``; EnvFailed on an exception or crash of the
        environment, and for rewards that are no finite numbers.
        """
        begin = time.perf_counter()
        cleaned = [clean(action) for action in actions]
        answer = await self._ask(Ask("step", actions=cleaned), self._pool.config.step_timeout_s)
        result = answer.result
        if result is None or not all(math.isfinite(value) for value in result.rewards.values()):
            self._fail(EnvFailed("step answered without a valid result"))
            raise EnvFailed("step answered without a valid result")
        self._pool.stepped(time.perf_counter() - begin)
        return result

    async def pause(self) -> None:
        """The trajectory waits for its turn: the environment may stop its clocks.

        Nothing if it cannot, or is paused. Raises EnvTimeout after ``env.step_timeout_s``, EnvFailed on
        any other failure.
        """
        if self._pauses and not self._paused:
            self._paused = True
            await self._ask(Ask("pause"), self._pool.config.step_timeout_s)
            self._pool.paused()

    async def resume(self) -> None:
        """The next step comes: its clocks go on. Nothing if it is not paused. Raises as ``pause``."""
        if self._paused:
            self._paused = False
            await self._ask(Ask("resume"), self._pool.config.step_timeout_s)

    async def release(self) -> None:
        """Close the environment and give the process back. Harmless when repeated."""
        if not self._released:
            self._released = True
            await self._pool.take_back(self._process, self._zygote, self.failed)

    async def _ask(self, ask: Ask, timeout_s: float) -> Answer:
        if self._released or self.failed:
            raise EnvFailed(f"{ask.op} on a handle that was released or has failed")
        try:
            answer = await self._process.ask(ask, timeout_s)
        except EnvFailed as error:
            self._fail(error)
            if ask.op == "start":
                self._pool.started(False)
            raise
        if answer.error:
            raised = EnvFailed(answer.error)
            self._fail(raised)
            if ask.op == "start":
                self._pool.started(False)
            raise raised
        if answer.cut:
            self.cut += answer.cut
            self._pool.shortened()
        return answer

    def _fail(self, error: EnvFailed) -> None:
        self.failed = True
        self._pool.failed(error)


class EnvPool:
    """At most ``size`` trajectories at once; processes are forked when first needed."""

    def __init__(
        self,
        builder: EnvBuilder,
        config: EnvConfig,
        size: int,
        *,
        fresh: bool = False,
        namespaces: bool = True,
    ) -> None:
        """``namespaces=False`` gives up PID namespaces per process (for kernels that refuse them)."""
        self.config = config
        self._builder, self._size, self._fresh, self._namespaces = builder, size, fresh, namespaces
        self._slots = asyncio.Semaphore(size)
        self._launching = asyncio.Lock()
        self._zygote: ZygoteClient | None = None
        self._zygotes: set[ZygoteClient] = set()  # all not yet closed
        self._idle: list[tuple[Process, ZygoteClient]] = []
        self._closed = False
        self._bad_starts = 0  # in a row
        self._launch_failures = 0  # in a row
        self._last_failure = (0.0, "")
        self._in_use = self._spawned = self._ended = self._launches = 0
        self._failures = self._timeouts = self._cut = self._steps = 0
        self._pauses = 0
        self._step_s = 0.0

    async def start(self) -> None:
        """Launch a sandbox, fork a process and make one environment in it.

        Raises ConfigError when the sandbox cannot run here, EnvFailed with the environment's own
        error when importing or constructing it fails.
        """
        process, zygote = await self._spawn()
        try:
            answer = await process.ask(Ask("probe"), self.config.start_timeout_s)
            if answer.error:
                raise EnvFailed(answer.error)
        except BaseException:
            await self._dispose(process, zygote)
            await self.close()
            raise
        if self._fresh:
            await self._dispose(process, zygote)
        else:
            self._idle.append((process, zygote))

    async def acquire(self, timeout_s: float = ACQUIRE_TIMEOUT_S) -> EnvHandle:
        """Borrow a process; waits for a free slot at most ``timeout_s``.

        Raises EnvTimeout when none became free, EnvFailed when no process can be started.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            message = f"no environment became free within {timeout_s:g} s (size {self._size})"
            raise EnvTimeout(message) from None
        try:
            process, zygote = await self._idle_or_new()
        except BaseException:
            self._slots.release()
            raise
        self._in_use += 1
        process.tail.forget()
        return EnvHandle(self, process, zygote)

    async def close(self) -> None:
        """End every process and wait until they are gone. Handles in use fail from now on."""
        self._closed = True
        for process, _ in self._idle:
            process.close()
        self._idle.clear()
        async with self._launching:
            await asyncio.gather(*(self._end_zygote(zygote) for zygote in list(self._zygotes)))
            self._zygote = None

    def stats(self) -> PoolStats:
        """The counters, as of now."""
        return PoolStats(
            size=self._size,
            in_use=self._in_use,
            idle=len(self._idle),
            spawned=self._spawned,
            ended=self._ended,
            launches=self._launches,
            failures=self._failures,
            timeouts=self._timeouts,
            cut=self._cut,
            steps=self._steps,
            step_s=self._step_s,
            pauses=self._pauses,
        )

    async def take_back(self, process: Process, zygote: ZygoteClient, failed: bool) -> None:
        """Used by ``EnvHandle.release``: reuse the process, or end it."""
        kept = False
        try:
            if not (failed or process.broken or self._fresh or self._closed):
                answer = await process.ask(Ask("close"), self.config.step_timeout_s)
                kept = not answer.error and answer.text != SPENT
                if answer.error:
                    self.failed(EnvFailed(answer.error))
        except EnvFailed as error:  # the trajectory has ended well: its close is the pool's affair
            self.failed(error)
        finally:
            try:
                if kept and not self._closed:
                    self._idle.append((process, zygote))
                else:
                    await self._dispose(process, zygote)
            finally:
                self._in_use -= 1
                self._slots.release()

    def started(self, well: bool) -> None:
        """Used by the handle: failing starts in a row slow down the forking of new processes."""
        self._bad_starts = 0 if well else self._bad_starts + 1

    def stepped(self, seconds: float) -> None:
        """Used by the handle: count a step."""
        self._steps += 1
        self._step_s += seconds

    def paused(self) -> None:
        """Used by the handle: count a pause."""
        self._pauses += 1

    def shortened(self) -> None:
        """Used by the handle: count an observation that was cut."""
        self._cut += 1

    def failed(self, error: EnvFailed) -> None:
        """Used by the handle: count a failure."""
        self._failures += 1
        self._timeouts += isinstance(error, EnvTimeout)

    async def _idle_or_new(self) -> tuple[Process, ZygoteClient]:
        if self._closed:
            raise EnvFailed("the environment pool is closed")
        while self._idle:
            process, zygote = self._idle.pop()
            if not process.broken:
                return process, zygote
            await self._dispose(process, zygote)
        if self._bad_starts:
            await asyncio.sleep(min(_BACKOFF_S * 2 ** min(self._bad_starts, 10), _BACKOFF_MAX_S))
        return await self._spawn()

    async def _spawn(self) -> tuple[Process, ZygoteClient]:
        zygote = await self._live_zygote()
        try:
            process = await zygote.spawn(self.config.start_timeout_s)
        except BaseException as error:
            if isinstance(error, EnvTimeout):  # a zygote that does not fork is no use to anyone
                zygote.destroy()
            if self._fresh:
                await self._end_zygote(zygote)
            raise
        self._spawned += 1
        return process, zygote

    async def _live_zygote(self) -> ZygoteClient:
        async with self._launching:
            if self._closed:
                raise EnvFailed("the environment pool is closed")
            if not self._fresh and self._zygote is not None:
                if self._zygote.alive:
                    return self._zygote
                await self._end_zygote(self._zygote)
                self._zygote = None
            await self._pause_after_failures()
            try:
                zygote = await ZygoteClient.start(self._builder, self.config, self._namespaces)
            except EnvFailed as error:
                self._launch_failures += 1
                self._last_failure = (time.monotonic(), str(error))
                raise
            self._launch_failures = 0
            self._launches += 1
            self._zygotes.add(zygote)
            if not self._fresh:
                self._zygote = zygote
            return zygote

    async def _pause_after_failures(self) -> None:
        failures, (when, why) = self._launch_failures, self._last_failure
        if failures >= MAX_LAUNCH_FAILURES and time.monotonic() - when < RETRY_AFTER_S:
            raise EnvFailed(f"the sandbox failed to start {failures} times in a row, last: {why}")
        if failures:
            await asyncio.sleep(min(_BACKOFF_S * 2**failures, _BACKOFF_MAX_S))

    async def _dispose(self, process: Process, zygote: ZygoteClient) -> None:
        self._ended += 1
        try:
            if self._fresh:
                await self._end_zygote(zygote)
            else:
                await process.end()
        finally:
            process.close()

    async def _end_zygote(self, zygote: ZygoteClient) -> None:
        self._zygotes.discard(zygote)
        await zygote.close()
