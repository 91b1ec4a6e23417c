"""Elastic resource scaling: which rank changes its role, if any, after each step. Pure.

The rule, in the order in which it is applied (``RankMachine.decide``):

1. *Deficit.* ``d = (TWT / learners - RWT / generators) / step_s``: the share of a step (barrier and switches
   left out) that a learner waits minus the share that a generator waits. ``d`` above the dead band asks
   for generation, below minus the dead band for consumption. RWT counts what generators that the staleness
   bound holds back could do without (``Balance.held_back``): they look as busy as ever. Two signs of TideRL
   (arXiv:2608.10402) count inside the band: a batch that formed short (``fill < 1``) asks for generation, a
   head of line older than ``tau`` steps for consumption. Waiting for scores is a deficit of consumption too
   if scorers are busy for most of the step: groups are there, but are not scored. Scorers with time to spare
   are late because their segments are, so waiting for them is waiting for generators.
2. *Agreement.* ``agree_steps`` steps in a row ask for the same. A step that a switch took most of is not
   read; while the deficit lasts, every further step may move a rank.
3. *Gain.* Of the adjacent assignments (one rank moved; scoring decoupled or colocated decided with it), the
   one with the largest ``saving * horizon - cost``, if that is positive. ``saving`` is predicted by
   ``cluster/balance.py`` and scaled by what earlier moves of the kind realised, and the move has to pay even
   if the saving is ``DOUBT`` standard errors smaller: those of running means of the noise that is seen
   (``cluster/running.py``). What another way of scoring alone would save is not counted. ``cost`` is the mean
   of the last three switches of the kind, or the prior. ``horizon`` is the number of steps since the last
   shift of the load (that it lasts as long again is the best guess without further knowledge), at least
   ``horizon_steps``, at most the steps that are left of the run.
4. *Bounds.* Floors (of generators: healthy ones), ceilings, one move at a time. The reverse of the last move
   needs twice the dead band; unless the load has certainly shifted since (four further steps agree), it also
   has to be ``horizon_steps`` later and to pay both switches. A kind that failed backs off for 4, 8, 16 ...
   steps.

During cold start and evaluation, generation is favoured: its proposals need no second step, and consumption
asks for nothing. Spare ranks serve nobody, so they go wherever the model sees a saving, at once. An
operator's ``target`` overrides all this: one move per step towards it, and it holds until it is taken back.

Why it cannot oscillate: a move is made only if the model predicts a shorter step after it, so its reverse
is predicted to be longer under the same works. Noise can still tip a load that lies between two splits, but
seldom, since the saving has to exceed its error. Then two moves that undo each other are ``horizon_steps``
apart and the later one promises both costs, unless noise looks like a new load for six steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.balance import Balance as Balance
from cluster.balance import Scoring as Scoring
from cluster.balance import StepFacts as StepFacts
from cluster.limits import Bounds as Bounds
from cluster.limits import can_give, toward
from cluster.limits import choose_rank as choose_rank
from cluster.roles import ROLES
from cluster.switches import SwitchLedger
from cluster.switches import SwitchRecord as SwitchRecord

SCORERS_BUSY = 0.8
"""Of a step: scorers that are busy for less could score more, if it came."""
DOUBT = 2.5
"""A move has to pay even if its saving is so many standard errors below what is predicted."""
LONG_SWITCH = 0.5
"""A switch of more than this share of a step leaves too little of it to judge by."""
EARLY = ", early"
"""Ends the reason for a move that was predicted while batches of the load before were still trained: what a
batch of the present one takes was foreseen from what its rows gain."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One rank should move. ``kind`` is "source>target"; ``id`` is given to it when it is planned."""

    source: str
    target: str
    scoring: Scoring  # how batches should be scored after it
    reason: str
    predicted_s: float = 0.0  # saving per step; 0 if not predicted
    cost_s: float = 0.0
    id: int = 0

    @property
    def kind(self) -> str:
        """The key of its switch cost."""
        return f"{self.source}>{self.target}"


def deficit(facts: StepFacts, counts: Mapping[str, int], held_back: float = 0.0) -> float:
    """``d`` of the module docstring: positive when learners wait more than generators do.

    ``held_back``: the share of their busy time that generators could do without.
    """
    worked_s = facts.step_s - facts.sync_s
    if worked_s <= 0:
        return 0.0
    learners, generators = max(1, counts["learner"]), max(1, counts["generator"])
    waited_s = facts.rwt_s + held_back * facts.generator_busy_s
    lacked_s = facts.twt_s if short_of_scorers(facts, counts) else facts.twt_s + facts.signal_s
    return (lacked_s / learners - waited_s / generators) / worked_s


