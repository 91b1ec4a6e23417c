"""The learner group as one thing: all ranks step together or the group is rebuilt.

No surgery on a live mesh: when a rank dies or hangs, every rank's process is replaced, a new
process group is formed and the newest valid checkpoint is loaded.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cluster.config import Config
from cluster.errors import LearnerLost
from cluster.types import Weights

T = TypeVar("T")

INFO_DEADLINE_S = 15.0
FRESH, UNUSABLE = -1, -2
"""Versions of a process that may join a group, and of one whose only try is under way or failed."""


class RankPort(Protocol):
    """One learner rank, wherever it runs."""

    async def address(self) -> tuple[str, int]:
        """Host and a free port for the process group's rendezvous (asked of rank 0)."""

    async def info(self) -> tuple[str, int]:
        """(process instance, version; FRESH before ``join``, UNUSABLE until that has succeeded)."""

    async def join(self, host: str, port: int, checkpoint: str) -> int:
        """Form the process group, load ``checkpoint`` ("" = initial weights); returns the version."""

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        """One optimizer step; returns metrics (equal on all ranks)."""

    async def publish(self) -> Weights | None:
        """Gather and write the weights; the handle on rank 0, None elsewhere."""

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint of the current version."""

    async def replace(self) -> None:
        """End the process; its supervisor starts another under the same handle."""


class LearnerGroup:
    """Ranks 0..N-1 behind one interface. Every method has a deadline."""

    def __init__(self, config: Config, ranks: Sequence[RankPort], checkpoints: Path) -> None:
        self.config = config
        self.ranks = ranks
        self.checkpoints = checkpoints
        self.restarts = 0

    async def versions(self) -> set[int]:
        """Versions the ranks hold now (negative: not joined); empty if one cannot be reached."""
        try:
            infos = await self._all([rank.info() for rank in self.ranks], INFO_DEADLINE_S)
        except LearnerLost:
            return set()
        return {version for _, version in infos}

    async def form(self, checkpoint: str) -> int:
        """Join fresh processes in one process group, from a checkpoint folder or from scratch."""
        timeout = self.config.learner.start_timeout_s
        await self._freshen(timeout)
        host, port = (await self._all([self.ranks[0].address()], timeout))[0]
        joined = await self._all([r.join(host, port, checkpoint) for r in self.ranks], timeout)
        if len(set(joined)) != 1:
            raise LearnerLost(f"ranks joined at different versions: {joined}")
        return joined[0]

    async def _freshen(self, timeout: float) -> None:
        """End every process that has joined a group before; wait until each rank is a fresh one.

        A process that was told to end still answers for a moment, so processes are told apart by
        their instance.
        """
        self.restarts += 1
        ended: set[str] = set()
        deadline = time.monotonic() + timeout
        while True:
            infos = await asyncio.gather(*(self._info(rank) for rank in self.ranks))
            if all(info is not None and info[1] == FRESH and info[0] not in ended for info in infos):
                return
            for rank, info in zip(self.ranks, infos, strict=True):
                if info is not None and info[1] != FRESH and info[0] not in ended:
                    ended.add(info[0])
                    await asyncio.gather(rank.replace(), return_exceptions=True)
            if time.monotonic() > deadline:
                raise LearnerLost(f"learner ranks did not come back within {timeout:.0f} s")
            await asyncio.sleep(0.3)

    async def _info(self, rank: RankPort) -> tuple[str, int] | None:
        """A rank's instance and version; None while its process is starting or gone."""
        try:
            return (await self._all([rank.info()], INFO_DEADLINE_S))[0]
        except LearnerLost:
            return None

    async def step(self, batches: Sequence[Any], signals: Sequence[Any], step: int) -> dict[str, Any]:
        """All ranks train ``step``; raises LearnerLost as soon as one fails."""
        calls = [
            rank.step(batch, signal, step)
            for rank, batch, signal in zip(self.ranks, batches, signals, strict=True)
        ]
        return (await self._all(calls, self.config.learner.step_timeout_s))[0]

    async def publish(self) -> Weights:
        """Weights of the current version, written where generators can fetch them."""
        calls = [rank.publish() for rank in self.ranks]
        handles = await self._all(calls, self.config.learner.step_timeout_s)
        weights = handles[0]
        if weights is None:
            raise LearnerLost("rank 0 published no weights")
        return weights

    async def save(self, step: int, extra: dict[str, Any]) -> str:
        """Write the checkpoint of ``step``; returns its folder."""
        folder = str(self.checkpoints)
        calls = [rank.save(folder, extra) for rank in self.ranks]
        await self._all(calls, self.config.learner.step_timeout_s)
        return folder

    async def _all(self, calls: Sequence[Awaitable[T]], timeout: float) -> list[T]:
        """Results in order; the first failure or the deadline becomes LearnerLost."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, pending = await asyncio.wait(
            tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in pending:
            task.cancel()
        failed = next((t for t in done if t.exception() is not None), None)
        if failed is not None:
            rank = tasks.index(failed)
            error = failed.exception()
            raise LearnerLost(f"learner rank {rank}: {type(error).__name__}: {error}") from error
        if pending:
            raise LearnerLost(f"{len(pending)} learner ranks did not answer within {timeout:.0f} s")
        return [task.result() for task in tasks]
