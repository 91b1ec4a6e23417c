"""Environments in the worker's own process: for timed twins and for tests, thousands at once.

``InlinePool`` has the interface of ``envs.pool.EnvPool``. There is no sandbox and no process: ``Env.start``
and ``Env.step`` run on the event loop, so they must return at once. What an answer would take in
earnest the environment says in ``latency_s``; the pool sleeps that long, divided by ``speed``, and a timer
costs nothing while it sleeps. Deadlines count in wall-clock seconds, as everywhere.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

from cluster.codec import clean
from cluster.config import Config, EnvConfig
from cluster.errors import ConfigError, EnvFailed, EnvTimeout
from cluster.types import Task
from envs.base import Env, StepResult
from envs.pool import ACQUIRE_TIMEOUT_S, EnvPool, PoolStats
from envs.registry import EnvBuilder, builder, load_class

T = TypeVar("T")


def make_pool(config: Config, size: int) -> "EnvPool | InlinePool":
    """The pool that ``env.sandbox`` names. Raises ConfigError for an environment that needs the other."""
    made = builder(config.env.name, config.env.params)
    if config.env.sandbox == "inline":
        return InlinePool(made, config.env, size, speed=config.twin.speed)
    if "latency" in load_class(made.path).capabilities:
        raise ConfigError(
            f"env.sandbox = {config.env.sandbox!r}: {config.env.name} only tells how long its answers take, "
            'and only "inline" waits for them'
        )
    return EnvPool(made, config.env, size)


class InlineHandle:
    """One environment, lent for one trajectory. Not for concurrent use."""

    def __init__(self, pool: "InlinePool", env: Env) -> None:
        self.cut = 0  # characters removed from this trajectory's observations
        self.failed = False
        self._pool, self._env = pool, env
        self._released = self._paused = False

    async def start(self, task: Task, seed: int) -> str:
        """Begin the episode; returns the first observation.

        Raises EnvTimeout after ``env.start_timeout_s``, EnvFailed with the environment's own error.
        """
        observation = await self._ask(
            "start", lambda: self._env.start(task, seed), self._pool.config.start_timeout_s
        )
        return self._shortened(observation)

    async def step(self, actions: list[str]) -> StepResult:
        """Apply the actions of one turn.

        Raises EnvTimeout after ``env.step_timeout_s``; EnvFailed on an exception of the environment,
        and for rewards that are no finite numbers.
        """
        begun = time.perf_counter()
        cleaned = [clean(action) for action in actions]
        result = await self._ask("step", lambda: self._env.step(cleaned), self._pool.config.step_timeout_s)
        if not isinstance(result, StepResult) or not all(map(math.isfinite, result.rewards.values())):
            raise self._failure(EnvFailed("step answered without a valid result"))
        self._pool.stepped(time.perf_counter() - begun)
        text = self._shortened(result.observation)
        if text is result.observation:
            return result
        return StepResult(
            text, result.rewards, result.done, result.valid, result.changed, result.state_key, result.info
        )

    async def pause(self) -> None:
        """The trajectory waits for its turn. Nothing if the environment cannot pause, or is paused.

        Raises EnvFailed with the environment's own error.
        """
        if "pause" in self._env.capabilities and not self._paused:
            self._paused = True
            await self._ask("pause", self._env.pause, self._pool.config.step_timeout_s, waits=False)
            self._pool.paused += 1

    async def resume(self) -> None:
        """The next step comes. Nothing if it is not paused. Raises as ``pause``."""
        if self._paused:
            self._paused = False
            await self._ask("resume", self._env.resume, self._pool.config.step_timeout_s, waits=False)

    async def release(self) -> None:
        """Close the environment. Harmless when repeated."""
        if self._released:
            return
        self._released = True
        try:
            self._env.close()
        except Exception as error:  # the trajectory has ended well: its close is the pool's affair
            self._pool.failure(EnvFailed(f"{type(error).__name__}: {error}"))
        finally:
            self._pool.take_back()

    async def _ask(self, what: str, call: Callable[[], T], timeout_s: float, waits: bool = True) -> T:
        """Call the environment, wait as long as it says its answer takes, at most ``timeout_s``."""
        if self._released or self.failed:
            raise EnvFailed(f"{what} on a handle that was released or has failed")
        try:
            answer = call()
        except Exception as error:  # environments are foreign code
            raise self._failure(EnvFailed(f"{type(error).__name__}: {error}")) from error
        wait_s = getattr(self._env, "latency_s", 0.0) / self._pool.speed if waits else 0.0
        if wait_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise self._failure(EnvTimeout(f"{what} took longer than {timeout_s:g} s"))
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return answer

    def _shortened(self, text: str) -> str:
        """At most ``env.output_limit`` bytes of an observation."""
        limit = self._pool.config.output_limit
        if len(text) <= limit // 4:  # no character has more than four bytes
            return text
        raw = text.encode(errors="replace")
        if len(raw) <= limit:
            return text
        kept = raw[:limit].decode(errors="ignore")
        self.cut += len(text) - len(kept)
        self._pool.cut += 1
        return kept

    def _failure(self, error: EnvFailed) -> EnvFailed:
        self.failed = True
        self._pool.failure(error)
        return error


class InlinePool:
    """At most ``size`` trajectories at once, each with an environment of its own."""

    def __init__(self, builder: EnvBuilder, config: EnvConfig, size: int, *, speed: float = 1.0) -> None:
        """``speed`` is environment seconds per wall-clock second."""
        self.config = config
        self.speed = speed
        self.cut = 0
        self.paused = 0
        self._builder, self._size = builder, size
        self._slots = asyncio.Semaphore(size)
        self._closed = False
        self._in_use = self._made = self._ended = self._failures = self._timeouts = self._steps = 0
        self._step_s = 0.0

    async def start(self) -> None:
        """Make one environment, so that one that cannot be made is found early. Raises EnvFailed."""
        self._builder.build().close()

    async def acquire(self, timeout_s: float = ACQUIRE_TIMEOUT_S) -> InlineHandle:
        """A new environment; waits for a free slot at most ``timeout_s``.

        Raises EnvTimeout when none became free, EnvFailed when it cannot be made.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            message = f"no environment became free within {timeout_s:g} s (size {self._size})"
            raise EnvTimeout(message) from None
        try:
            if self._closed:
                raise EnvFailed("the environment pool is closed")
            env = self._builder.build()
        except BaseException:
            self._slots.release()
            raise
        self._in_use += 1
        self._made += 1
        return InlineHandle(self, env)

    async def close(self) -> None:
        """No more environments; those in use end with their trajectories."""
        self._closed = True

    def stats(self) -> PoolStats:
        """The counters, as of now; environments count as processes."""
        return PoolStats(
            size=self._size,
            in_use=self._in_use,
            idle=0,
            spawned=self._made,
            ended=self._ended,
            launches=0,
            failures=self._failures,
            timeouts=self._timeouts,
            cut=self.cut,
            steps=self._steps,
            step_s=self._step_s,
            pauses=self.paused,
        )

    def take_back(self) -> None:
        """Used by the handle: its slot is free."""
        self._in_use -= 1
        self._ended += 1
        self._slots.release()

    def stepped(self, seconds: float) -> None:
        """Used by the handle: count a step."""
        self._steps += 1
        self._step_s += seconds

    def failure(self, error: EnvFailed) -> None:
        """Used by the handle: count a failure."""
        self._failures += 1
        self._timeouts += isinstance(error, EnvTimeout)
