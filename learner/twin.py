"""Timed twin of a learner rank: its contract, the times of a profile, no model, no torch.

A rank computes for as long as the profile says: forward, then the wait for the micro-batch's scores, then
backward, micro-batch after micro-batch, so the flow shop of scorers and learners is a real one. Versions,
repetitions, checkpoints and resizes behave as in ``learner.step``. In the place of weights stands one number:
a digest of every step so far and the tokens it trained. Two histories of the same batches have the same
digest, whatever was killed or resized on the way.
"""

import asyncio
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cluster.config import Config, build
from cluster.errors import CheckpointDamaged, LearnerLost
from cluster.processes import announce
from cluster.sim.catalogue import load_profile
from cluster.sim.profile import Profile
from cluster.types import Weights
from learner.batch import RankBatch
from learner.clock import Busy
from learner.group import FRESH, UNUSABLE
from learner.late import Late, OfferedSignals, ScoreBox, Scored
from learner.manifest import MANIFEST, checkpoints, digest
from learner.state import Gathered, State

T = TypeVar("T")
STATE = "twin.json"
LOOK_S = 0.25
"""How often a rank that waits for scores looks whether it still counts."""
GATHER_SHARE = 0.3
"""Of what a resize costs by the profile: to gather; the rest is spent when the new ranks adopt the state."""


class Pace:
    """Spends profile seconds on the wall clock; what one wait overslept the next one makes good."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._due = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Return when ``seconds`` of the profile have passed since the last call (or ``restart``)."""
        self._due += seconds / self._speed
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(left)

    def restart(self) -> None:
        """What has passed until now was spent elsewhere."""
        self._due = time.monotonic()


