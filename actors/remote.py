"""Ray shells of the generator and the env worker, and the generator's port as others see it.

Records travel as msgpack bytes, many per call. A shell turns calls into method calls; it decides
nothing. Actors find each other by name, since the process of any of them may be replaced. ``run``
lasts as long as the component; when it cannot go on, the process exits and its supervisor
starts another.
"""

import asyncio
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.engine import Engine
from actors.gate import Gate
from actors.reward import Reward
from actors.router import Router
from actors.tokenizer import Tokenizer
from actors.twin import TwinEngine
from actors.worker import Worker
from cluster import codec
from cluster.config import Config, build
from cluster.errors import EngineFailed
from cluster.messages import EvalEpisode, GeneratorHealth, Grant, Pull
from cluster.processes import announce, sole
from cluster.stream import RedisQueue
from cluster.types import Completion, Request, Weights
from envs.inline import make_pool

CALL_DEADLINE_S = 60.0


async def patiently(call: Callable[[], Awaitable[Any]], deadline_s: float) -> Any:
    """Call an actor whose process may be restarting, again and again until the deadline.

    Raises TimeoutError after ``deadline_s``; errors that the actor itself raised pass at once.
    """
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                return await call()
            except RayActorError:
                await asyncio.sleep(0.3)


def make_engine(config: Config, model: str, name: str, index: int) -> Engine | TwinEngine:
    """What generates: a vLLM engine, or its timed twin when ``twin.profile`` is set."""
    seed = config.run.seed * 1000 + index
    if config.twin.profile:
        return TwinEngine(config, model, name, seed)
    return Engine(model, config.generator, max_model_len=config.harness.max_context, name=name, seed=seed)


class GeneratorActor:
    """One vLLM engine. Until it has started, and after it died, requests are refused as retryable."""

    def __init__(self, tree: dict[str, Any], model: str, name: str, index: int) -> None:
        announce()
        self.config: Config = build(tree)
        self.name = name
        self._starting = asyncio.Lock()
        self._closing = False
        self.engine = make_engine(self.config, model, name, index)
        self.gate = Gate(
            self.engine,
            self.config.admission,
            self.config.generator.request_timeout_s,
            prefill_tok_s=self._prefill_tok_s,
        )

    def _prefill_tok_s(self) -> float:
        """In tokens per wall-clock second: a twin's profile says it, an engine has measured it."""
        if isinstance(self.engine, TwinEngine):
            return self.engine.profile.generator.prefill_tok_s * self.config.twin.speed
        return self.engine.prefill_tok_s

    async def run(self) -> None:
        """Start the engine, then stay until it dies; a dead engine ends the process."""
        async with self._starting:
            if not self.engine.healthy:
                await self.gate.start()
        reason = await self.engine.run_until_dead()
        if self._closing:  # an orderly end: Ray would report an exit as a crash
            return
        sys.stderr.write(f"{self.name}: {reason}\n")
        os._exit(1)

    async def submit(self, caller: str, raw: bytes) -> None:
        """Queue requests; answers wait for ``collect``."""
        if not self.engine.healthy:
            raise EngineFailed(f"{self.name} is not ready")
        await self.gate.submit(caller, codec.decode(raw, list[Request]))

    async def collect(self, caller: str, wait_s: float, elsewhere: int) -> bytes:
        """Completions since the caller's last collect."""
        if not self.engine.healthy:
            raise EngineFailed(f"{self.name} is not ready")
        return codec.encode(await self.gate.collect(caller, wait_s, elsewhere))

    async def release(self, caller: str, sessions: list[str]) -> None:
        """Tasks that have ended."""
        await self.gate.release(caller, sessions)

    async def clear(self, epoch: int) -> None:
        """See ``Gate.clear``."""
        await self.gate.clear(epoch)

    async def load_weights(self, raw: bytes, epoch: int) -> int:
        """See ``Engine.load_weights``."""
        return await self.gate.load_weights(codec.decode(raw, Weights), epoch)

    async def health(self) -> bytes:
        """An encoded ``GeneratorHealth``."""
        return codec.encode(self.gate.stats())

    async def checksums(self) -> dict[str, str]:
        """Checksums of the live weights."""
        return await self.engine.checksums()

    async def restart(self, reason: str) -> None:
        """End this process; the supervisor starts another."""
        asyncio.get_running_loop().call_later(0.05, os._exit, 1)

    async def close(self) -> None:
        """Shut the engine down in good order."""
        self._closing = True
        await self.gate.close()

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()


