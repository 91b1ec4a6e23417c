"""The training loop, as it is driven in the feeder's process.

::

    form (waits for ready groups) -> plan (step log) -> ranks step -> commit (one atomic move)
         -> barrier (roles change here, if at all) -> publish weights -> tell the controller
         -> checkpoint now and then -> release payloads

A step is logged before the update and committed after all ranks have reported, so whatever dies in
between is repaired by doing the logged step again (learner/keeper.py): a rank that has applied it
already answers from memory, a rebuilt learner group starts at the newest valid checkpoint and
re-executes the log from there. Payloads are released only up to the checkpoint *before* the newest
one, so that a damaged newest checkpoint costs time and nothing else.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.config import Config
from cluster.errors import LearnerLost
from cluster.messages import Barrier, Move, Moved, Published, Roles
from cluster.ports import Queue
from learner.feed import Batch, Feed
from learner.form import Formed
from learner.group import LearnerGroup, RankPort
from learner.keeper import Keeper
from learner.pace import StepFacts, holders
from learner.ports import ControllerPort, Effects
from learner.scoring import Scoring
from learner.state import Resized


@dataclass
class _Timing:
    step_s: float
    barrier_s: float
    publish_s: float


class TrainLoop:
    """Owns the order of things in a step, at the barrier after it, and at a restart."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        feed: Feed,
        group: LearnerGroup,
        controller: ControllerPort,
        effects: Effects,
        scoring: Scoring,
        port_of: Callable[[int], RankPort],
    ) -> None:
        self.config = config
        self.queue = queue
        self.feed = feed
        self.group = group
        self.controller = controller
        self.effects = effects
        self.scoring = scoring
        self.keeper = Keeper(config, queue, group, controller, effects, scoring, port_of)
        self.version = 0
        self.facts = StepFacts(config)
        self._least = 0  # groups that the next batch needs; 0: run.groups_per_step

    async def run(self) -> int:
        """Train until ``run.steps`` versions are committed; returns the version."""
        planned = await self._recover()
        while self.version < self.config.run.steps:
            if planned is not None:
                batch, planned = planned, None
            else:
                batch = await self._next_batch()
                await self.queue.plan(batch.record)
            await self._train(batch)
        return self.version

    async def _next_batch(self) -> Batch:
        """Wait for one. Without a generator none comes: then the barrier gives a rank of ours away first."""
        begun = time.monotonic()
        while True:
            pace = self.facts.pace()
            batch = await self.feed.form(self.version, self._least, pace, self._called, begun)
            if batch is not None:
                return batch
            await self._barrier()

    async def _called(self) -> bool:
        return (await self.controller.roles()).awaited

    # -- one step -----------------------------------------------------------------------

    async def _train(self, batch: Batch) -> None:
        record = batch.record
        self.effects.trace("train", {"step": record.step, "groups": list(record.groups)})
        begun = time.monotonic()
        formed, metrics = await self.keeper.sturdy(
            partial(self.keeper.train, batch.groups, record.step), record.step - 1
        )
        trained = time.monotonic()
        # Before the commit: a committed step is never made again, so its record could not be either.
        self.effects.recorded(record, batch.groups, {**formed.metrics, **metrics})
        await self.queue.commit(record)
        self.version = record.step
        self.effects.trace("trained", {"step": record.step})
        scored = self.scoring.take_spent()
        self.facts.committed(batch, formed, metrics, scored, self.feed.depth(), time.monotonic())
        await self._barrier()
        moved = time.monotonic()
        await self._publish()
        self.scoring.forget(record.groups)
        timing = _Timing(trained - begun, moved - trained, time.monotonic() - moved)
        self.facts.published(timing.publish_s)
        await self._measure(batch, formed, metrics, timing)
        await self._checkpoint_if_due()

    # -- the barrier --------------------------------------------------------------------

    async def _barrier(self) -> None:
        """Ask what may change, make the learner's part of it, say how it went."""
        facts = {"step": self.version, **self.facts.told(len(self.group.ranks), self.scoring)}
        barrier = await self.controller.barrier(facts)
        self._least = barrier.groups
        resized = await self._resize_if_asked(barrier)
        if resized is None:  # what became of the roles is for the controller to say
            self._assign_scorers(await self.controller.roles(), barrier.scoring)
        else:
            self._assign_scorers(barrier.roles, barrier.scoring, barrier.move, resized.ok)

    def _assign_scorers(self, roles: Roles, mode: str, move: Move | None = None, moved: bool = False) -> None:
        if roles.ranks:
            self.scoring.assign(holders(roles, "scorer", move, moved), mode)
        else:
            self.scoring.assign(self.scoring.scorers, mode)

    async def _resize_if_asked(self, barrier: Barrier) -> Resized | None:
        """Make the group that the barrier wants. None when it had to be rebuilt from a checkpoint."""
        roles, move = barrier.roles, barrier.move
        lost = {row.rank for row in roles.ranks if row.lost}
        wanted = holders(roles, "learner", move, True)
        resized: Resized | None = Resized(True, {})
        if wanted and wanted != self.group.numbers:
            try:
                if lost & set(self.group.numbers):
                    raise LearnerLost(f"ranks {sorted(lost & set(self.group.numbers))} are gone")
                resized = await self.keeper.resize(wanted, self.version)
                self.facts.switched(resized.parts)
            except LearnerLost as error:
                resized = None
                if move is not None:  # before the rebuild: it asks whose ranks there are
                    await self.controller.moved(Moved(move=move.id, ok=False, error=str(error)[:500]))
                await self.keeper.lost(error, self.version)
        if move is not None and resized is not None:
            told = Moved(move=move.id, ok=resized.ok, parts=resized.parts, error=resized.error[:500])
            await self.controller.moved(told)
        return resized

    async def _publish(self) -> None:
        begun = time.monotonic()
        weights = await self.keeper.sturdy(self.group.publish, self.version)
        spent = time.monotonic() - begun
        await self.controller.publish(Published(weights=weights, step=self.version, publish_s=spent))

    async def _checkpoint_if_due(self) -> None:
        step, run = self.version, self.config.run
        due = step > 0 and (step % run.checkpoint_every == 0 or step == run.steps)
        if due and self.effects.checkpoint()[1] < step:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        extra = await self.keeper.extra(self.version)
        await self.keeper.sturdy(lambda: self.group.save(self.version, extra), self.version)
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
            "wait_twt_s": {
                "data": batch.waited_s,
                "signal": self.facts.signal_wait_s,
                "barrier": timing.barrier_s,
                "publish": timing.publish_s,
            },
            "step_s": timing.step_s,
            "ready_ras": batch.ras,
            "ready_tprm_s": batch.tprm_s,
            "ready_head_age_s": batch.head_age_s,
            "ready_depth": self.feed.depth(),
            "mixed_versions": formed.versions_mixed,
            "row_tokens": formed.plan.tokens,
            "scorer_busy_s": self.facts.scorer_busy_s,
            "trained_tokens": formed.plan.trained_tokens,
        }
        facts = await self.controller.step_facts({"step": record.step, **merged})
        self.effects.measured(record.step, merged, facts)

    # -- a restart ----------------------------------------------------------------------

    async def _recover(self) -> Batch | None:
        """Find where the run stands; returns a step that was logged but not committed."""
        _, checkpoint_step = self.effects.checkpoint()
        log = await self.queue.steps(0)
        self.version = max((r.step for r in log if r.committed), default=checkpoint_step)
        planned = next((r for r in log if r.step == self.version + 1 and not r.committed), None)
        self._assign_scorers(await self.controller.roles(), self.scoring.mode)
        await self.keeper.seat()
        held = await self.group.versions() if await self.group.whole() else set()
        usable = {self.version} | ({self.version + 1} if planned else set())
        if len(held) != 1 or not held <= usable:
            await self.keeper.rebuild(self.version)
        await self._publish_recovered(held)
        await self.feed.start(set(planned.groups) if planned else set())
        if planned is None:
            await self._checkpoint_if_due()  # an earlier process may have died before it
            return None
        groups = tuple(await self.queue.load(list(planned.groups)))
        return Batch(planned, groups)

    async def _publish_recovered(self, held: set[int]) -> None:
        """Generators must be able to fetch the committed version, unless ranks are a step ahead."""
        if self.version > 0 and held != {self.version + 1}:
            await self._publish()