class TwinRank:
    """State and times of one rank. Blocking: it is called from a thread of its own."""

    def __init__(self, config: Config, profile: Profile, rank: int, world: int) -> None:
        self.config = config
        self.profile = profile
        self.rank = rank
        self.world = world
        self.version = 0
        self.digest = hashlib.sha256(b"initial").hexdigest()
        self.last: dict[str, Any] | None = None
        self.ended = False  # another rank has its place: whatever it waits for will not come
        scale = profile.learner.scaling ** float(np.log2(world))
        self._forward = profile.learner.forward_tok_s * scale
        self._backward = profile.learner.backward_tok_s * scale

    def step(self, batch: RankBatch, step: int, late: Late | None, box: ScoreBox) -> dict[str, Any]:
        """Make optimizer step ``step``; answer from memory if it has been made. Raises LearnerLost."""
        if self.version == step and self.last is not None:
            return {**self.last, "repeated": 1.0}
        batch.check(self.rank, self.version, step)
        busy = Busy()
        spent = self._compute(batch, late, box)
        text = f"{self.digest}/{step}/{batch.global_tokens}"
        self.version, self.digest = step, hashlib.sha256(text.encode()).hexdigest()
        self.last = {
            "loss": 0.0,
            "update_applied": 1.0,
            "lag0_tokens": 0.0,
            "max_abs_log_ratio_at_lag0": 0.0,
            "busy": busy.told(),
            "spent": spent,
        }
        return self.last

    def _compute(self, batch: RankBatch, late: Late | None, box: ScoreBox) -> dict[str, float]:
        """Take the time; returns this rank's seconds by name."""
        speed = self.config.twin.speed
        pace, spent = Pace(speed), {"train": 0.0, "signal": 0.0}
        offered = None
        if late is not None and late.mode == "here":
            spent |= self._score_here(batch, pace)
        elif late is not None:
            offered = OfferedSignals(box, batch, late.keys, LOOK_S)
        for rows in batch.micro_batches():
            tokens = int((batch.segments[rows] > 0).sum())
            pace.spend(tokens / self._forward)
            if offered is not None:
                waited = self._await_scores(offered, rows)
                spent["signal"] += waited
                if waited > 0.001:
                    pace.restart()
            pace.spend(tokens / self._backward)
            spent["train"] += tokens * (1 / self._forward + 1 / self._backward) / speed
        pace.spend(self.profile.learner.step_fixed_s)
        spent["train"] += self.profile.learner.step_fixed_s / speed
        return spent

    def _await_scores(self, offered: OfferedSignals, rows: slice) -> float:
        """Seconds until the scores of these rows were there. Raises LearnerLost if they do not come."""
        asked, limit = time.monotonic(), self.config.scorer.timeout_s
        while True:
            try:
                offered.rows(rows)
                return time.monotonic() - asked
            except TimeoutError as error:
                if self.ended or time.monotonic() - asked > limit:
                    raise LearnerLost(
                        f"rank {self.rank}: no score within scorer.timeout_s = {limit:.0f} s"
                    ) from error

    def _score_here(self, batch: RankBatch, pace: Pace) -> dict[str, float]:
        """One burst: bring the scorer, score this rank's rows, take it away."""
        scorer, speed = self.profile.scorer, self.config.twin.speed
        tokens = int((batch.segments > 0).sum())
        score = scorer.passes * tokens / scorer.forward_tok_s
        pace.spend(2 * scorer.swap_s + score)
        return {"score": score / speed, "swap": 2 * scorer.swap_s / speed}

    def save(self, root: Path, extra: dict[str, Any]) -> None:
        """The first rank writes a checkpoint folder that passes ``learner.manifest.verify``."""
        if self.rank != 0:
            return
        final = root / f"step-{self.version:06d}"
        part = root / f".{final.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        state = {"step": self.version, "digest": self.digest, "extra": repr(extra)}
        (part / STATE).write_text(json.dumps(state))
        listed = {STATE: {"bytes": (part / STATE).stat().st_size, "sha256": digest(part / STATE)}}
        (part / MANIFEST).write_text(json.dumps({"files": listed}))
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for folder in checkpoints(root)[self.config.run.keep_checkpoints :]:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Take version and digest from a checkpoint. Raises CheckpointDamaged."""
        try:
            state = json.loads((folder / STATE).read_text())
            self.version, self.digest = int(state["step"]), str(state["digest"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointDamaged(f"reading {folder} failed: {error}") from error


class LearnerTwin:
    """The actor: the methods of ``learner.group.RankPort``, as ``learner.remote.LearnerActor`` has them."""

    def __init__(self, tree: dict[str, Any], model: str, rank: int, run_id: str, weights: str) -> None:
        announce()
        self.config: Config = build(tree)
        self.profile = load_profile(self.config.twin.profile)
        self.number = rank
        self._rank: TwinRank | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner-twin")
        self._fresh()

    def _fresh(self) -> None:
        """What a new process would be; what the old one was doing ends by itself and counts for nothing."""
        if self._rank is not None:
            self._rank.ended = True
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner-twin")
        self.instance = uuid.uuid4().hex[:12]
        self.version = FRESH
        self._met = 0
        self._box = ScoreBox()
        self._rank = None
        self._place = ("", 0, 0)

    async def run(self) -> None:
        """A rank has no loop of its own; it lives until it is ended."""
        await asyncio.Event().wait()

    async def ready(self) -> bool:
        """It exists and can join a group."""
        return self.version == FRESH

    async def address(self) -> tuple[str, int]:
        """A place of this name only: nobody meets there. New for every group that forms."""
        self._met += 1
        return f"twin-{self.instance}", self._met

    async def info(self) -> tuple[str, int]:
        """See ``RankPort.info``."""
        return self.instance, self.version

    async def place(self) -> tuple[str, int, int]:
        """See ``RankPort.place``."""
        return self._place

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        """Be ``rank`` of ``world``, from a checkpoint or from nothing; once per process (or ``replace``)."""
        self.version = UNUSABLE
        twin = TwinRank(self.config, self.profile, rank, world)
        if checkpoint:
            twin.load(Path(checkpoint))
        self._rank = twin
        self._place = (f"{host}:{port}", rank, world)
        self.version = twin.version
        return twin.version

    async def step(self, batch: RankBatch, signal: Late | None, step: int) -> dict[str, Any]:
        """One optimizer step."""
        rank, box = self._live(), self._box
        result = await self._do(lambda: rank.step(batch, step, signal, box))
        box.clear()
        if rank.ended:
            raise LearnerLost(f"rank {rank.rank} was replaced in step {step}")
        self.version = rank.version
        return result

    async def offer(self, scored: Scored) -> None:
        """Scores for the step that is under way or comes next."""
        self._box.offer(scored)

    async def publish(self) -> Weights | None:
        """Weights without a place: the digest is their checksum."""
        rank = self._live()
        await asyncio.sleep(self.profile.sync.publish_s / self.config.twin.speed)
        if rank.rank != 0:
            return None
        name = f"twin:{rank.digest[:16]}"
        return Weights(version=rank.version, location=f"twin:{rank.version}", checksum=name, nbytes=0)

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint of the current version."""
        rank = self._live()
        await self._do(lambda: rank.save(Path(folder), extra))

    async def gather(self) -> Gathered:
        """Version and digest, as the only part of a state."""
        rank = self._live()
        await self._switch(GATHER_SHARE)
        parts = 1 if rank.rank == 0 else 0
        return Gathered(version=rank.version, skipped=0, random=b"", parts=parts, nbytes=64 * parts)

    async def part(self, index: int) -> dict[str, Any]:
        """The part."""
        rank = self._live()
        return {"version": rank.version, "digest": rank.digest}

    async def adopt(self, state: State) -> int:
        """Go on from a gathered state; its parts may be references."""
        rank = self._live()
        part = state.parts[0]
        while hasattr(part, "__await__") or isinstance(part, list):
            part = part[0] if isinstance(part, list) else await part
        await self._switch(1 - GATHER_SHARE)
        rank.version, rank.digest = int(part["version"]), str(part["digest"])
        rank.last = None
        self.version = rank.version
        return rank.version

    async def replace(self) -> None:
        """Be as a new process would be, at once: starting one would cost time that no profile knows."""
        self._fresh()

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()

    async def _switch(self, share: float) -> None:
        """The learner's part of a change of roles, by the profile."""
        await asyncio.sleep(share * self.profile.switch.generator_learner / self.config.twin.speed)

    def _live(self) -> TwinRank:
        if self._rank is None:
            raise RuntimeError(f"learner rank {self.number} has not joined a group")
        return self._rank

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
