"""Ray shell of the feeder: drives the learner ranks and the scorers by reference. Imports no torch."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from cluster import codec
from cluster.config import Config, build
from cluster.messages import Barrier, Moved, Published, Roles
from cluster.processes import announce, sole
from cluster.roles import member_name
from cluster.stream import RedisQueue
from cluster.trace import Trace
from cluster.types import Group, StepRecord, Weights
from learner.batch import RankBatch
from learner.feed import Feed
from learner.form import Formed
from learner.group import LearnerGroup, RankPort
from learner.late import Key, Scored
from learner.loop import TrainLoop
from learner.manifest import covered_step, latest_valid, step_of
from learner.measure import Measure
from learner.record import write_step
from learner.scoring import Scoring
from learner.segments import Ask, Told
from learner.state import Gathered, State

CONTROLLER_DEADLINE_S = 60.0
PART_DEADLINE_S = 600.0


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
        learners, scorers = Members("learner", config), Members("scorer", config)
        queue = RedisQueue(self.url, prefix=config.queue.prefix, run=self.folder["run"].name)
        trace = Trace(self.folder["trace"], "feeder")
        port = _ControllerPort(self.controller)
        scoring = Scoring(config, lambda rank: _Scorer(scorers, rank), trace)
        first = config.learner.ranks + config.generator.replicas
        scoring.assign(range(first, first + config.scorer.replicas))

        async def dropped(groups: list[str]) -> None:
            scoring.forget(groups)
            await port.closed(groups)

        ports: dict[int, RankPort] = {}

        def rank_of(number: int) -> RankPort:
            return ports.setdefault(number, _Rank(learners, number))

        scoring.listen(queue)
        feed = Feed(config, queue, "feeder", dropped, trace, scoring.arrived)
        ranks = [rank_of(i) for i in range(config.learner.ranks)]
        group = LearnerGroup(config, ranks, self.folder["checkpoints"])
        effects = _Effects(self, trace)
        loop = TrainLoop(config, queue, feed, group, port, effects, scoring, rank_of)
        try:
            return await loop.run()
        finally:
            await feed.stop()
            await scoring.stop()
            effects.measure.close()
            trace.close()
            await queue.aclose()

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()


class Members:
    """One role's actors by rank number, looked up by name when first needed: some are created later.

    A handle that answers with its actor's death is looked up anew: another actor may bear the name by then.
    """

    def __init__(self, role: str, config: Config) -> None:
        self._role = role
        self._config = config
        self._handles: dict[int, Any] = {}

    def start(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of the actor on ``rank``; a reference. Raises ValueError if there is no actor."""
        return getattr(self._handle(rank), method).remote(*arguments)

    def end(self, rank: int) -> None:
        """End the actor's process, even if it hangs; Ray starts another. ValueError if there is no actor."""
        ray.kill(self._handle(rank), no_restart=False)

    def _handle(self, rank: int) -> Any:
        if rank not in self._handles:
            self._handles[rank] = ray.get_actor(member_name(self._role, rank, self._config))
        return self._handles[rank]

    async def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """The answer of ``start``."""
        try:
            return await self.start(rank, method, *arguments)
        except RayActorError:
            self._handles.pop(rank, None)
            raise


class _Effects:
    """Ray references and files behind ``learner.ports.Effects``."""

    def __init__(self, feeder: FeederActor, trace: Trace) -> None:
        self._feeder = feeder
        self._config = feeder.config
        self.trace = trace
        self.measure = Measure(feeder.config, feeder.folder["metrics"])
        self._exporting: Any = None  # the last step's metrics on their way to Ray

    def share(self, formed: Formed) -> Sequence[Any]:
        """Batches go to the object store once."""
        return [ray.put(batch) for batch in formed.plan.ranks]

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
    """A learner actor as ``learner.group.RankPort``."""

    def __init__(self, members: Members, number: int) -> None:
        self._members = members
        self._number = number

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._members.call(self._number, method, *arguments)

    async def ready(self) -> bool:
        return bool(await self._call("ready"))

    async def address(self) -> tuple[str, int]:
        host, port = await self._call("address")
        return host, port

    async def info(self) -> tuple[str, int]:
        instance, version = await self._call("info")
        return instance, version

    async def place(self) -> tuple[str, int, int]:
        address, rank, world = await self._call("place")
        return address, rank, world

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        version: int = await self._call("join", host, port, checkpoint, rank, world)
        return version

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        metrics: dict[str, Any] = await self._call("step", batch, signal, step)
        return metrics

    async def offer(self, scored: Any) -> None:
        await self._call("offer", scored)

    async def publish(self) -> Weights | None:
        weights: Weights | None = await self._call("publish")
        return weights

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        await self._call("save", folder, extra)

    async def gather(self) -> Gathered:
        gathered: Gathered = await self._call("gather")
        return gathered

    async def part(self, index: int) -> Any:
        """The feeder owns the reference, so the part stays when the process that made it ends."""
        reference = self._members.start(self._number, "part", index)
        ready, _ = await asyncio.to_thread(
            ray.wait, [reference], timeout=PART_DEADLINE_S, fetch_local=False
        )
        if not ready:
            raise TimeoutError(f"part {index} of the state was not stored within {PART_DEADLINE_S:.0f} s")
        return reference

    async def adopt(self, state: State) -> int:
        version: int = await self._call("adopt", state)
        return version

    async def replace(self) -> None:
        await self._call("replace")


class _Scorer:
    """A scorer actor as ``learner.scoring.ScorerPort``."""

    def __init__(self, members: Members, number: int) -> None:
        self._members = members
        self._number = number

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        scored: Scored = await self._members.call(self._number, "score", batch, keys)
        return scored

    async def restart(self) -> None:
        self._members.end(self._number)

    async def score_segments(self, asks: Sequence[Ask], done: Sequence[str]) -> Told:
        told: Told = await self._members.call(self._number, "score_segments", asks, done)
        return told


class _ControllerPort:
    """The controller's handle as ``learner.ports.ControllerPort``; outlives its restarts."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def publish(self, published: Published) -> None:
        await self._patiently(lambda: self._handle.publish.remote(codec.encode(published)))

    async def closed(self, groups: list[str]) -> None:
        await self._patiently(lambda: self._handle.closed.remote(groups))

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        facts: dict[str, Any] = await self._patiently(lambda: self._handle.step_facts.remote(record))
        return facts

    async def barrier(self, facts: dict[str, Any]) -> Barrier:
        return codec.decode(await self._patiently(lambda: self._handle.barrier.remote(facts)), Barrier)

    async def moved(self, moved: Moved) -> None:
        await self._patiently(lambda: self._handle.moved.remote(codec.encode(moved)))

    async def roles(self) -> Roles:
        return codec.decode(await self._patiently(lambda: self._handle.roles.remote()), Roles)

    async def _patiently(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(CONTROLLER_DEADLINE_S):
            while True:
                try:
                    return await call()
                except RayActorError:
                    await asyncio.sleep(0.3)


RemoteFeeder = ray.remote(FeederActor)
