"""Moves of ranks, live: the shell around ``cluster/ranks.py`` (decides) and ``cluster/roles.py`` (remembers).

::

    barrier(step N):   settled -- decide --> plan, journal; the driver creates the actor (wanted, have)
                       planned, and not wanted any more --> dropped (a new target drops it at once)
    barrier(step N+k): planned and its actor answers --> commit, journal, epoch + 1
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from cluster import codec
from cluster.config import Config
from cluster.fleet import Fleet, Trace
from cluster.messages import Barrier, Move, Moved, RankRow, Roles, Wanted
from cluster.moving import PROBE_DEADLINE_S, Moving, Ready, proposal_of
from cluster.pipeline import Measured, ScoringFacts
from cluster.ports import Queue
from cluster.ranks import Balance, StepFacts
from cluster.roles import SPARE, RoleMap
from cluster.targets import check_target, restoring

LOOK_EVERY_S = 0.5
SHOWN_RECORDS = 20


class Elastic(Moving):
    """Decides, with the rank machine and operators, which ranks move when."""

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
        super().__init__(config, queue, fleet, trace, ready, costs, balance)
        self.free: int | None = None  # ranks that the cluster could still give, as the driver says
        self._told: tuple[int, Barrier] | None = None  # last answer, for a loop that asks again
        self._stopping = False
        self._lock = asyncio.Lock()

    async def start(self, session: str = "") -> list[str]:
        """Restore or begin the role map; returns the names of the generators at work."""
        raw = await self.queue.get("roles")
        self.map = RoleMap.decode(raw) if raw else RoleMap.first(self.config, 0, session)
        anew = self.map.session != session
        if anew:
            self.map = self.map.begin_anew(self.config, session)
        raw = await self.queue.get("ranks")
        known = codec.decode(raw, dict[str, Any]) if raw else {}
        if known:
            self.machine.load(known)
        self.machine.target = dict(self.map.target) or None
        if self.map.move is not None:
            await self._resume(self.map.move)
        elif anew or not self._resume_joining(known.get("joining")):
            await self._end_of(self.map.last)
        return self.generators()

    async def _resume(self, move: Move) -> None:
        """An earlier process left ``move`` half-done; when it was committed is not known."""
        proposal = self._proposal = proposal_of(move, self._scoring_with(self.map))
        if self.map.phase == "planned":
            self._since = time.monotonic()
            return
        self.machine.resumed(proposal)
        await self._remember()
        if not self.map.touches_learners:
            await self._journal(self.map.finish(move.id))  # it has no effect but the map itself
            self._proposal = None
            await self._end_of(move)

    async def _end_of(self, last: Move | None) -> None:
        """What an earlier process had begun, if it was ``last``, is made as far as the map tells."""
        begun = self.machine.switches.under_way
        if last is None or last.id != begun or last.rank not in self.map.of(last.target):
            self.machine.switches.abandoned("the job was started again")
            return
        proposal = proposal_of(last, self._scoring_with(self.map))
        if last.target == "generator":
            self._join(last, proposal, None)
            self.machine.resumed(proposal)
            await self._remember()
        else:
            await self._done(proposal, None)

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
        measured.observe(told.get("score_s"), told.get("train_s"), told.get("swap_s"), told.get("ahead"))
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
        proposal = None if facts is None else self.machine.decide(facts, counts)
        if self._proposal is not None and self._can_drop and self.machine.regrets(self._proposal, counts):
            why = "the target has no use for it" if wish else "the opposite is wanted"
            await self._undo(f"{why} by now", again=True)
        elif proposal is not None and self.map.phase == "settled":
            await self._plan(proposal)

    @property
    def _can_drop(self) -> bool:
        """A move is planned, and the job does not stand still without it."""
        move = self.map.move
        if move is None or self.map.phase != "planned":
            return False
        return move.target not in ("generator", "learner") or self.map.counts()[move.target] > 0

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
            wished = target if target or env_workers is None else self.map.target
            if wished != self.map.target and self._can_drop:
                await self._undo("the target was changed", again=True)
            changed = replace(self.map, target=wished, workers=env_workers or self.map.workers)
            if wished is target:
                owned = sum(self.map.counts().values()) + more
                changed = replace(changed, wanted=max(len(self.map.ranks), owned))
            await self._journal(changed)
            self.trace("scale", {"target": target, "env_workers": env_workers, "more_ranks": more})
            return {"target": target, "now": self.map.counts(), "more_ranks": more,
                    "env_workers": self.map.workers}  # fmt: skip
