"""The learner group as one thing: all ranks step together or the group is rebuilt.

No surgery on a live mesh: when a rank dies or hangs, every rank's process is replaced, a new
process group is formed and the newest valid checkpoint is loaded. Resizing is the same with other ranks:
the state is gathered on the CPU, fresh processes form a group of the new size, and each takes its
shard; a checkpoint is the other way there.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cluster.config import Config
from cluster.errors import LearnerLost
from cluster.types import Weights
from learner.state import Gathered, Resized, State

T = TypeVar("T")

INFO_DEADLINE_S = 15.0
Watch = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
"""Runs a call on the present ranks; raises LearnerLost at once when one of them is known to be gone."""
FRESH, UNUSABLE = -1, -2
"""Versions of a process that may join a group, and of one whose only try is under way or failed."""


async def _unwatched(call: Coroutine[Any, Any, Any]) -> Any:
    """Nobody knows more than the ranks themselves."""
    return await call


class RankPort(Protocol):
    """One learner rank, wherever it runs. Its place in a group is given by ``join``, not by its name."""

    async def ready(self) -> bool:
        """It exists and can join."""

    async def address(self) -> tuple[str, int]:
        """Host and a free port for the process group's rendezvous (asked of the group's first rank)."""

    async def info(self) -> tuple[str, int]:
        """(process instance, version; FRESH before ``join``, UNUSABLE until that has succeeded)."""

    async def place(self) -> tuple[str, int, int]:
        """("host:port" of the process group, rank, world); ("", 0, 0) before ``join``."""

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        """Form the process group as ``rank`` of ``world``, load ``checkpoint`` ("" = initial weights).

        Returns the version. Once per process.
        """

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        """One optimizer step; returns metrics, equal on all ranks but for ``busy`` and ``spent``.

        ``busy`` is (start, end) in seconds since the epoch; ``spent`` has this rank's seconds by what it
        did: train, signal (waited for scores); score, swap and load (when it scored itself). ``signal``
        is a ``learner.late.Late`` or None.
        """

    async def offer(self, scored: Any) -> None:
        """Scores (``learner.late.Scored``) for the step that is under way or comes next."""

    async def publish(self) -> Weights | None:
        """Gather and write the weights; the handle on rank 0, None elsewhere."""

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint of the current version."""

    async def gather(self) -> Gathered:
        """Whole state to the CPU of rank 0. Collective."""

    async def part(self, index: int) -> Any:
        """A reference to one part of what rank 0 gathered; it outlives the process."""

    async def adopt(self, state: State) -> int:
        """After ``join``: take this rank's shard of a gathered state; returns the version."""

    async def replace(self) -> None:
        """End the process; its supervisor starts another under the same handle."""


