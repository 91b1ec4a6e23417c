"""Ranks that change their role in a simulation: elastic moves, lending, machines that fail and come back.

Elastic moves are decided by the live machine, cluster/ranks.py, at the barrier after a step. A rank serves
nobody while it switches; a move that touches learners holds all of them up. *Lending* is verl's dynamic
scheduling (docs/advance/dynamic_schedule.md): while the buffer fills, all learner ranks generate; they come
back once ``ratio`` of a batch is ready. The ratio grows by the share of the batch that was then still waited
for (clipped to 0.02..0.1) and falls by 0.02 if there was no such wait; a loan must promise more than the
switch costs. Requests that wait at busy engines go to a replica that joins, and sticky routes give way.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from statistics import fmean
from typing import Any, Protocol

from cluster.balance import Scoring
from cluster.ranks import Balance, Proposal, RankMachine, StepFacts, choose_rank
from cluster.sim.fleet import BUSY, GENERATOR, LEARNER, SCORER, SPARE, Fleet, Rank
from cluster.sim.rollout import Rollout
from cluster.sim.scenario import Fault, Scenario
from cluster.sim.trainer import Trainer
from cluster.targets import ScoringMode, elastic_bounds, move_costs

FIRST_RATIO, GAIN, LEAST, MOST = 0.3, 0.02, 0.02, 0.1
FIRST_GROUP_S = 1000.0  # verl's prior: nothing is known, so lend


class Host(Protocol):
    """What moves need of the world."""

    scenario: Scenario
    fleet: Fleet
    rollout: Rollout
    trainer: Trainer

    def after(self, t: float, handler: Callable[[float, Any], None], argument: Any) -> None:
        """Enter an event."""

    def hold(self, now: float, why: str) -> None:
        """Learners stand still until ``let_go``."""

    def let_go(self, now: float, why: str) -> None:
        """The reason is gone."""

    def scored_as(self, scoring: Scoring) -> None:
        """A move has begun that was decided together with this way of scoring."""

    def generates(self, now: float, rank: Rank) -> None:
        """The rank enters the generator table."""


class Moves:
    """Makes what the rank machine proposes, one move at a time."""

    def __init__(self, host: Host) -> None:
        self.host = host
        scenario = host.scenario
        profile, scoring = scenario.profile, scenario.policy.scoring
        scores = bool(profile.scorer.passes)
        balance = Balance(scaling=profile.learner.scaling, swap_s=2.0 * profile.scorer.swap_s * scores)
        self.costs = move_costs(profile.switch, scores)
        mode: ScoringMode = scoring if scoring in ("decoupled", "auto") else "colocated"
        bounds = elastic_bounds(scenario.elastic, scenario.steps, mode, scores)
        self.machine = RankMachine(bounds, self.costs, balance)
        self.begun: tuple[Proposal, Rank, float] | None = None
        self.switch_s = 0.0  # learners held up since the last step
        self._places: list[tuple[float, int]] = []  # (time, rank) of each line of the machine's ledger

    def decide(self, now: float, facts: StepFacts) -> None:
        """At the barrier."""
        fleet = self.host.fleet
        proposal = self.machine.decide(facts, fleet.counts())
        if proposal is None or self.begun is not None:
            return
        rank = fleet.ranks[choose_rank(fleet.rows(), proposal.source, proposal.target)]
        self.machine.begun(proposal)
        self.begun = (proposal, rank, now)
        self._places.append((now, rank.index))
        self.host.scored_as(proposal.scoring)
        self._take_off(now, rank, proposal.source)
        seconds = self._cost(proposal.source, proposal.target)
        fleet.change(rank, now, proposal.target)
        fleet.set(rank, now, "switch")
        if LEARNER in (proposal.source, proposal.target):
            self.host.hold(now, "switch")
            self.switch_s += seconds
        self.host.after(now + seconds, self._made, proposal)

    def ledger(self) -> list[dict[str, float | str]]:
        """The switch ledger; what is not known (yet) is left out."""
        lines: list[dict[str, float | str]] = []
        records = self.machine.ledger
        for (t, rank), record in zip(self._places[-len(records) :], records, strict=True):
            line: dict[str, float | str] = {
                "t": t, "rank": rank, "move": record.move, "step": record.step, "reason": record.reason,
                "state": record.state, "predicted_s": record.predicted_s, "cost_predicted_s":
                record.cost_predicted_s,
            }  # fmt: skip
            if record.cost_s is not None:
                line["cost_s"] = record.cost_s
            if record.realised_s is not None:
                line["realised_s"] = record.realised_s
            if record.void:
                line["void"] = record.void
            lines.append(line)
        return lines

    def _cost(self, source: str, target: str) -> float:
        kind = f"{source}>{target}"
        if kind in self.costs:
            return self.costs[kind]
        return min((cost for key, cost in self.costs.items() if key.endswith(f">{target}")), default=0.0)

    def _take_off(self, now: float, rank: Rank, role: str) -> None:
        """The rank stops serving ``role``."""
        host = self.host
        rank.serving = False
        if role == GENERATOR:
            host.rollout.leave(now, rank.index)
        elif role == SCORER:
            host.trainer.set_scorers(now, host.trainer.scorers - 1)
        elif role == LEARNER:
            host.trainer.learners -= 1

    def _made(self, now: float, proposal: Proposal) -> None:
        assert self.begun is not None
        _, rank, since = self.begun
        self.begun = None
        if rank.lost:
            self.machine.undone(proposal)
        else:
            put_on(self.host, now, rank)
            self.machine.switched(proposal.kind, now - since)
            self.machine.done(proposal)
        if LEARNER in (proposal.source, proposal.target):
            self.host.let_go(now, "switch")


def put_on(host: Host, now: float, rank: Rank) -> None:
    """The rank begins to serve its role."""
    rank.serving = True
    if rank.role == GENERATOR:
        host.generates(now, rank)
    elif rank.role == SCORER:
        host.fleet.set(rank, now, "data" if host.trainer.pool.idle else BUSY)
        host.trainer.set_scorers(now, host.trainer.scorers + 1)
    elif rank.role == LEARNER:
        host.trainer.learners += 1


class Lender:
    """verl's rule; see the module docstring."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ratio = FIRST_RATIO
        self.loans: list[dict[str, float | str]] = []
        self._costs: deque[float] = deque(maxlen=3)
        self._group_s = FIRST_GROUP_S
        self._lent: list[Rank] = []
        self._active = False
        self._since = 0.0
        self._before = 0

    def consider(self, now: float) -> None:
        """The learners are about to wait for a batch: lend them?"""
        host = self.host
        size = host.scenario.groups_per_step
        switch = host.scenario.profile.switch
        cost = fmean(self._costs) if self._costs else switch.learner_generator + switch.generator_learner
        gap = self.ratio * size - len(host.trainer.ready)
        if self._lent or gap <= 0 or gap * self._group_s <= cost:
            self._learn(len(host.trainer.ready))
            return
        self._lent = host.fleet.of(LEARNER)
        self._since, self._before, self._active = now, len(host.trainer.ready), False
        self.loans.append({"t": now, "move": "loan", "ratio": self.ratio, "ranks": len(self._lent)})
        host.hold(now, "lent")
        for rank in self._lent:
            host.fleet.change(rank, now, GENERATOR, lent=True)
            host.fleet.set(rank, now, "switch")
        host.after(now + switch.learner_generator, self._lend, None)

    def _lend(self, now: float, _: object) -> None:
        self._active = True
        for rank in self._lent:
            if rank.lent:  # not lost since
                self.host.generates(now, rank)
        self.arrived(now)

    def arrived(self, now: float, _: object = None) -> None:
        """A group is ready: enough to take the ranks back?"""
        host = self.host
        ready = len(host.trainer.ready)
        if not self._active or ready < self.ratio * host.scenario.groups_per_step:
            return
        self._active = False
        if ready > self._before:
            self._group_s = (now - self._since) / (ready - self._before)
        for rank in self._lent:
            if rank.lent:  # not lost since
                host.rollout.leave(now, rank.index)
                host.fleet.change(rank, now, LEARNER, lent=True)
                host.fleet.set(rank, now, "switch")
        host.after(now + host.scenario.profile.switch.generator_learner, self._back, None)

    def _back(self, now: float, _: object) -> None:
        host = self.host
        switch = host.scenario.profile.switch
        self._costs.append(switch.learner_generator + switch.generator_learner)
        self._lent = []
        self._learn(len(host.trainer.ready))
        host.let_go(now, "lent")

    def _learn(self, ready: int) -> None:
        """The learners are there for good: how much of the batch do they still wait for?"""
        size = self.host.scenario.groups_per_step
        waited = max(0, size - ready) / size
        self.ratio += min(MOST, max(LEAST, waited)) if waited else -GAIN
        self.ratio = min(1.0, max(GAIN, self.ratio))


