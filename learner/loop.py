"""The training loop, as it is driven in the feeder's process.

::

    form (waits for ready groups) -> plan (step log) -> ranks step -> commit (one atomic move)
         -> publish weights -> tell the controller -> checkpoint now and then -> release payloads

A step is logged before the update and committed after all ranks have reported, so whatever dies in
between is repaired by doing the logged step again: a rank that has applied it already answers
from memory, a rebuilt learner group starts at the newest valid checkpoint and re-executes the
log from there. Payloads are released only up to the checkpoint *before* the newest one, so that
a damaged newest checkpoint costs time and nothing else.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cluster.config import Config
from cluster.errors import CheckpointDamaged, LearnerLost
from cluster.messages import Published
from cluster.ports import Queue
from cluster.types import Group, StepRecord
from learner.feed import Batch, Feed
from learner.form import Formed, build
from learner.group import LearnerGroup

MAX_REBUILDS_IN_A_ROW = 5
T = TypeVar("T")


class ControllerPort(Protocol):
    """What the loop tells and asks the controller."""

    async def publish(self, published: Published) -> None:
        """New weights exist."""

    async def closed(self, groups: list[str]) -> None:
        """These groups ended without training."""

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """Hand over the step's record; get the rollout side's facts of the step."""


class Effects(Protocol):
    """Where batches, signals and records go; Ray and files live behind it."""

    def share(self, formed: Formed) -> tuple[Sequence[Any], Sequence[Any]]:
        """Per rank: the batch (by reference) and the late signal (a reference, or None)."""

    def checkpoint(self) -> tuple[str, int]:
        """Newest valid checkpoint folder and its step; ("", 0) for the initial weights."""

    def covered(self) -> int:
        """Step up to which payloads may be released: the oldest kept valid checkpoint's."""

    def recorded(self, record: StepRecord, groups: Sequence[Group], metrics: dict[str, Any]) -> None:
        """Keep what a replay needs, if the run is recorded."""

    def measured(self, step: int, metrics: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write the step's metrics."""

    def trace(self, event: str, fields: dict[str, Any]) -> None:
        """One line of the event trace."""


@dataclass
class _Timing:
    waited_s: float
    step_s: float
    publish_s: float


class TrainLoop:
    """Owns the order of things in a step and the repair of a broken one."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        feed: Feed,
        group: LearnerGroup,
        controller: ControllerPort,
        effects: Effects,
    ) -> None:
        self.config = config
        self.queue = queue
        self.feed = feed
        self.group = group
        self.controller = controller
        self.effects = effects
        self.version = 0
        self._rebuilds = 0

    async def run(self) -> int:
        """Train until ``run.steps`` versions are committed; returns the version."""
        planned = await self._recover()
        while self.version < self.config.run.steps:
            if planned is not None:
                batch, planned = planned, None
            else:
                batch = await self.feed.form(self.version)
                await self.queue.plan(batch.record)
            await self._train(batch)
        return self.version

    # -- one step -----------------------------------------------------------------------

    async def _train(self, batch: Batch) -> None:
        record = batch.record
        self.effects.trace("train", {"step": record.step, "groups": list(record.groups)})
        begun = time.monotonic()
        formed = build(batch.groups, self.config, len(self.group.ranks))
        batches, signals = self.effects.share(formed)
        metrics = await self._sturdy(
            lambda: self.group.step(batches, signals, record.step), record.step - 1
        )
        trained = time.monotonic()
        # Before the commit: a committed step is never made again, so its record could not be either.
        self.effects.recorded(record, batch.groups, {**formed.metrics, **metrics})
        await self.queue.commit(record)
        self.version = record.step
        self.effects.trace("trained", {"step": record.step})
        await self._publish()
        timing = _Timing(batch.waited_s, trained - begun, time.monotonic() - trained)
        await self._measure(batch, formed, metrics, timing)
        await self._checkpoint_if_due()

    async def _publish(self) -> None:
        begun = time.monotonic()
        weights = await self._sturdy(self.group.publish, self.version)
        spent = time.monotonic() - begun
        await self.controller.publish(Published(weights=weights, step=self.version, publish_s=spent))

    async def _checkpoint_if_due(self) -> None:
        step, run = self.version, self.config.run
        due = step > 0 and (step % run.checkpoint_every == 0 or step == run.steps)
        if due and self.effects.checkpoint()[1] < step:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        ledger = await self.queue.ledger()
        extra = {"step": self.version, "ledger": ledger.admitted}
        await self._sturdy(lambda: self.group.save(self.version, extra), self.version)
        released = await self.queue.release(self.effects.covered())
        self.effects.trace("checkpoint", {"step": self.version, "released": released})

    async def _measure(
        self, batch: Batch, formed: Formed, metrics: dict[str, Any], timing: _Timing
    ) -> None:
        record = batch.record
        merged = {
            **formed.metrics,
            **metrics,
            "lag_mean": sum(record.lags) / len(record.lags),
            "lag_max": max(record.lags),
            "lag_hist": {str(n): record.lags.count(n) for n in sorted(set(record.lags))},
            "version": record.step,
            "wait_twt_s": {"data": batch.waited_s, "publish": timing.publish_s},
            "step_s": timing.step_s,
            "ready_ras": batch.ready_at_start,
            "ready_tprm_s": batch.mean_gap_s,
            "ready_head_age_s": batch.head_age_s,
            "ready_depth": self.feed.depth(),
            "mixed_versions": formed.versions_mixed,
            "row_tokens": formed.plan.tokens,
            "trained_tokens": formed.plan.trained_tokens,
        }
        facts = await self.controller.step_facts({"step": record.step, **merged})
        self.effects.measured(record.step, merged, facts)

    # -- repair -------------------------------------------------------------------------

    async def _sturdy(self, call: Callable[[], Awaitable[T]], version: int) -> T:
        """``call`` on the learner group; when it is lost, rebuild it at ``version`` and call again."""
        while True:
            try:
                result = await call()
                self._rebuilds = 0
                return result
            except LearnerLost as error:
                self._rebuilds += 1
                self.effects.trace("learner_lost", {"error": str(error)[:500], "version": version})
                if self._rebuilds > MAX_REBUILDS_IN_A_ROW:
                    raise
                await self._rebuild(version)

    async def _rebuild(self, version: int) -> None:
        """Newest valid checkpoint, then the committed log after it, up to ``version``."""
        while True:
            folder, step = self.effects.checkpoint()
            if step > version:
                raise CheckpointDamaged(f"checkpoint {folder} is ahead of committed version {version}")
            try:
                reached = await self.group.form(folder)
                await self._execute_log(reached, version)
                return
            except LearnerLost as error:
                self._rebuilds += 1
                self.effects.trace("learner_lost", {"error": str(error)[:500], "version": version})
                if self._rebuilds > MAX_REBUILDS_IN_A_ROW:
                    raise

    async def _execute_log(self, reached: int, version: int) -> None:
        records = {r.step: r for r in await self.queue.steps(reached) if r.step <= version}
        for step in range(reached + 1, version + 1):
            if step not in records:
                raise CheckpointDamaged(
                    f"cannot resume: step {step} is neither in a checkpoint nor in the step log"
                )
            groups = await self.queue.load(list(records[step].groups))
            formed = build(groups, self.config, len(self.group.ranks))
            batches, signals = self.effects.share(formed)
            await self.group.step(batches, signals, step)
            self.effects.trace("executed_again", {"step": step})

    async def _recover(self) -> Batch | None:
        """Find where the run stands; returns a step that was logged but not committed."""
        _, checkpoint_step = self.effects.checkpoint()
        log = await self.queue.steps(0)
        self.version = max((r.step for r in log if r.committed), default=checkpoint_step)
        planned = next((r for r in log if r.step == self.version + 1 and not r.committed), None)
        held = await self.group.versions()
        usable = {self.version} | ({self.version + 1} if planned else set())
        if len(held) != 1 or not held <= usable:
            await self._rebuild(self.version)
        await self._publish_recovered(held)
        await self.feed.start(set(planned.groups) if planned else set())
        if planned is None:
            await self._checkpoint_if_due()  # an earlier process may have died before it
            return None
        groups = tuple(await self.queue.load(list(planned.groups)))
        return Batch(planned, groups, 0.0, len(groups), 0.0, 0.0)

    async def _publish_recovered(self, held: set[int]) -> None:
        """Generators must be able to fetch the committed version, unless ranks are a step ahead."""
        if self.version > 0 and held != {self.version + 1}:
            await self._publish()
