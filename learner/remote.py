"""Ray shells of the learner ranks, the scorer and the feeder.

A learner rank does its work in one thread of its own, so that it answers ``info`` while it steps
and two orders never overlap. Batches arrive by object reference; the late signal arrives as a
reference inside a list, which Ray leaves unresolved until the loss asks for it.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from cluster import codec
from cluster.config import Config, build
from cluster.messages import Published
from cluster.model_folder import ids_in_use
from cluster.processes import announce, sole
from cluster.stream import RedisQueue
from cluster.trace import Trace
from cluster.types import Group, StepRecord, Weights
from learner.batch import RankBatch
from learner.checkpoint import Meta, fingerprint, load_checkpoint, save_checkpoint
from learner.feed import Feed
from learner.form import Formed
from learner.group import FRESH, UNUSABLE, LearnerGroup
from learner.loop import TrainLoop
from learner.manifest import covered_step, latest_valid, step_of
from learner.measure import Measure
from learner.publish import SharedMemoryPublisher
from learner.record import write_step
from learner.signals import ReferenceScorer, Signal
from learner.step import LearnerRank

CONTROLLER_DEADLINE_S = 60.0
T = TypeVar("T")


class LearnerActor:
    """One learner rank. ``join`` may be called once per process; a lost group gets new processes."""

    def __init__(self, tree: dict[str, Any], model: str, rank: int, run_id: str, weights: str) -> None:
        announce()
        self.config: Config = build(tree)
        self.model = model
        self.rank = rank
        self.run_id = run_id
        self.weights = weights
        self.instance = uuid.uuid4().hex[:12]
        self.version = FRESH
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._learner: LearnerRank | None = None

    async def run(self) -> None:
        """A rank has no loop of its own; it lives until it is ended."""
        await asyncio.Event().wait()

    async def address(self) -> tuple[str, int]:
        """Host and a free port for the rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    async def info(self) -> tuple[str, int]:
        """See ``RankPort.info``."""
        return self.instance, self.version

    async def join(self, host: str, port: int, checkpoint: str) -> int:
        """Build the rank, form the group, load the checkpoint."""
        self.version = UNUSABLE  # a process group is formed once in a process, if at all
        self.version = await self._do(lambda: self._join(host, port, checkpoint))
        return self.version

    def _join(self, host: str, port: int, checkpoint: str) -> int:
        run, learner_config = self.config.run, self.config.learner
        learner = LearnerRank(
            self.config, self.model, self.rank, learner_config.ranks, run.seed, ids_in_use(Path(self.model))
        )
        learner.join(host, port)
        if checkpoint:
            place, optimizer = learner.joined()
            learner.version = load_checkpoint(Path(checkpoint), learner.model, optimizer, place).step
        self._learner = learner
        self._publisher = SharedMemoryPublisher(self.weights, self.config.generator.dtype)
        return learner.version

    async def step(self, batch: RankBatch, signal: list[Any] | None, step: int) -> dict[str, Any]:
        """One optimizer step; ``signal`` is ``[reference]`` of a ``Signal``."""
        timeout = self.config.scorer.timeout_s

        def resolve() -> Signal:
            assert signal is not None
            value: Signal = ray.get(signal[0], timeout=timeout)
            return value

        learner = self._live()
        result = await self._do(lambda: learner.step(batch, step, resolve if signal else None))
        self.version = learner.version
        return {**result.metrics, "busy": result.busy}

    async def publish(self) -> Weights | None:
        """Gather and write the weights of the current version."""
        learner = self._live()
        return await self._do(lambda: self._publisher.publish(learner.model, learner.version))

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint of the current version."""
        learner = self._live()
        place, optimizer = learner.joined()
        meta = Meta(
            step=learner.version, world=place.world, fingerprint=fingerprint(self.config), extra=extra
        )
        await self._do(
            lambda: save_checkpoint(
                Path(folder), learner.model, optimizer, place, meta,
                keep=self.config.run.keep_checkpoints, source=Path(self.model),
            )
        )  # fmt: skip

    async def replace(self) -> None:
        """End this process; Ray starts another under the same handle."""
        asyncio.get_running_loop().call_later(0.05, os._exit, 1)

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()

    def _live(self) -> LearnerRank:
        if self._learner is None:
            raise RuntimeError(f"learner rank {self.rank} has not joined a group")
        return self._learner

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class ScorerActor:
    """A frozen forward pass; a lost process loses nothing, its scores are asked for again."""

    def __init__(self, tree: dict[str, Any], model: str) -> None:
        announce()
        config = build(tree)
        self._scorer = ReferenceScorer(
            config.scorer.path or model,
            config.learner.dtype,
            config.scorer.threads,
            ids_in_use(Path(model)),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    async def run(self) -> None:
        """A scorer has no loop of its own; it lives until it is ended."""
        await asyncio.Event().wait()

    @ray.method(max_task_retries=-1)
    async def score(self, batch: RankBatch) -> Signal:
        """Reference log-probs of a rank's rows."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._scorer.score, batch)

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()