class RemoteGenerator:
    """A generator actor's handle as ``ports.Generator`` and ``controller.GeneratorPort``."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """See ``ports.Generator``."""
        await self._handle.submit.remote(caller, codec.encode(list(requests)))

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        """See ``ports.Generator``."""
        return codec.decode(await self._handle.collect.remote(caller, wait_s, elsewhere), list[Completion])

    async def release(self, caller: str, sessions: Sequence[str]) -> None:
        """See ``ports.Generator``."""
        await self._handle.release.remote(caller, list(sessions))

    async def health(self) -> GeneratorHealth:
        """See ``controller.GeneratorPort``."""
        return codec.decode(await self._handle.health.remote(), GeneratorHealth)

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """See ``ports.WeightSink``."""
        version: int = await self._handle.load_weights.remote(codec.encode(weights), epoch)
        return version

    async def clear(self, epoch: int) -> None:
        """See ``controller.GeneratorPort``."""
        await self._handle.clear.remote(epoch)

    async def restart(self, reason: str) -> None:
        """See ``controller.GeneratorPort``."""
        await self._handle.restart.remote(reason)


class EnvWorkerActor:
    """One env worker: many trajectories at once, each in its own sandboxed process."""

    def __init__(
        self,
        tree: dict[str, Any],
        model: str,
        name: str,
        url: str,
        run_id: str,
        log_folder: str,
    ) -> None:
        announce()
        self.config: Config = build(tree)
        self.model = model
        self.name = name
        self.url = url
        self.run_id = run_id
        self.log_folder = Path(log_folder)
        self.worker: Worker | None = None
        self._stopping = False

    @sole
    async def run(self) -> None:
        """Work until ``stop``."""
        config = self.config
        pool = make_pool(config, config.env.slots)
        notices = config.streams_scores
        queue = RedisQueue(self.url, prefix=config.queue.prefix, run=self.run_id, notices=notices)
        caller = f"{self.name}-{uuid.uuid4().hex[:8]}"
        router = Router(
            caller,
            config.generator,
            lambda name: RemoteGenerator(ray.get_actor(name)),
            gated=config.admission.policy == "task",
        )
        try:
            await pool.start()
            self.worker = Worker(
                self.name,
                config,
                queue,
                router,
                pool,
                Tokenizer(self.model, config.model.template),
                _ControllerPort(ray.get_actor("controller")),
                folder=self.log_folder,
                reward=Reward(config.reward.weights),
                seeded=config.generator.seeded,
            )
            if self._stopping:
                return
            await self.worker.run()
        finally:
            await router.aclose()
            await pool.close()
            await queue.aclose()

    async def stop(self) -> None:
        """End ``run`` in good order, also if it is still starting."""
        self._stopping = True
        if self.worker is not None:
            self.worker.stop()

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()


class _ControllerPort:
    """The controller's handle as ``actors.worker.Controller``; outlives its restarts."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def pull(self, pull: Pull) -> Grant:
        """See ``Controller.pull``."""
        raw = await patiently(lambda: self._handle.pull.remote(codec.encode(pull)), CALL_DEADLINE_S)
        return codec.decode(raw, Grant)

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        """See ``Controller.report_eval``."""
        raw = codec.encode(episodes)
        await patiently(lambda: self._handle.report_eval.remote(raw), CALL_DEADLINE_S)

    async def closed(self, groups: list[str]) -> None:
        """See ``Controller.closed``."""
        await patiently(lambda: self._handle.closed.remote(groups), CALL_DEADLINE_S)


RemoteGeneratorActor = ray.remote(GeneratorActor)
RemoteEnvWorker = ray.remote(EnvWorkerActor)
