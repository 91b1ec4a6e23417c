"""The life of one move, live: planned, its new actor awaited, committed, made, joined, or undone.

Whoever calls holds the lock of ``cluster.elastic.Elastic``, which decides when a move is planned. What is
durable about it is written here: the role map before each effect, the switch ledger after each end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster import codec
from cluster.config import Config
from cluster.fleet import Fleet, Trace
from cluster.messages import Move
from cluster.pipeline import ScoringChooser
from cluster.ports import Queue
from cluster.ranks import Balance, Proposal, RankMachine, Scoring, choose_rank
from cluster.roles import SPARE, RoleMap, member_name
from cluster.sim.profile import SwitchProfile
from cluster.targets import bounds, refilling, switch_costs

PROBE_DEADLINE_S = 10.0  # in the background
AT_ONCE_S = 0.3  # at the barrier, where everybody waits: enough for an actor that is resident and idle

Ready = Callable[[str], Awaitable[bool]]
"""An actor, by name, exists and can take up its role."""


@dataclass
class _Joining:
    """A rank that generates again, but is not yet healthy in the fleet."""

    move: Move
    proposal: Proposal
    name: str
    since: float | None  # commit of the move; None: nobody saw it
    deadline: float


class Moving:
    """The role map and the move under way; every method that changes the map journals first."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        fleet: Fleet,
        trace: Trace,
        ready: Ready,
        costs: Mapping[str, float] | None = None,
        balance: Balance | None = None,
    ) -> None:
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.trace = trace
        self.ready = ready
        self.map = RoleMap()
        known = switch_costs(config, SwitchProfile()) if costs is None else costs
        self.machine = RankMachine(bounds(config), known, balance)
        self._have: set[str] = set()
        self._prepared = -1  # id of the planned move whose actor is ready
        self._chooser = ScoringChooser("colocated" if config.scorer.mode == "colocated" else "decoupled")
        self._proposal: Proposal | None = None  # of the move under way
        self._since: float | None = None  # plan, then commit of the move under way; None: nobody saw it
        self._joining: _Joining | None = None

    def name(self, role: str, rank: int) -> str:
        """See ``roles.member_name``."""
        return member_name(role, rank, self.config)

    def scoring(self) -> str:
        """How the next batch is scored, as far as the roles decide it."""
        return self._scoring_with(self.map)

    def _scoring_with(self, roles: RoleMap) -> Scoring:
        return self._chooser.mode if roles.counts()["scorer"] > 0 else "colocated"

    async def _plan(self, proposal: Proposal) -> None:
        rank = choose_rank(self.map.ranks, proposal.source, proposal.target, self._unhealthy())
        planned = self.map.plan(rank, proposal.target, proposal.reason, proposal.predicted_s, proposal.cost_s)
        assert planned.move is not None
        await self._journal(planned)
        self._proposal = proposal_of(planned.move, proposal.scoring)
        self._since = time.monotonic()
        self._say("move_planned")
        await self._look_at_actor(AT_ONCE_S)

    def _unhealthy(self) -> set[int]:
        """Generators that serve nobody now."""
        healthy = {name for name, slot in self.fleet.slots.items() if slot.healthy}
        return {rank for rank in self.map.of("generator") if self.name("generator", rank) not in healthy}

    def _held(self, move: Move) -> bool:
        """Too few generators are healthy to let this one go."""
        stay = set(self.map.of("generator")) - self._unhealthy() - {move.rank}
        return move.source == "generator" and len(stay) < self.machine.bounds.floors.get("generator", 0)

    async def _look_at_actor(self, deadline_s: float) -> None:
        """Note whether the planned move's new actor can take over."""
        move = self.map.move
        if move is None or self.map.phase != "planned" or self._prepared == move.id:
            return
        if move.target == SPARE:
            self._prepared = move.id
            return
        name = self.name(move.target, move.rank)
        if self._have and name not in self._have:
            return
        try:
            async with asyncio.timeout(deadline_s):
                if await self.ready(name):
                    self._prepared = move.id
        except Exception as error:  # not there yet, or dead again: prepare_timeout_s decides
            self.trace("move_waits", {"actor": name, "error": repr(error)[:200]})

    async def _commit_if_ready(self) -> Move | None:
        """Commit the planned move if its new actor can take over."""
        move = self.map.move
        if move is None or self.map.phase != "planned" or self._prepared != move.id or self._held(move):
            return None
        self._prepared = -1  # it may have died since: only what answers now is begun
        await self._look_at_actor(AT_ONCE_S)
        if self._prepared != move.id:
            return None
        await self._journal(self.map.commit(move.id, await self.fleet.grow()))
        self._since = time.monotonic()
        assert self._proposal is not None
        self.machine.begun(self._proposal)
        await self._remember()
        self._say("move_begun")
        committed = self.map.move
        if move.source == "generator":
            await self.fleet.leave(self.name("generator", move.rank), f"it becomes a {move.target}")
        if not self.map.touches_learners:
            await self._finish({})
        return committed

    async def _finish(self, parts: Mapping[str, float]) -> None:
        """The loop's part is done: the map is settled; a new generator still has to become healthy."""
        move, proposal = self.map.move, self._proposal
        assert move is not None and proposal is not None
        if self.config.scorer.mode == "auto":
            self._chooser.mode = proposal.scoring
        await self._journal(self.map.finish(move.id))
        self._proposal = None
        self.trace("move_made", {"move": move.id, "parts": dict(parts)})
        if move.target == "generator":
            self._join(move, proposal, self._since)
            await self._remember()
            await self.fleet.join(self.name("generator", move.rank))
        else:
            await self._done(proposal, _seconds_since(self._since))

    def _join(self, move: Move, proposal: Proposal, since: float | None) -> None:
        deadline = time.monotonic() + self.config.elastic.prepare_timeout_s
        name = self.name("generator", move.rank)
        self._joining = _Joining(move, proposal, name, since, deadline)

    def joining(self) -> list[str]:
        """The member that is on its way back to generation, if there is one."""
        return [] if self._joining is None else [self._joining.name]

    def _resume_joining(self, raw: Mapping[str, Any] | None) -> bool:
        """A rank that was on its way back to generation still is; False if there is none."""
        move = msgspec.convert(raw["move"], Move) if raw else None
        if raw is None or move is None or move.rank not in self.map.serving("generator"):
            return False
        since = raw["since"]
        if since is not None:
            since = time.monotonic() - max(0.0, time.time() - since)
        proposal = proposal_of(move, self._scoring_with(self.map))
        self._join(move, proposal, since)
        self.machine.resumed(proposal)
        return True

    async def _note_joined(self) -> None:
        """The rank that generates again is healthy, or was not in time: then somebody else may have it."""
        joining, now = self._joining, time.monotonic()
        if joining is None:
            return
        slot = self.fleet.slots.get(joining.name)
        if slot is not None and slot.healthy:
            self._joining = None
            await self._done(joining.proposal, _seconds_since(joining.since))
        elif now > joining.deadline:
            limit = self.config.elastic.prepare_timeout_s
            await self._journal(self.map.release(joining.move.rank, await self.fleet.grow()))
            await self._not_joined(f"not healthy within elastic.prepare_timeout_s = {limit:g} s")

    async def _not_joined(self, error: str, again: bool = False) -> None:
        """The rank that was to generate again does not; what that took teaches nothing."""
        joining, self._joining = self._joining, None
        assert joining is not None
        await self._forget_move(joining.move, joining.proposal, error, committed=True, again=again)
        await self.fleet.leave(joining.name, error)

    async def _done(self, proposal: Proposal, seconds: float | None) -> None:
        """The rank serves; ``seconds`` is None if nobody saw all of the switch: then it teaches nothing."""
        if seconds is not None:
            self.machine.switched(proposal.kind, seconds, proposal.id)
        self.machine.done(proposal)
        await self._remember()
        took = None if seconds is None else round(seconds, 3)
        self.trace("move_done", {"move": proposal.id, "kind": proposal.kind, "seconds": took,
                                 "cost_s": proposal.cost_s, "predicted_s": proposal.predicted_s})  # fmt: skip

    async def _undo(self, error: str, again: bool = False) -> None:
        """A planned or committed move will not be made: everything as before.

        ``again``: it did not fail, so its kind need not back off.
        """
        move, proposal = self.map.move, self._proposal
        assert move is not None and proposal is not None
        committed = self.map.phase == "committed"
        epoch = await self.fleet.grow() if committed else self.map.epoch
        await self._journal(self.map.undo(move.id, epoch) if committed else self.map.cancel(move.id))
        await self._forget_move(move, proposal, error, committed, again)
        if committed and move.source == "generator":
            await self.fleet.join(self.name("generator", move.rank))

    async def _forget_move(
        self, move: Move, proposal: Proposal, error: str, committed: bool, again: bool = False
    ) -> None:
        self._proposal = None
        if not committed:
            self.machine.begun(proposal)  # so that the ledger has a line of it
        self.machine.undone(proposal, again)
        await self._remember()
        self.trace("move_undone", {"move": move.id, "rank": move.rank, "kind": proposal.kind,
                                   "error": error[:500], "predicted_s": move.predicted_s})  # fmt: skip

    async def _expire(self) -> None:
        """A new role that does not get ready in time, or may not be taken up, is given up."""
        move, limit = self.map.move, self.config.elastic.prepare_timeout_s
        waited = _seconds_since(self._since)
        if move is None or self.map.phase != "planned" or waited is None or waited <= limit:
            return
        ready = self._prepared == move.id
        if ready and not self._held(move):
            return  # only its barrier is missing
        why = "too few generators were healthy" if ready else "its new actor was not ready"
        await self._undo(f"{why} within elastic.prepare_timeout_s = {limit:g} s")

    async def _refill(self) -> None:
        """A needed role at zero stops the job, so no barrier will come: move a rank now, without one.

        A learner group that is gone hears of it from ``roles``, which it asks for when it rebuilds; one that
        should give a rank is called to the barrier.
        """
        counts, move = self.map.counts(), self.map.move
        if move is not None and self.map.phase == "committed":
            if move.source == "learner" and counts["learner"] == 0:
                await self._undo("no learner is left", again=True)  # who would say that it is made?
            return
        pair = refilling(counts, self.machine.bounds.floors)
        if pair is None:
            return
        source, target = pair
        if self._joining is not None:  # it serves nobody yet
            await self._journal(self.map.release(self._joining.move.rank, await self.fleet.grow()))
            await self._not_joined(f"no {target} is left", again=True)
            source = SPARE
        if self.map.move is not None and self.map.move.target != target:
            await self._undo(f"no {target} is left", again=True)
        if self.map.move is None:
            scoring = self._scoring_with(self.map)
            cost = self.machine.switches.cost(f"{source}>{target}")
            await self._plan(Proposal(source=source, target=target, scoring=scoring, reason="nobody is left",
                                      cost_s=cost))  # fmt: skip
        if self.map.touches_learners and target == "generator":
            return
        if await self._commit_if_ready() is not None and self.map.touches_learners:
            self._since = None  # the group has not even heard of it
            await self._finish({})

    async def _journal(self, changed: RoleMap) -> None:
        """Durable first, then in force."""
        await self.queue.put("roles", changed.encode())
        self.map = changed

    async def _remember(self) -> None:
        """The switch ledger, the measured costs and who is joining outlive the process too."""
        state, joining = self.machine.state(), self._joining
        if joining is not None:
            passed = _seconds_since(joining.since)
            since = None if passed is None else time.time() - passed
            state["joining"] = {"move": msgspec.to_builtins(joining.move), "since": since}
        await self.queue.put("ranks", codec.encode(state))

    def _say(self, event: str) -> None:
        move = self.map.move
        assert move is not None
        self.trace(event, {"move": move.id, "rank": move.rank, "source": move.source, "target": move.target,
                           "epoch": self.map.epoch, "reason": move.reason, "cost_s": move.cost_s,
                           "predicted_s": move.predicted_s})  # fmt: skip


def _seconds_since(moment: float | None) -> float | None:
    return None if moment is None else time.monotonic() - moment


def proposal_of(move: Move, scoring: Scoring) -> Proposal:
    """The proposal behind a journalled move."""
    return Proposal(source=move.source, target=move.target, scoring=scoring, reason=move.reason,
                    predicted_s=move.predicted_s, cost_s=move.cost_s, id=move.id)  # fmt: skip