class Faults:
    """Machines that go and come back."""

    def __init__(self, host: Host) -> None:
        self.host = host
        for fault in host.scenario.faults:
            if not 0 <= fault.rank < len(host.fleet.ranks):
                raise ValueError(f"fault of rank {fault.rank}: there are {len(host.fleet.ranks)} ranks")
            host.after(fault.at_s, self._lose, fault)

    def _lose(self, now: float, fault: Fault) -> None:
        host = self.host
        rank = host.fleet.ranks[fault.rank]
        if rank.lost:
            return
        serving, generator = rank.serving, rank.index in host.rollout.generators
        host.fleet.lose(rank, now)
        if generator:
            host.rollout.leave(now, rank.index)
        if not serving:
            pass  # it switched: nobody counts on it
        elif rank.role == LEARNER:
            host.trainer.lose(now, host.trainer.learners - 1)
            host.hold(now, "rebuild")
            host.after(now + host.scenario.profile.switch.generator_learner, self._rebuilt, None)
        elif rank.role == SCORER:
            host.trainer.set_scorers(now, host.trainer.scorers - 1)
        if fault.down_s != inf:
            host.after(now + fault.down_s, self._return, rank)

    def _rebuilt(self, now: float, _: object) -> None:
        self.host.let_go(now, "rebuild")

    def _return(self, now: float, rank: Rank) -> None:
        """As a spare for the rank machine, or in its old role where roles are static or a role is empty."""
        host = self.host
        host.fleet.close(rank, now)
        rank.lost, rank.cause = False, BUSY
        counts = host.fleet.counts()
        missing = next((role for role in (GENERATOR, LEARNER) if counts[role] == (rank.role == role)), "")
        elastic = host.scenario.policy.roles == "elastic"
        host.fleet.change(rank, now, missing or (SPARE if elastic else rank.role))
        if rank.role == SPARE:
            return
        host.fleet.set(rank, now, "switch")
        switch, load_s = host.scenario.profile.switch, host.scenario.profile.sync.load_s
        seconds = {GENERATOR: load_s, SCORER: switch.generator_scorer, LEARNER: switch.generator_learner}
        host.after(now + seconds[rank.role], self._serve, rank)

    def _serve(self, now: float, rank: Rank) -> None:
        if rank.lost:
            return
        put_on(self.host, now, rank)
        if rank.role == LEARNER:
            self.host.let_go(now, "rebuild")
