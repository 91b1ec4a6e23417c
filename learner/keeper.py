"""Keeps a learner group going: trains a step on it, resizes it, and rebuilds it when it is lost.

A rebuilt group starts at the newest valid checkpoint and re-executes the step log from there. Which ranks it
has is asked of the controller each time, so those whose machine is gone are not waited for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from cluster.config import Config
from cluster.errors import CheckpointDamaged, LearnerLost
from cluster.messages import Roles
from cluster.ports import Queue
from cluster.types import Group
from learner.form import Formed, build
from learner.group import LearnerGroup, RankPort
from learner.pace import holders
from learner.ports import ControllerPort, Effects
from learner.scoring import Scoring
from learner.state import Resized

MAX_REBUILDS_IN_A_ROW = 5
ROLES_POLL_S = 1.0
T = TypeVar("T")


class Keeper:
    """The learner group with the means to bring it back."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        group: LearnerGroup,
        controller: ControllerPort,
        effects: Effects,
        scoring: Scoring,
        port_of: Callable[[int], RankPort],
    ) -> None:
        self.config = config
        self.queue = queue
        self.group = group
        self.controller = controller
        self.effects = effects
        self.scoring = scoring
        self.port_of = port_of  # a rank's learner by the rank's number; the same object each time
        self._rebuilds = 0

    async def train(self, groups: Sequence[Group], step: int) -> tuple[Formed, dict[str, Any]]:
        """All ranks of the present world train these groups as ``step``."""
        ranks = list(self.group.ranks)
        order = self.scoring.mode if self.scoring.active else ""
        formed = build(groups, self.config, len(ranks), order)
        late = self.scoring.late(groups, formed.samples)
        stepping = self.group.step(self.effects.share(formed), [late] * len(ranks), step)
        if late is not None and late.mode == "offered":
            metrics = await self._with_scores(stepping, self.scoring.deliver(formed, ranks))
            metrics = {**metrics, "scored_ahead": self.scoring.scored_ahead}
        else:
            metrics = await stepping
        return formed, {**metrics, "learners": len(ranks), "scoring": order}

    async def _with_scores(
        self, stepping: Awaitable[dict[str, Any]], delivering: Awaitable[None]
    ) -> dict[str, Any]:
        """The step, while scores are handed to it. Raises LearnerLost if nobody can score any more.

        Raises what the delivery raised: the step would wait for its scores in vain.
        """
        step, minding = asyncio.ensure_future(stepping), asyncio.create_task(self._mind_scorers())
        delivery = asyncio.ensure_future(delivering)
        try:
            waiting: set[asyncio.Future[Any]] = {step, minding, delivery}
            while not step.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {step}:
                    task.result()
            return step.result()
        finally:
            for task in (step, minding, delivery):
                task.cancel()
            await asyncio.gather(step, minding, delivery, return_exceptions=True)

    async def _mind_scorers(self) -> None:
        """When asking a scorer failed, look who scores now; ends with LearnerLost when nobody does.

        Raises what ended a background task: nobody else would before the rank's deadline.
        """
        seen = self.scoring.failures
        while True:
            await asyncio.sleep(ROLES_POLL_S)
            self.scoring.check()
            if self.scoring.failures == seen:
                continue
            seen = self.scoring.failures
            roles = await self.controller.roles()
            self._assign_scorers(roles)
            if roles.ranks and not self.scoring.scorers:
                raise LearnerLost("the ranks that scored are gone: the step is made again without them")

    def _assign_scorers(self, roles: Roles) -> None:
        scorers = holders(roles, "scorer")
        if roles.ranks and scorers != self.scoring.scorers:
            self.scoring.assign(scorers, self.scoring.mode)

    async def resize(self, numbers: list[int], version: int) -> Resized:
        """Move the state of ``version`` to these ranks, waiting for none that is lost.

        See ``LearnerGroup.resize``.
        """
        self.effects.trace("resize", {"from": self.group.numbers, "to": numbers, "version": version})
        ports = [self.port_of(number) for number in numbers]
        watch = partial(self._watched, gone=lambda roles: {row.rank for row in roles.ranks if row.lost})
        resized = await self.group.resize(ports, numbers, partial(self._saved, version), watch)
        self.effects.trace(
            "resized", {"ranks": self.group.numbers, "parts": resized.parts, "error": resized.error[:500]}
        )
        return resized

    async def _saved(self, version: int) -> str:
        """Folder of a checkpoint of ``version``, written if need be."""
        folder, step = self.effects.checkpoint()
        if step < version or not folder:
            await self.group.save(version, await self.extra(version))
            folder, step = self.effects.checkpoint()
        if step != version:
            raise LearnerLost(f"no checkpoint of version {version}: the newest valid one is of {step}")
        return folder

    async def extra(self, version: int) -> dict[str, Any]:
        """What a checkpoint of ``version`` says beside the state."""
        return {"step": version, "ledger": (await self.queue.ledger()).admitted}

    async def sturdy(self, call: Callable[[], Awaitable[T]], version: int) -> T:
        """``call`` on the learner group; when it is lost, rebuild it at ``version`` and call again."""
        while True:
            try:
                result = await call()
                self._rebuilds = 0
                return result
            except LearnerLost as error:
                await self.lost(error, version)

    async def lost(self, error: LearnerLost, version: int) -> None:
        """The group is lost: rebuild it at ``version``, unless that has been tried too often."""
        self._count(error, version)
        await self.rebuild(version)

    def _count(self, error: LearnerLost, version: int) -> None:
        self._rebuilds += 1
        self.effects.trace("learner_lost", {"error": str(error)[:500], "version": version})
        if self._rebuilds > MAX_REBUILDS_IN_A_ROW:
            raise error

    async def rebuild(self, version: int) -> None:
        """Newest valid checkpoint, then the committed log after it, up to ``version``."""
        while True:
            folder, step = self.effects.checkpoint()
            if step > version:
                raise CheckpointDamaged(f"checkpoint {folder} is ahead of committed version {version}")
            try:
                await self.seat()
                reached = await self._form(folder)
                await self._execute_log(reached, version)
                return
            except LearnerLost as error:
                self._count(error, version)

    async def seat(self) -> None:
        """Give the group the ranks that are learners now, and the scoring those that score."""
        deadline = time.monotonic() + self.config.learner.start_timeout_s
        while (roles := await self.controller.roles()).ranks:
            if numbers := holders(roles, "learner"):
                break
            if time.monotonic() > deadline:
                raise LearnerLost("no rank is a learner any more")
            await asyncio.sleep(ROLES_POLL_S)
        else:
            return
        self._assign_scorers(roles)
        if numbers != self.group.numbers:
            self.effects.trace("seated", {"from": self.group.numbers, "to": numbers})
            self.group.assign([self.port_of(n) for n in numbers], numbers)

    async def _form(self, folder: str) -> int:
        """Form the group of ranks that are learners now."""
        return await self._watched(
            self.group.form(folder), lambda roles: set(self.group.numbers) - set(holders(roles, "learner"))
        )

    async def _watched(self, call: Coroutine[Any, Any, T], gone: Callable[[Roles], set[int]]) -> T:
        """``call``; given up at once if a rank of the group is ``gone`` meanwhile."""
        running = asyncio.create_task(call)
        try:
            while True:
                done, _ = await asyncio.wait({running}, timeout=ROLES_POLL_S)
                if done:
                    return running.result()
                roles = await self.controller.roles()
                if roles.ranks and (missed := sorted(gone(roles) & set(self.group.numbers))):
                    raise LearnerLost(f"ranks {missed} were taken away while the group formed")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _execute_log(self, reached: int, version: int) -> None:
        records = {r.step: r for r in await self.queue.steps(reached) if r.step <= version}
        for step in range(reached + 1, version + 1):
            if step not in records:
                raise CheckpointDamaged(
                    f"cannot resume: step {step} is neither in a checkpoint nor in the step log"
                )
            groups = await self.queue.load(list(records[step].groups))
            await self.train(groups, step)
            self.scoring.forget(records[step].groups)
            self.effects.trace("executed_again", {"step": step})
