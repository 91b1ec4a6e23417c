"""Ray shells of the learner ranks and the scorers (the feeder's: learner/drive/remote.py, without torch).

A learner rank does its work in one thread of its own, so that it answers ``info`` and takes scores while it
steps, and two orders never overlap. Batches arrive by object reference; scores are offered as they come and
wait in a box until a loss asks for them.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray

from cluster.config import Config, build
from cluster.model_folder import ids_in_use
from cluster.processes import REPLACED, announce
from cluster.types import Weights
from learner.batch import RankBatch
from learner.drive.remote import RemoteFeeder as RemoteFeeder
from learner.group import FRESH, UNUSABLE
from learner.late import Key, Late, OfferedSignals, ScoreBox, Scored
from learner.publish import SharedMemoryPublisher
from learner.segments import Ask, Told
from learner.signals import Colocated, MicroSignals, ReferenceScorer, SignalSource
from learner.state import Gathered, State
from learner.step import LearnerRank

T = TypeVar("T")


class LearnerActor:
    """One learner rank. ``join`` may be called once per process; a lost group gets new processes.

    ``rank`` numbers the actor; its place in a group and the group's size come with ``join``.
    """

    def __init__(self, tree: dict[str, Any], model: str, rank: int, run_id: str, weights: str) -> None:
        announce()
        self.config: Config = build(tree)
        self.model = model
        self.rank = rank
        self.run_id = run_id
        self.weights = weights
        self.instance = uuid.uuid4().hex[:12]
        self.version = FRESH
        self._place = ("", 0, 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._box = ScoreBox()
        self._replacing = asyncio.Event()
        self._frozen: Colocated | None = None
        self._learner: LearnerRank | None = None

    async def run(self) -> str:
        """A rank has no loop of its own; it lives until it is ended or replaced."""
        await self._replacing.wait()
        return REPLACED

    async def ready(self) -> bool:
        """It exists; if it was in a group before, forming the next one replaces the process."""
        return True

    async def address(self) -> tuple[str, int]:
        """Host and a free port for the rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    async def info(self) -> tuple[str, int]:
        """See ``RankPort.info``."""
        return self.instance, self.version

    async def place(self) -> tuple[str, int, int]:
        """See ``RankPort.place``."""
        return self._place

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        """Build the rank, form the group, load the checkpoint."""
        self.version = UNUSABLE  # a process group is formed once in a process, if at all
        self.version = await self._do(lambda: self._join(host, port, checkpoint, rank, world))
        self._place = (f"{host}:{port}", rank, world)
        return self.version

    def _join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        run = self.config.run
        used = ids_in_use(Path(self.model))
        learner = LearnerRank(self.config, self.model, rank, world, run.seed, used)
        learner.join(host, port)
        if checkpoint:
            learner.load(checkpoint)
        self._learner = learner
        self._publisher = SharedMemoryPublisher(self.weights, self.config.generator.dtype)
        return learner.version

    async def step(self, batch: RankBatch, signal: Late | None, step: int) -> dict[str, Any]:
        """One optimizer step; see ``RankPort.step``."""
        learner = self._live()
        answer = await self._do(lambda: self._step(learner, batch, signal, step))
        self.version = learner.version
        return answer

    def _step(self, learner: LearnerRank, batch: RankBatch, late: Late | None, step: int) -> dict[str, Any]:
        source: SignalSource | MicroSignals | None = None
        spent: dict[str, float] = {}
        if late is not None and late.mode == "here" and learner.version == step - 1:
            frozen = self._frozen = self._frozen or Colocated(*self._scorer_arguments())
            signal = frozen.burst(batch)
            spent = {"score": frozen.score_s, "swap": frozen.swap_s, "load": frozen.load_s}

            def source() -> Any:
                return signal
        elif late is not None and late.mode == "offered":
            source = OfferedSignals(self._box, batch, late.keys, self.config.scorer.timeout_s)
        result = learner.step(batch, step, source)
        self._box.clear()
        busy = result.busy[1] - result.busy[0]
        spent |= {"train": busy - result.waited_s, "signal": result.waited_s}
        return {**result.metrics, "busy": result.busy, "spent": spent}

    def _scorer_arguments(self) -> tuple[str, str, int, int | None]:
        config = self.config
        path = config.scorer.path or self.model
        return path, config.learner.dtype, config.learner.threads, ids_in_use(Path(self.model))

    async def offer(self, scored: Scored) -> None:
        """Scores for the step under way or the next one."""
        self._box.offer(scored)

    async def publish(self) -> Weights | None:
        """Gather and write the weights of the current version."""
        learner = self._live()
        return await self._do(lambda: self._publisher.publish(learner.model, learner.version))

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint of the current version."""
        learner = self._live()
        await self._do(lambda: learner.save(folder, extra))

    async def gather(self) -> Gathered:
        """See ``RankPort.gather``."""
        return await self._do(self._live().gather)

    async def part(self, index: int) -> Any:
        """One part of the gathered state; it is returned, so the caller owns it."""
        learner = self._live()
        return await self._do(lambda: learner.part(index))

    async def adopt(self, state: State) -> int:
        """Take this rank's shard of every part, one part in memory at a time."""
        learner = self._live()
        timeout = self.config.learner.step_timeout_s
        parts = (ray.get(part, timeout=timeout) for part in state.parts)
        await self._do(lambda: learner.adopt(state.version, state.skipped, state.random, parts))
        self.version = learner.version
        return self.version

    async def replace(self) -> None:
        """End this process; Ray starts another under the same handle."""
        self._replacing.set()  # ``run`` says so first: it is no death
        asyncio.get_running_loop().call_later(0.2, os._exit, 1)

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()

    def _live(self) -> LearnerRank:
        if self._learner is None:
            raise RuntimeError(f"learner {self.rank} has not joined a group")
        return self._learner

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class ScorerActor:
    """A frozen forward pass; a lost process loses nothing, its scores are asked for again.

    The model is loaded when the rank first scores or is asked whether it is ready: an actor that exists only
    because its rank may score one day costs no memory.
    """

    def __init__(self, tree: dict[str, Any], model: str) -> None:
        announce()
        self.config: Config = build(tree)
        self.model = model
        self._scorer: ReferenceScorer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    async def run(self) -> None:
        """A scorer has no loop of its own; it lives until it is ended."""
        await asyncio.Event().wait()

    async def ready(self) -> bool:
        """The model is loaded."""
        await self._do(self._loaded)
        return True

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        """Reference log-probs of the batch's samples."""
        return await self._do(lambda: self._loaded().score_samples(batch, keys))

    async def score_segments(self, asks: Sequence[Ask], done: Sequence[str]) -> Told:
        """Reference log-probs of segments; see ``learner.streaming.SegmentPort``."""
        learner = self.config.learner
        tokens = learner.row_tokens * learner.micro_rows
        return await self._do(lambda: self._loaded().score_segments(asks, tokens, done))

    def _loaded(self) -> ReferenceScorer:
        if self._scorer is None:
            config = self.config
            self._scorer = ReferenceScorer(
                config.scorer.path or self.model,
                config.learner.dtype,
                config.scorer.threads,
                ids_in_use(Path(self.model)),
                int(config.scorer.kv_cache_gb * 2**30),
            )
        return self._scorer

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


RemoteLearner = ray.remote(LearnerActor)
RemoteScorer = ray.remote(ScorerActor)