class LearnerGroup:
    """The ranks of one world behind one interface. Every method has a deadline.

    ``numbers`` are the ranks' numbers in the cluster (default 0..N-1); ``ranks[i]`` has place ``i`` in the
    process group.
    """

    def __init__(
        self,
        config: Config,
        ranks: Sequence[RankPort],
        checkpoints: Path,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.ranks = list(ranks)
        self.numbers = list(range(len(ranks)) if numbers is None else numbers)
        self.checkpoints = checkpoints
        self.restarts = 0

    async def versions(self) -> set[int]:
        """Versions the ranks hold now (negative: not joined); empty if one cannot be reached."""
        try:
            infos = await self._all([rank.info() for rank in self.ranks], INFO_DEADLINE_S)
        except LearnerLost:
            return set()
        return {version for _, version in infos}

    async def whole(self) -> bool:
        """The ranks stand in one process group, each in its place, and nobody else does."""
        try:
            places = await self._all([rank.place() for rank in self.ranks], INFO_DEADLINE_S)
        except LearnerLost:
            return False
        world = len(self.ranks)
        expected = [(places[0][0], rank, world) for rank in range(world)]
        return bool(places[0][0]) and places == expected

    def assign(self, ranks: Sequence[RankPort], numbers: Sequence[int]) -> None:
        """These ranks are the group from now on; ``form`` must follow."""
        if not ranks or len(ranks) != len(numbers):
            raise ValueError(f"{len(ranks)} ranks with numbers {list(numbers)}: needs one each, at least one")
        self.ranks, self.numbers = list(ranks), list(numbers)

    async def form(self, checkpoint: str) -> int:
        """Join fresh processes in one process group, from a checkpoint folder or from scratch."""
        timeout = self.config.learner.start_timeout_s
        await self._freshen(timeout)
        host, port = (await self._all([self.ranks[0].address()], timeout))[0]
        world = len(self.ranks)
        calls = [r.join(host, port, checkpoint, place, world) for place, r in enumerate(self.ranks)]
        return _same(await self._all(calls, timeout), "joined")

    async def resize(
        self,
        ranks: Sequence[RankPort],
        numbers: Sequence[int],
        save: Callable[[], Awaitable[str]],
        watch: Watch = _unwatched,
    ) -> Resized:
        """Make ``ranks`` the group, with the state that the present one has.

        Through memory; if gathering fails (or ``elastic.resize`` says so) through the checkpoint
        that ``save`` writes, whose folder it returns. If the new group does not form, the old one is formed
        again. Raises LearnerLost when that fails too, or when the old group dies while it hands over.
        """
        begun = time.monotonic()
        old_ranks, old_numbers = self.ranks, self.numbers
        parts: dict[str, float] = {}
        source = await watch(self._hand_over(parts, save))
        error = ""
        try:
            self.assign(ranks, numbers)
            await watch(self._take_over(source, parts))
        except LearnerLost as failure:
            error = str(failure)
            self.assign(old_ranks, old_numbers)
            await watch(self._take_over(source, parts))
        rest = [r for r in (*old_ranks, *ranks) if r not in self.ranks]
        await asyncio.gather(*(self._retire(rank) for rank in rest))
        parts["total"] = time.monotonic() - begun
        return Resized(not error, parts, error)

    async def gather(self) -> State:
        """The whole state on the CPU, by reference."""
        timeout = self.config.learner.step_timeout_s
        told = await self._all([rank.gather() for rank in self.ranks], timeout)
        _same([one.version for one in told], "gathered")
        chief = told[0]
        parts = [
            (await self._all([self.ranks[0].part(index)], timeout))[0] for index in range(chief.parts)
        ]
        random = tuple(one.random for one in told)
        return State(chief.version, chief.skipped, random, parts, chief.nbytes)

    async def _hand_over(
        self, parts: dict[str, float], save: Callable[[], Awaitable[str]]
    ) -> State | str:
        """The state in memory, or the folder of a checkpoint of it."""
        begun = time.monotonic()
        if self.config.elastic.resize == "memory":
            try:
                state = await self.gather()
                parts["gather"] = time.monotonic() - begun
                return state
            except LearnerLost as error:
                parts["gather_failed"] = time.monotonic() - begun
                try:
                    return await self._saved(parts, save)
                except LearnerLost:
                    raise error from None  # the ranks are gone: that is the cause, not the saving
        return await self._saved(parts, save)

    async def _saved(self, parts: dict[str, float], save: Callable[[], Awaitable[str]]) -> str:
        begun = time.monotonic()
        folder = await save()
        parts["save"] = time.monotonic() - begun
        return folder

    async def _take_over(self, source: State | str, parts: dict[str, float]) -> None:
        """Form the present ranks and give them the state."""
        begun = time.monotonic()
        await self.form(source if isinstance(source, str) else "")
        formed = time.monotonic()
        parts["regroup"] = parts.get("regroup", 0.0) + formed - begun  # with loading, from a checkpoint
        if isinstance(source, State):
            timeout = self.config.learner.step_timeout_s
            versions = await self._all([rank.adopt(source) for rank in self.ranks], timeout)
            if _same(versions, "adopted") != source.version:
                raise LearnerLost(f"ranks adopted version {versions[0]} instead of {source.version}")
            parts["reshard"] = parts.get("reshard", 0.0) + time.monotonic() - formed

    async def _retire(self, rank: RankPort) -> None:
        """A rank that left gives its memory back: a fresh process waits in its place."""
        info = await self._info(rank)
        if info is not None and info[1] != FRESH:
            await self._replace(rank)

    async def _replace(self, rank: RankPort) -> None:
        """Tell its process to end; whether it has is seen by asking it who it is."""
        with contextlib.suppress(LearnerLost):
            await self._all([rank.replace()], INFO_DEADLINE_S)

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
                    await self._replace(rank)
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
        """All ranks train ``step``; raises LearnerLost as soon as one fails.

        ``spent`` in the answer adds up the ranks' seconds by name.
        """
        calls = [
            rank.step(batch, signal, step)
            for rank, batch, signal in zip(self.ranks, batches, signals, strict=True)
        ]
        told = await self._all(calls, self.config.learner.step_timeout_s)
        spent: dict[str, float] = {}
        for one in told:
            for name, seconds in one.get("spent", {}).items():
                spent[name] = spent.get(name, 0.0) + seconds
        return {**told[0], "spent": spent}

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
        try:
            done, pending = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()  # those that have not ended
        failed = {tasks.index(task): error for task in done if (error := _error_of(task)) is not None}
        if failed:
            rank, error = min(failed.items())
            raise LearnerLost(f"learner rank {rank}: {type(error).__name__}: {error}") from error
        if pending:
            raise LearnerLost(f"{len(pending)} learner ranks did not answer within {timeout:.0f} s")
        return [task.result() for task in tasks]


def _error_of(task: "asyncio.Future[T]") -> BaseException | None:
    """Why a call failed; one that somebody cancelled has failed, too: who waits for it goes on."""
    return ConnectionError("the call was cancelled") if task.cancelled() else task.exception()


def _same(versions: Sequence[int], verb: str) -> int:
    """The version that all ranks name. Raises LearnerLost if they differ."""
    if len(set(versions)) != 1:
        raise LearnerLost(f"ranks {verb} at different versions: {list(versions)}")
    return versions[0]
