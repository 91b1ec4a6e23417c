"""Moves of ranks, live: the shell around ``cluster/ranks.py`` (decides) and ``cluster/roles.py`` (remembers).

::

    barrier(step N):   settled -- decide --> plan, journal; the driver creates the actor (wanted, have)
    barrier(step N+k): planned and its actor is ready --> commit, journal, epoch + 1
                         generator > X          it leaves the table before anybody else hears of the move
                         touches learners       the loop resizes the group and says ``moved``
                         anything else          finished at once
    moved(ok):         X > generator            it joins the fleet; done once it is healthy there
    moved(failed):     undo: the old role under a new epoch, the kind backs off
    not healthy        in time: the rank is spare, and the kind backs off

The journal is written before an effect, and effects follow from the journal, so a restarted controller
continues where it stands: fleet members are read off the map, a planned move waits anew, a committed one
that touches learners is handed out again by ``barrier``. A role that nobody serves any more (its node is
lost) is refilled without a barrier, since no step would come to one; if a learner is to generate, its loop
is called to the barrier (``Roles.awaited``).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from cluster import codec
from cluster.config import Config
from cluster.fleet import Fleet, Trace
from cluster.messages import Barrier, Move, Moved, RankRow, Roles, Wanted
from cluster.pipeline import Measured, ScoringChooser, ScoringFacts
from cluster.ports import Queue
from cluster.ranks import (
    Balance,
    Proposal,
    RankMachine,
    Scoring,
    StepFacts,
    choose_rank,
)
from cluster.roles import SPARE, RoleMap, member_name
from cluster.sim.profile import SwitchProfile
from cluster.targets import bounds, check_target, refilling, restoring, switch_costs

LOOK_EVERY_S = 0.5
PROBE_DEADLINE_S = 10.0  # in the background
AT_ONCE_S = 0.3  # at the barrier, where everybody waits: enough for an actor that is resident and idle
SHOWN_RECORDS = 20

Ready = Callable[[str], Awaitable[bool]]
"""An actor, by name, exists and can take up its role."""


@dataclass
class _Joining:
    """A rank that generates again, but is not yet healthy in the fleet."""

    move: Move
    proposal: Proposal
    name: str
    since: float  # commit of the move
    deadline: float


class Elastic:
    """Owns the role map; every method that changes it journals first."""

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
        self.free: int | None = None  # ranks that the cluster could still give, as the driver says
        self._have: set[str] = set()
        self._prepared = -1  # id of the planned move whose actor is ready
        self._chooser = ScoringChooser("colocated" if config.scorer.mode == "colocated" else "decoupled")
        self._proposal: Proposal | None = None  # of the move under way
        self._since = 0.0  # plan, then commit of the move under way
        self._joining: _Joining | None = None
        self._told: tuple[int, Barrier] | None = None  # last answer, for a loop that asks again
        self._stopping = False
        self._lock = asyncio.Lock()

    async def start(self, session: str = "") -> list[str]:
        """Restore or begin the role map; returns the names of the generators at work."""
        raw = await self.queue.get("roles")
        self.map = RoleMap.decode(raw) if raw else RoleMap.first(self.config, 0, session)
        if self.map.session != session:
            self.map = self.map.begin_anew(self.config, session)
        raw = await self.queue.get("ranks")
        known = codec.decode(raw, dict[str, Any]) if raw else {}
        if known:
            self.machine.load(known)
        self.machine.target = dict(self.map.target) or None
        move = self.map.move
        if move is None and not self._resume_joining(known.get("joining")):
            self.machine.switches.abandoned("the job was started again")
        if move is not None:
            self._proposal = _proposal(move, self._scoring_with(self.map))
            self._since = time.monotonic()
            if self.map.phase == "committed":
                self.machine.resumed(self._proposal)
            if self.map.phase == "committed" and not self.map.touches_learners:
                await self._journal(self.map.finish(move.id))  # it has no effect but the map itself
                await self._done(self._proposal, 0.0)
                self._proposal = None
        return self.generators()

    def _resume_joining(self, raw: Mapping[str, Any] | None) -> bool:
        """A rank that was on its way back to generation still is; False if there is none."""
        move = msgspec.convert(raw["move"], Move) if raw else None
        if raw is None or move is None or move.rank not in self.map.serving("generator"):
            return False
        since = time.monotonic() - max(0.0, time.time() - raw["since"])
        proposal = _proposal(move, self._scoring_with(self.map))
        self._join(move, proposal, since)
        self.machine.resumed(proposal)
        return True

    async def run(self) -> None:
        """See to planned moves, joining generators and roles that nobody serves, until stopped."""
        while not self._stopping:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look_at_actor(PROBE_DEADLINE_S)
            async with self._lock:
                await self._expire()
                await self._note_joined()
                await self._refill()

    def stop(self) -> None:
        """End ``run``."""
        self._stopping = True

    # -- facts --------------------------------------------------------------------------

    def generators(self) -> list[str]:
        """Names of the generators at work."""
        return [self.name("generator", rank) for rank in self.map.serving("generator")]

    def name(self, role: str, rank: int) -> str:
        """See ``roles.member_name``."""
        return member_name(role, rank, self.config)

    def roles(self) -> Roles:
        """The role map of this epoch. A committed move counts as made."""
        return replace(self.map.roles(), awaited=self._awaited)

    @property
    def _awaited(self) -> bool:
        """Nobody generates, and a move that is to change that waits for the learners."""
        move = self.map.move
        if move is None or not self.map.touches_learners or self.map.serving("generator"):
            return False
        ready = move.target == "generator" and self._prepared == move.id
        return self.map.phase == "committed" or ready

    def wanted(self) -> Wanted:
        """What the driver should keep running."""
        names = [
            self.name(row.role, row.rank) for row in self.map.ranks if not row.lost and row.role != SPARE
        ]
        move = self.map.move
        if move is not None and self.map.phase == "planned" and move.target != SPARE:
            names.append(self.name(move.target, move.rank))
        return Wanted(epoch=self.fleet.epoch, actors=tuple(names), workers=self.map.workers,
                      ranks=self.map.wanted)  # fmt: skip

    @property
    def active(self) -> bool:
        """Somebody (a setting, an operator, a node that came back) may want a rank moved."""
        return self.config.elastic.enabled or bool(self.map.target) or self.map.counts()[SPARE] > 0

    def status(self) -> dict[str, Any]:
        """Roles, the move under way, the target and the switch ledger, as plain values."""
        move = self.map.move
        return {
            "epoch": self.map.epoch,
            "ranks": {str(r.rank): "lost" if r.lost else r.role for r in self.map.ranks},
            "nodes": {str(r.rank): r.node for r in self.map.ranks if r.node},
            "phase": self.map.phase,
            "move": None if move is None else f"{move.rank}: {move.source} > {move.target}",
            "target": self.map.target,
            "workers": self.map.workers,
            "scoring": self.scoring(),
            "switches": [asdict(record) for record in self.machine.ledger[-SHOWN_RECORDS:]],
        }

    def scoring(self) -> str:
        """How the next batch is scored, as far as the roles decide it."""
        return self._scoring_with(self.map)

    def _scoring_with(self, roles: RoleMap) -> Scoring:
        return self._chooser.mode if roles.counts()["scorer"] > 0 else "colocated"

    # -- the barrier --------------------------------------------------------------------

    async def barrier(self, facts: StepFacts | None, told: Mapping[str, Any], groups: int) -> Barrier:
        """After step ``told["step"]``: decide, commit what is ready. Asked again, it decides nothing new.

        ``facts`` is None when the step cannot be measured (the first after a restart); ``told`` is what
        the loop said, with the costs of scoring; ``groups`` the smallest batch of the next step.
        """
        step = int(told["step"])
        async with self._lock:
            again = self._told is not None and self._told[0] == step
            if self._told is not None and again and self.map.phase != "committed" and not self._awaited:
                return replace(self._told[1], roles=self.map.roles(), move=None, scoring=self.scoring())
            move = self.map.move if self.map.phase == "committed" else None
            if not again:
                self._choose_scoring(told)
            if move is None and (self.active or self._awaited):
                await self._expire()
                await self._note_joined()
                await self._consider(facts)
                move = await self._commit_if_ready()
                await self._remember()
            answer = Barrier(roles=self.map.roles(), move=move, scoring=self.scoring(), groups=groups)
            self._told = (step, answer)
            return answer

    def _choose_scoring(self, told: Mapping[str, Any]) -> None:
        """Where the next batch is scored, from how the last one came in and what its parts took."""
        if self.config.scorer.mode != "auto" or not told.get("scoring_active"):
            return
        measured = Measured()
        measured.observe(told.get("score_s"), told.get("train_s"), told.get("swap_s"))
        learners = max(1, int(told["learners"]))
        costs = measured.costs(int(told["scorers"]), learners, learners)
        self.machine.balance.swap_s = 2 * (measured.swap_s or 0.0)
        if costs is not None:
            ready = (int(told["micro_batches"]), int(told["ras"]), float(told["tprm_s"]))
            self._chooser.choose(ScoringFacts(*ready, costs, gated=bool(told.get("gated"))))

    async def _consider(self, facts: StepFacts | None) -> None:
        """Let the machine see the step; plan what it proposes."""
        counts = self.map.counts()
        own_will = self.config.elastic.enabled
        wish = self.map.target or ({} if own_will else restoring(self.config, counts))
        self.machine.target = dict(wish) or None
        if facts is None:
            return
        proposal = self.machine.decide(facts, counts)
        alone = self._proposal is not None and counts[self._proposal.target] == 0
        if self._proposal is not None and not alone and self.machine.regrets(self._proposal):
            await self._undo("the opposite is wanted by now", again=True)
        elif proposal is not None and self.map.phase == "settled":
            await self._plan(proposal)

    async def _plan(self, proposal: Proposal) -> None:
        rank = choose_rank(self.map.ranks, proposal.source, proposal.target, self._unhealthy())
        planned = self.map.plan(rank, proposal.target, proposal.reason, proposal.predicted_s, proposal.cost_s)
        assert planned.move is not None
        await self._journal(planned)
        self._proposal = _proposal(planned.move, proposal.scoring)
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

    async def _commit_if_ready(self) -> Move | None:
        """Commit the planned move if its new actor can take over."""
        move = self.map.move
        if move is None or self.map.phase != "planned" or self._prepared != move.id or self._held(move):
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

    async def moved(self, moved: Moved) -> None:
        """How the loop's part of a move ended; ignored, with a trace, unless that move is under way."""
        async with self._lock:
            if why := self.map.refuses(moved.move):
                self.trace("move_report_ignored", {"move": moved.move, "ok": moved.ok, "why": why})
                return
            if moved.ok:
                await self._finish(moved.parts)
            else:
                await self._undo(moved.error)

    # -- endings ------------------------------------------------------------------------

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
            await self._done(proposal, time.monotonic() - self._since)

    def _join(self, move: Move, proposal: Proposal, since: float) -> None:
        deadline = time.monotonic() + self.config.elastic.prepare_timeout_s
        name = self.name("generator", move.rank)
        self._joining = _Joining(move, proposal, name, since, deadline)

    async def _note_joined(self) -> None:
        """The rank that generates again is healthy, or was not in time: then somebody else may have it."""
        joining, now = self._joining, time.monotonic()
        if joining is None:
            return
        slot = self.fleet.slots.get(joining.name)
        if slot is not None and slot.healthy:
            self._joining = None
            await self._done(joining.proposal, now - joining.since)
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

    async def _done(self, proposal: Proposal, seconds: float) -> None:
        self.machine.switched(proposal.kind, seconds, proposal.id)
        self.machine.done(proposal)
        await self._remember()
        self.trace("move_done", {"move": proposal.id, "kind": proposal.kind, "seconds": round(seconds, 3),
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
        if move is None or self.map.phase != "planned" or time.monotonic() - self._since <= limit:
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
        pair = refilling(self.map.counts(), self.machine.bounds.floors)
        if pair is None or self._joining is not None or self.map.phase == "committed":
            return
        source, target = pair
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
            await self._finish({})

    # -- nodes and operators ------------------------------------------------------------

    async def have(self, names: Sequence[str], free: int | None = None) -> None:
        """The driver runs these actors; ``free`` more ranks could be had from the cluster."""
        self._have = set(names)
        self.free = free if free is not None else self.free

    async def located(self, nodes: Mapping[int, str]) -> None:
        """Ray node id of each rank."""
        async with self._lock:
            await self._journal(self.map.located(dict(nodes)))

    async def lost(self, ranks: Sequence[int], node: str = "") -> None:
        """These ranks are gone with their node. Ranks that are lost already are left out."""
        async with self._lock:
            fresh = [rank for rank in ranks if not self.map.row(rank).lost]
            if not fresh:
                return
            move, proposal, phase = self.map.move, self._proposal, self.map.phase
            gone = [r.rank for r in self.map.ranks if r.rank in fresh and r.role == "generator"]
            await self._journal(self.map.lose(fresh, await self.fleet.grow()))
            if move is not None and proposal is not None and self.map.move is None:
                why = f"rank {move.rank} was lost"
                await self._forget_move(move, proposal, why, phase == "committed", again=True)
            if self._joining is not None and self._joining.move.rank in fresh:
                await self._not_joined(f"rank {self._joining.move.rank} was lost", again=True)
            for rank in gone:
                await self.fleet.leave(self.name("generator", rank), "its node is lost")
            self.trace("ranks_lost", {"ranks": fresh, "node": node, "epoch": self.fleet.epoch})

    async def joined(self, rows: Sequence[RankRow]) -> None:
        """Ranks that came, or came back: spare until a barrier gives them a role. Live ones are left out."""
        async with self._lock:
            live = {row.rank for row in self.map.ranks if not row.lost}
            fresh = [row for row in rows if row.rank not in live]
            if not fresh:
                return
            changed = self.map.join(fresh, await self.fleet.grow())
            owned = sum(not row.lost for row in changed.ranks)
            await self._journal(replace(changed, wanted=max(changed.wanted, owned)))
            self.trace("ranks_joined", {"ranks": [row.rank for row in fresh], "epoch": self.fleet.epoch})

    async def scale(
        self,
        generators: int | None = None,
        learners: int | None = None,
        scorers: int | None = None,
        env_workers: int | None = None,
    ) -> dict[str, Any]:
        """An operator's target, reached one move per barrier and held; without arguments it is taken back.

        Raises ConfigError when a floor forbids it or the ranks cannot be had. Returns what will be done.
        """
        named = {"generator": generators, "learner": learners, "scorer": scorers}
        target = {role: count for role, count in named.items() if count is not None}
        async with self._lock:
            more = check_target(self.config, self.map, target, env_workers, self.free or 0)
            owned = sum(self.map.counts().values()) + more
            changed = replace(self.map, wanted=max(owned, self.map.wanted),
                              workers=env_workers or self.map.workers)  # fmt: skip
            if target or env_workers is None:
                changed = replace(changed, target=target)
            await self._journal(changed)
            self.trace("scale", {"target": target, "env_workers": env_workers, "more_ranks": more})
            return {"target": target, "now": self.map.counts(), "more_ranks": more,
                    "env_workers": self.map.workers}  # fmt: skip

    # -- journal ------------------------------------------------------------------------

    async def _journal(self, changed: RoleMap) -> None:
        """Durable first, then in force."""
        await self.queue.put("roles", changed.encode())
        self.map = changed

    async def _remember(self) -> None:
        """The switch ledger, the measured costs and who is joining outlive the process too."""
        state, joining = self.machine.state(), self._joining
        if joining is not None:
            since = time.time() - (time.monotonic() - joining.since)
            state["joining"] = {"move": msgspec.to_builtins(joining.move), "since": since}
        await self.queue.put("ranks", codec.encode(state))

    def _say(self, event: str) -> None:
        move = self.map.move
        assert move is not None
        self.trace(event, {"move": move.id, "rank": move.rank, "source": move.source, "target": move.target,
                           "epoch": self.map.epoch, "reason": move.reason, "cost_s": move.cost_s,
                           "predicted_s": move.predicted_s})  # fmt: skip


def _proposal(move: Move, scoring: Scoring) -> Proposal:
    """The proposal behind a journalled move."""
    return Proposal(source=move.source, target=move.target, scoring=scoring, reason=move.reason,
                    predicted_s=move.predicted_s, cost_s=move.cost_s, id=move.id)  # fmt: skip