def short_of_scorers(facts: StepFacts, counts: Mapping[str, int]) -> bool:
    """Whoever waits for scores waits for scorers: they had hardly a moment to spare."""
    return facts.scorer_busy_s >= SCORERS_BUSY * counts["scorer"] * (facts.step_s - facts.sync_s)


class RankMachine:
    """Facts of each step in, at most one proposal out.

    ::

        proposal = machine.decide(facts, counts)     once per step, at the sync barrier
        machine.begun(proposal)                      it is being made
        machine.switched(proposal.kind, seconds, id) what it took
        machine.done(proposal)  or  .undone(proposal)

    ``counts`` has the live ranks by role: generator, scorer, learner, and spare if there are any.
    ``switch_costs`` maps the kinds that are possible ("generator>scorer", "learner>generator" ...) to their
    prior cost in seconds; a kind that is not in it is never proposed, except from spare.
    """

    def __init__(
        self, bounds: Bounds, switch_costs: Mapping[str, float], balance: Balance | None = None
    ) -> None:
        self.bounds = bounds
        self.balance = balance if balance is not None else Balance()
        self.target: dict[str, int] | None = None  # operator's wish by role, all or some roles
        self.switches = SwitchLedger(switch_costs, self.balance.saved)
        self._begun: Proposal | None = None
        self._noticed = self._shifted = False  # a shift since the last move; and it is certain
        self._skip = 0  # coming steps that contain a switch
        self._asked = ""  # generation or consumption
        self._streak = 0
        self._deficit = 0.0  # of the step that is decided on
        self._counts: dict[str, int] = {}
        self._step = 0
        self._step_s = 0.0
        self._since = 0  # step at which the present load was first seen

    @property
    def ledger(self) -> list[SwitchRecord]:
        """The switch ledger, oldest first."""
        return self.switches.records

    # -- decision -----------------------------------------------------------------------

    def decide(self, facts: StepFacts, counts: Mapping[str, int]) -> Proposal | None:
        """At most one move, to be made at this step's barrier."""
        self._step, self._step_s = facts.step, facts.step_s
        counts = {role: counts.get(role, 0) for role in (*ROLES, "spare")}
        if self._begun is not None:  # nothing that this step shows is settled
            self._counts = {}
            self.balance.passed(facts)
            return None
        self._notice_change(counts)
        if self._skip > 0:
            self._skip -= 1
            self.balance.passed(facts)
            return self._toward_target(facts, counts)
        if found := self.balance.observe(facts, counts):
            self._noticed, self._since = True, facts.step
            if found == "generators":  # what learners have is accounted for when a saving is told
                self.switches.shifted()
        self._shifted = self._shifted or (self._noticed and self.balance.confirmed)
        if facts.phase == "train" and self.balance.sample is not None:
            self.switches.settled(self.balance.sample)
        if self.target is not None:
            return self._toward_target(facts, counts)
        self._deficit = deficit(facts, counts, self.balance.held_back(counts, facts.scoring))
        asked = self._ask(facts, counts)
        self._streak = self._streak + 1 if asked and asked == self._asked else int(bool(asked))
        self._asked = asked
        return self._best(facts, counts)

    def _ask(self, facts: StepFacts, counts: Mapping[str, int]) -> str:
        """generation, consumption or nothing."""
        d, band = self._deficit, self.bounds.dead_band
        unscored = facts.signal_s / max(1, counts["learner"]) / max(facts.step_s, 1e-9)
        if unscored > max(band, d) and facts.phase == "train" and short_of_scorers(facts, counts):
            return "consumption"
        if d > band or (facts.fill < 1 and d > 0):
            return "generation"
        old = facts.head_age_s > self.bounds.tau * facts.step_s
        if facts.phase == "train" and (d < -band or (old and d < 0)):
            return "consumption"
        return ""

    def _best(self, facts: StepFacts, counts: Mapping[str, int]) -> Proposal | None:
        needed = self.bounds.agree_steps if facts.phase == "train" else 1
        agreed = self._asked if self._streak >= needed else ""
        if facts.phase == "cold" or not self.balance.known:
            return self._cold(facts, counts, agreed)
        found = [
            proposal
            for source, target in self._pairs(facts, counts, agreed)
            if (proposal := self._evaluate(source, target, facts, counts, agreed)) is not None
        ]
        return max(found, key=self._gain, default=None)

    def _pairs(self, facts: StepFacts, counts: Mapping[str, int], agreed: str) -> list[tuple[str, str]]:
        """Moves that may be considered: adjacent, in the direction asked for, within the bounds."""
        pairs: list[tuple[str, str]] = []
        if counts["spare"] > 0:
            pairs += [("spare", role) for role in ROLES if facts.phase == "train" or role == "generator"]
        if agreed == "generation":
            pairs += [("scorer", "generator"), ("learner", "generator")]
        elif agreed == "consumption":
            pairs += [("generator", "scorer"), ("generator", "learner")]
        return [pair for pair in pairs if self._may(*pair, facts, counts)]

    def _may(self, source: str, target: str, facts: StepFacts, counts: Mapping[str, int]) -> bool:
        kind = f"{source}>{target}"
        if source != "spare" and kind not in self.switches.priors:
            return False
        if not self._within(source, target, facts, counts) or self.switches.blocked(kind, facts.step):
            return False
        if not self._undoes(kind):
            return True
        earned = self._shifted or facts.step - self.ledger[-1].step >= self.bounds.horizon_steps
        return earned and abs(self._deficit) > 2 * self.bounds.dead_band

    def _undoes(self, kind: str) -> bool:
        """It is the reverse of the last move."""
        source, _, target = kind.partition(">")
        return self.switches.last == f"{target}>{source}"

    def _within(self, source: str, target: str, facts: StepFacts, counts: Mapping[str, int]) -> bool:
        """Floors and ceilings hold after the move."""
        if source == "generator" and not can_give(counts, self.bounds, facts.unhealthy):
            return False
        floor = 0 if source == "spare" else self.bounds.floors.get(source, 0)
        ceiling = self.bounds.ceilings.get(target, 0) or math.inf
        return counts[source] - 1 >= floor and counts[target] + 1 <= ceiling

    def _evaluate(
        self, source: str, target: str, facts: StepFacts, counts: Mapping[str, int], agreed: str
    ) -> Proposal | None:
        """The move with its better way of scoring, if it earns its cost within the horizon."""
        after = {**counts, source: counts[source] - 1, target: counts[target] + 1}
        mode = self.bounds.scoring
        modes: tuple[Scoring, ...] = ("colocated", "decoupled") if mode == "auto" else (mode,)
        scoring = min(modes, key=lambda way: self.balance.step_s(after, way))
        mode_now, now = self._now(counts, facts.scoring)
        then = self.balance.step_s(after, scoring)
        if not math.isfinite(then):
            return None
        kind = f"{source}>{target}"
        trust, error = self.switches.trust(kind), 0.0
        saving = (now - then if math.isfinite(now) else then) * trust
        if math.isfinite(now) and not self._free(source, target):
            error = trust * self.balance.saving_error((counts, mode_now), (after, scoring))
        why = f"{agreed} deficit {self._deficit:+.2f}" if source != "spare" else "spare rank"
        why += EARLY if self.balance.generation.mixed > 0 else ""
        proposal = Proposal(source=source, target=target, scoring=scoring, reason=why,
                            predicted_s=saving, cost_s=self.switches.cost(kind))  # fmt: skip
        surely = replace(proposal, predicted_s=saving - DOUBT * error)
        return proposal if surely.predicted_s > 0 and self._gain(surely) > 0 else None

    def _now(self, counts: Mapping[str, int], scoring: Scoring) -> tuple[Scoring, float]:
        """The better way of scoring without a move, and its step: what it alone saves is no move's credit."""
        both: tuple[Scoring, ...] = ("colocated", "decoupled")
        ways = both if self.bounds.scoring == "auto" else (scoring,)
        steps = {way: self.balance.step_s(counts, way) for way in ways}
        best = min(steps, key=lambda way: steps[way])
        return best, steps[best]

    @staticmethod
    def _free(source: str, target: str) -> bool:
        """A spare that begins to generate or score keeps nobody waiting."""
        return source == "spare" and target != "learner"

    def _gain(self, proposal: Proposal) -> float:
        """Seconds won over the horizon."""
        free = self._free(proposal.source, proposal.target)
        switches = 0 if free else 2 if self._undoes(proposal.kind) and not self._shifted else 1
        return proposal.predicted_s * self._horizon() - switches * proposal.cost_s

    def _horizon(self) -> int:
        """Steps over which a move has to earn its cost: a load is expected to last as long as it has lasted.

        At least ``horizon_steps``, and not beyond the end of the run.
        """
        steps = max(self.bounds.horizon_steps, self._step - self._since)
        return min(steps, max(0, self.bounds.steps - self._step)) if self.bounds.steps else steps

    def _cold(self, facts: StepFacts, counts: Mapping[str, int], agreed: str) -> Proposal | None:
        """Before both sides are measured: what serves nobody yet generates; learners stay.

        So does a scorer, if one more generator would shorten the learners' wait by more than it costs to send
        it there and back.
        """
        sources = ["spare"]
        there_and_back = self.switches.cost("scorer>generator") + self.switches.cost("generator>scorer")
        won_s = facts.twt_s / max(1, counts["learner"]) / (counts["generator"] + 1)
        if self.bounds.scoring == "auto" and agreed == "generation" and won_s > there_and_back:
            sources.append("scorer")
        for source in sources:
            if counts[source] > 0 and self._may(source, "generator", facts, counts):
                left = counts["scorer"] - (source == "scorer")
                scoring: Scoring = "colocated" if left == 0 else facts.scoring
                return Proposal(source=source, target="generator", scoring=scoring, reason="cold start",
                                cost_s=self.switches.cost(f"{source}>generator"))  # fmt: skip
        return None

    # -- operator's target --------------------------------------------------------------

    def _toward_target(self, facts: StepFacts, counts: Mapping[str, int]) -> Proposal | None:
        if self.target is None:
            return None
        pair = toward(self.target, counts, self.bounds, facts.unhealthy)
        if pair is None or self.switches.blocked(">".join(pair), facts.step):
            return None
        source, target = pair
        after = {**counts, source: counts[source] - 1, target: counts[target] + 1}
        scoring: Scoring = facts.scoring if after["scorer"] else "colocated"
        if self.bounds.scoring != "auto":
            scoring = self.bounds.scoring
        predicted = 0.0
        if self.balance.known:
            then = self.balance.step_s(after, scoring)
            predicted = self._now(counts, facts.scoring)[1] - then if math.isfinite(then) else 0.0
        return Proposal(source=source, target=target, scoring=scoring, reason="target",
                        predicted_s=predicted if math.isfinite(predicted) else 0.0,
                        cost_s=self.switches.cost(f"{source}>{target}"))  # fmt: skip

    # -- how it went --------------------------------------------------------------------

    def begun(self, proposal: Proposal) -> None:
        """The move is being made; ``decide`` proposes nothing until it is done or undone."""
        self._begun = proposal
        self.switches.begun(
            SwitchRecord(proposal.kind, self._step, proposal.reason, proposal.predicted_s, proposal.cost_s,
                         id=proposal.id)
        )  # fmt: skip

    def regrets(self, proposal: Proposal, counts: Mapping[str, int]) -> bool:
        """It was right when it was proposed, but is not by now: do not begin it.

        A target is met without it, or lacks ranks where it would take one; or the opposite is asked for.
        """
        if self.target is not None:
            pair = toward(self.target, counts, self.bounds)
            return pair is None or pair[1] == proposal.source
        if proposal.source == "spare":
            return False
        opposite = "consumption" if proposal.target == "generator" else "generation"
        return self._asked == opposite and self._streak >= self.bounds.agree_steps

    def resumed(self, proposal: Proposal) -> None:
        """The move was begun by an earlier process, which may have ended before its ``state`` told so."""
        if self.switches.under_way != proposal.id:
            self.begun(proposal)
        self._begun = proposal

    def switched(self, kind: str, seconds: float, move: int = 0) -> None:
        """What a switch of ``kind`` took; later costs are the mean of the last three."""
        self.switches.switched(kind, seconds, move)

    def done(self, proposal: Proposal) -> None:
        """The rank serves its new role from now on; a step that contains the switch is not read."""
        self._begun, self._noticed, self._shifted = None, False, False
        self._counts = {}
        self.switches.done(proposal.kind, proposal.id)
        self._skip = int(self.switches.cost(proposal.kind) > LONG_SWITCH * self._step_s)

    def undone(self, proposal: Proposal, again: bool = False) -> None:
        """Everything is as before the move. It failed, so its kind backs off, unless ``again``."""
        self._begun = None
        self._skip = 1
        self._streak, self._asked = 0, ""
        self.switches.undone(proposal.kind, self._step, again, proposal.id)

    def _notice_change(self, counts: dict[str, int]) -> None:
        """Ranks came or went without a move: what was measured no longer compares."""
        if self._counts and counts != self._counts:
            self.switches.unsettled("ranks were lost or joined")
            self._streak, self._asked = 0, ""
        self._counts = counts

    def state(self) -> dict[str, Any]:
        """What a restarted controller should remember, as plain values: switch ledger, target and step."""
        return {"target": self.target, "step": self._step, "switches": self.switches.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over ``state()`` of an earlier process; works are measured anew."""
        self.target = state["target"]
        self._step = state.get("step", 0)  # an older journal does not tell
        self.switches.load(state["switches"])