class FeederActor:
    """The only consumer of ready groups; drives the learner ranks (learner/loop.py)."""

    def __init__(
        self,
        tree: dict[str, Any],
        url: str,
        folder: dict[str, str],
    ) -> None:
        announce()
        self.config: Config = build(tree)
        self.url = url
        self.folder = {name: Path(path) for name, path in folder.items()}

    @sole
    async def run(self) -> int:
        """Train to the end; returns the final version."""
        config = self.config
        self.controller = ray.get_actor("controller")
        self.ranks = [ray.get_actor(f"learner-{i}") for i in range(config.learner.ranks)]
        self.scorers = [ray.get_actor(f"scorer-{i}") for i in range(config.scorer.replicas)]
        queue = RedisQueue(self.url, prefix=config.queue.prefix, run=self.folder["run"].name)
        trace = Trace(self.folder["trace"], "feeder")
        port = _ControllerPort(self.controller)
        feed = Feed(config, queue, "feeder", port.closed, trace)
        group = LearnerGroup(config, [_Rank(r) for r in self.ranks], self.folder["checkpoints"])
        effects = _Effects(self, trace)
        loop = TrainLoop(config, queue, feed, group, port, effects)
        try:
            return await loop.run()
        finally:
            await feed.stop()
            effects.measure.close()
            trace.close()
            await queue.aclose()

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()


class _Effects:
    """Ray references and files behind ``learner.loop.Effects``."""

    def __init__(self, feeder: FeederActor, trace: Trace) -> None:
        self._feeder = feeder
        self._config = feeder.config
        self.trace = trace
        self.measure = Measure(feeder.config, feeder.folder["metrics"])
        self._exporting: Any = None  # the last step's metrics on their way to Ray

    def share(self, formed: Formed) -> tuple[Sequence[Any], Sequence[Any]]:
        """Batches go to the object store once; scorers start on them at once."""
        batches = [ray.put(batch) for batch in formed.plan.ranks]
        scorers = self._feeder.scorers
        if not scorers:
            return batches, [None] * len(batches)
        signals = [[scorers[i % len(scorers)].score.remote(b)] for i, b in enumerate(batches)]
        return batches, signals

    def checkpoint(self) -> tuple[str, int]:
        """Newest valid checkpoint."""
        folder = latest_valid(self._feeder.folder["checkpoints"])
        return (str(folder), step_of(folder)) if folder is not None else ("", 0)

    def covered(self) -> int:
        """Oldest kept checkpoint."""
        return covered_step(self._feeder.folder["checkpoints"])

    def recorded(self, record: StepRecord, groups: Sequence[Group], metrics: dict[str, Any]) -> None:
        """Keep groups and losses of the step when the run is recorded."""
        if self._config.run.record:
            write_step(self._feeder.folder["record"], record, groups, metrics)

    def measured(self, step: int, metrics: dict[str, Any], facts: dict[str, Any]) -> None:
        """Metrics to JSONL here, to Ray metrics through the controller."""
        named = self.measure.step(step, metrics, facts)
        self.trace("busy", {"learner": metrics.get("busy"), "generator": facts["generator_busy"]})
        self.trace("tokens", {"generated": facts["generated_tokens"]})
        if self._exporting is not None and ray.wait([self._exporting], timeout=0)[0]:
            try:
                ray.get(self._exporting)
            except Exception as error:  # the controller may have died; a step of metrics is not worth a wait
                self.trace("metrics_not_exported", {"before_step": step, "error": repr(error)[:300]})
        self._exporting = self._feeder.controller.measured.remote(step, named)


class _Rank:
    """A learner actor's handle as ``learner.group.RankPort``."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def address(self) -> tuple[str, int]:
        host, port = await self._handle.address.remote()
        return host, port

    async def info(self) -> tuple[str, int]:
        instance, version = await self._handle.info.remote()
        return instance, version

    async def join(self, host: str, port: int, checkpoint: str) -> int:
        version: int = await self._handle.join.remote(host, port, checkpoint)
        return version

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        metrics: dict[str, Any] = await self._handle.step.remote(batch, signal, step)
        return metrics

    async def publish(self) -> Weights | None:
        weights: Weights | None = await self._handle.publish.remote()
        return weights

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        await self._handle.save.remote(folder, extra)

    async def replace(self) -> None:
        await self._handle.replace.remote()


class _ControllerPort:
    """The controller's handle as ``learner.loop.ControllerPort``; outlives its restarts."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def publish(self, published: Published) -> None:
        await self._patiently(lambda: self._handle.publish.remote(codec.encode(published)))

    async def closed(self, groups: list[str]) -> None:
        await self._patiently(lambda: self._handle.closed.remote(groups))

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        facts: dict[str, Any] = await self._patiently(lambda: self._handle.step_facts.remote(record))
        return facts

    async def _patiently(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(CONTROLLER_DEADLINE_S):
            while True:
                try:
                    return await call()
                except RayActorError:
                    await asyncio.sleep(0.3)


RemoteLearner = ray.remote(LearnerActor)
RemoteScorer = ray.remote(ScorerActor)
RemoteFeeder = ray.remote(FeederActor)
