"""A discrete-event simulation of a whole job: scenario in, result out. Pure: no clock, no random numbers.

::

    admit (capacity rule) -> tasks play turns -> group ready -> claimed, scored, trained -> commit
         ^                                                                                   |
         +------- acknowledged <- generators pause and load <- publish <- barrier (moves) <--+

The decisions are those of the live system: cluster/staleness.py admits, cluster/admission.py serves,
cluster/pipeline.py chooses the scoring, cluster/ranks.py moves ranks. What is modelled are the services
(cluster/sim/service.py and trainer.py), and the order of things in learner/loop.py.

Rollout modes. *stream*: groups are admitted one by one under the capacity rule. *one_step_off*: a whole
batch is generated while the one before it is trained; then weights are exchanged. *sync*: all ranks
generate a batch, then all train it; both switches cost ``scorer.swap_s``.

An **event** is one timed change of state: the end of a prompt's computation, the end of a turn, a
preemption, an environment that answers, a group scored, a micro-batch or burst trained, an update, a
publication, weights loaded, a switch made, a fault. To look at a generator that has nothing yet is none.

Why a generator waits (RWT): *sync* loads weights, *switch* changes its role, *eval* others still evaluate,
*capacity* the staleness bound admits nothing more, *no_work* environments have the tasks. Why learners and
scorers wait (TWT): *data*, *signal* (scores), *sync* (publication), *switch*.
"""

import gc
import itertools
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from cluster.balance import Scoring
from cluster.pipeline import Measured, ScoringChooser, ScoringFacts
from cluster.sim.figures import Figures
from cluster.sim.fleet import BUSY, GENERATOR, LEARNER, SCORER, Fleet, Rank
from cluster.sim.moves import Faults, Lender, Moves
from cluster.sim.rollout import Rollout
from cluster.sim.scenario import Result, Scenario, check
from cluster.sim.tasks import Event, Group
from cluster.sim.trainer import Trainer
from cluster.staleness import allowance, lag, smallest_batch


def run(scenario: Scenario) -> Result:
    """Simulate. The same scenario gives the same result, but for ``wall_s``.

    Raises ValueError for a scenario that cannot run, RuntimeError when nothing can happen any more (all
    ranks of a role are lost for good, say).
    """
    begun = time.perf_counter()
    collects = gc.isenabled()
    gc.disable()  # a run makes millions of small objects and no garbage in cycles
    try:
        result = World(scenario).run()
    finally:
        if collects:
            gc.enable()
    result.wall_s = time.perf_counter() - begun
    return result


class World:
    """One run; see the module docstring."""

    def __init__(self, scenario: Scenario) -> None:
        check(scenario)
        self.scenario = scenario
        self.result = Result(scenario)
        self.heap: list[Event] = []
        self.serial = itertools.count(1).__next__  # ties are broken by the order of entry
        policy, split = scenario.policy, scenario.split
        self.hybrid = policy.rollout == "sync"
        self.blocks = policy.rollout != "stream"
        learners, scorers = (0, 0) if self.hybrid else (split.learners, split.scorers)
        self.fleet = Fleet(split.generators, learners, scorers, self.result, scenario.trace)
        self.rollout = Rollout(scenario, self.heap, self.serial, self.ready, self.idle, self.busy, self.admit)
        self.trainer = Trainer(
            scenario, split.generators if self.hybrid else learners, scorers, self.after, self.learners_wait,
            self.scorers_wait, self.dropped, self.trained,
        )  # fmt: skip
        if scenario.profile.scorer.passes and policy.scoring in ("auto", "decoupled"):
            self.rollout.turned = self.trainer.pool.turned
        self.figures = Figures(scenario, self.result, self.fleet, self.rollout, self.trainer)
        self.version = 0  # published
        self.admitted = 0  # groups
        self.lost = 0
        self.groups_trained = 0
        self.marks: dict[int, int] = {}
        self.loading = False
        self.evaluating = 0  # tasks left
        self.evaluated_at = 0
        self.block = 0  # batches begun, in block modes
        self.block_left = 0
        self.blockers: set[str] = set()
        self.stopped = False
        self.chooser = ScoringChooser("decoupled" if scorers else "colocated")
        self.measured = Measured()
        if policy.scoring == "auto":
            self.trainer.wanted = self.chooser.mode
        self.moves = Moves(self) if policy.roles == "elastic" else None
        self.lender = Lender(self) if policy.roles == "lending" else None
        self.faults = Faults(self)

    # -- the loop -----------------------------------------------------------------------------

    def after(self, t: float, handler: Callable[[float, Any], None], argument: Any) -> None:
        """Enter an event."""
        heappush(self.heap, (t, self.serial(), handler, argument))

    def run(self) -> Result:
        """Until ``steps`` updates are committed."""
        self._begin()
        heap, pops, now = self.heap, 0, 0.0
        while not self.stopped:
            if not heap:
                raise RuntimeError(
                    f"nothing can happen any more at {now:.1f} s: version {self.trainer.version} of "
                    f"{self.scenario.steps}, {len(self.trainer.ready)} groups ready, {self.fleet.counts()}"
                )
            now, _, handler, argument = heappop(heap)
            handler(now, argument)
            pops += 1
        if self.moves is not None:
            self.result.moves = self.moves.ledger()
        elif self.lender is not None:
            self.result.moves = self.lender.loans
        return self.figures.finish(now, pops, self.admitted, self.lost, self.groups_trained)

    def _begin(self) -> None:
        for rank in self.fleet.of(GENERATOR):
            self.generates(0.0, rank)
        self.scorers_wait(0.0, "data")
        if self.hybrid:
            self.blockers.add("generate")
            self.trainer.blocked = "generate"  # the step opens when the batch is there
        else:
            self.trainer.open(0.0)
        self.admit(0.0)

    # -- producing ----------------------------------------------------------------------------

    def allowed(self) -> int:
        """Groups that may be admitted now."""
        scenario = self.scenario
        size = scenario.groups_per_step
        steps = scenario.steps if scenario.drain else 1 << 40
        if self.blocks:
            behind = 0 if self.hybrid else 1
            if self.block_left or self.loading or self.block >= steps:
                return 0
            return size if self.rollout.version >= max(0, self.block - behind) else 0
        progress = (self.trainer.version, self.groups_trained) if scenario.min_groups_per_step else None
        return allowance(
            max_lag=scenario.policy.max_lag, groups_per_step=size, acknowledged=self.rollout.version,
            steps=steps, admitted=self.admitted, lost=self.lost, progress=progress,
        )  # fmt: skip

    def admit(self, now: float) -> None:
        """Start groups, as far as the bound and the environments allow."""
        scenario, rollout = self.scenario, self.rollout
        slots, members = scenario.env_slots, scenario.group_size
        count = self.allowed()
        if self.blocks and count:
            self.block += 1
            self.block_left = count
            for _ in range(count):
                self._start(now)
            return
        while count > 0 and not (slots and rollout.in_flight + members > slots):
            self._start(now)
            count -= 1

    def _start(self, now: float) -> None:
        self.rollout.start(now, self.admitted)
        self.admitted += 1
        if self.scenario.min_groups_per_step:
            self.marks[self.rollout.version] = self.admitted - self.lost

    def generates(self, now: float, rank: Rank) -> None:
        """The rank enters the generator table."""
        generator = self.rollout.join(now, rank.index)
        self.fleet.set(rank, now, BUSY if not generator.model.idle else self.why_idle())

    def why_idle(self) -> str:
        """Cause of a generator's wait that begins now."""
        if self.evaluating:
            return "eval"
        return "capacity" if self.allowed() <= 0 else "no_work"

    def idle(self, now: float, index: int) -> None:
        """A generator has run dry."""
        self.fleet.set(self.fleet.ranks[index], now, self.why_idle())

    def busy(self, now: float, index: int) -> None:
        """A generator has work."""
        rank = self.fleet.ranks[index]
        if rank.cause != "sync":
            self.fleet.set(rank, now, BUSY)

    def ready(self, now: float, group: Group) -> None:
        """All members of a group have ended."""
        if group.evaluation:
            self.evaluating -= 1
            if not self.evaluating:
                self._load_if_newer(now)
            return
        self.figures.group_ready(now, group)
        self.trainer.add(now, group)
        if self.lender is not None:
            self.after(now, self.lender.arrived, None)  # not within a generator's own event
        if self.blocks:
            self._block_progress(now)
        self.admit(now)

    def _block_progress(self, now: float) -> None:
        self.block_left -= 1
        if self.block_left:
            return
        if self.hybrid:
            self._all_wait(now, "switch")
            self.after(now + self.scenario.profile.scorer.swap_s, self._train_all, None)
        else:
            self._load_if_newer(now)

    def _train_all(self, now: float, _: object) -> None:
        self._all_wait(now, BUSY)
        self.let_go(now, "generate")

    def _all_wait(self, now: float, cause: str) -> None:
        self.fleet.set_all(self.fleet.of(GENERATOR), now, cause)

    # -- consuming ----------------------------------------------------------------------------

    def learners_wait(self, now: float, cause: str) -> None:
        """What the learners do from now on."""
        self.fleet.set_all(self.fleet.of(GENERATOR if self.hybrid else LEARNER), now, cause)

    def scorers_wait(self, now: float, cause: str) -> None:
        """The same for ranks that only score."""
        ranks = [rank for rank in self.fleet.of(SCORER) if rank.cause != "switch"]
        self.fleet.set_all(ranks, now, cause)

    def dropped(self, now: float, group: Group) -> None:
        """A ready group is too old."""
        self.lost += 1
        self.figures.group_dropped(group)
        self.after(now, self._readmit, None)

    def _readmit(self, now: float, _: object) -> None:
        self.admit(now)

    def trained(self, now: float) -> None:
        """The update is made: commit, barrier, publish."""
        trainer, scenario = self.trainer, self.scenario
        training = trainer.version
        facts, readiness = self.figures.commit(now, training, bool(self.evaluating), self.moves)
        batch = trainer.close()
        assert all(lag(training=training, oldest=g.oldest) <= scenario.policy.max_lag for g in batch)
        self.groups_trained += len(batch)
        trainer.version = training + 1
        if trainer.version >= scenario.steps:
            self.stopped = True
            return
        if scenario.policy.scoring == "auto":
            self._choose_scoring(*readiness)
        self.hold(now, "sync")
        if self.moves is not None:
            self.moves.decide(now, facts)
        self._set_least()
        self.after(now + scenario.profile.sync.publish_s, self._published, None)

    def hold(self, now: float, why: str) -> None:
        """Learners stand still until ``let_go`` of the same reason."""
        self.blockers.add(why)
        self.trainer.blocked = why
        if why != "lent":
            self.learners_wait(now, "sync" if why == "sync" else "switch")

    def let_go(self, now: float, why: str) -> None:
        """A reason is gone; without any, the next step opens (or the held one goes on)."""
        self.blockers.discard(why)
        if self.blockers or self.trainer.learners == 0:
            self.trainer.blocked = min(self.blockers, default="lost")
            return
        self.trainer.blocked = ""
        if self.trainer.open_at >= 0.0:
            self.trainer.pump(now)
        else:
            self.trainer.open(now)

    def _choose_scoring(self, micro: int, ras: int, tprm_s: float) -> None:
        """How the next batch is scored (cluster/pipeline.py)."""
        profile, trainer = self.scenario.profile, self.trainer
        if not profile.scorer.passes:
            return
        full = profile.learner.micro_tokens
        self.measured.observe(
            score_s=full * profile.scorer.passes / profile.scorer.forward_tok_s,
            train_s=full * (1 / profile.learner.forward_tok_s + 1 / profile.learner.backward_tok_s),
            swap_s=profile.scorer.swap_s,
            ahead=trainer.scored_ahead,
        )
        costs = self.measured.costs(trainer.scorers, trainer.learners, trainer.learners)
        facts = None if costs is None else ScoringFacts(micro, ras, tprm_s, costs, self.scenario.gated)
        self.chooser.choose(facts)
        trainer.wanted = self.chooser.mode

    def scored_as(self, scoring: Scoring) -> None:
        """A move, decided together with a way of scoring, was made."""
        if self.scenario.policy.scoring == "auto":
            self.chooser.mode = scoring
            self.trainer.wanted = scoring

    def _set_least(self) -> None:
        scenario = self.scenario
        if not scenario.min_groups_per_step:
            return
        self.trainer.least = smallest_batch(
            max_lag=scenario.policy.max_lag, groups_per_step=scenario.groups_per_step,
            least=scenario.min_groups_per_step, progress=(self.trainer.version, self.groups_trained),
            marks=self.marks,
        )  # fmt: skip
        self.marks = {v: mark for v, mark in self.marks.items() if mark > self.groups_trained}

    # -- weights ------------------------------------------------------------------------------

    def _published(self, now: float, _: object) -> None:
        self.version = self.trainer.version
        if self.hybrid:
            self.blockers.add("generate")
        elif self.lender is not None:
            self.lender.consider(now)
        self.let_go(now, "sync")
        self._load_if_newer(now)
        self.admit(now)

    def _load_if_newer(self, now: float) -> None:
        """Generators load what was published, unless an evaluation pins the weights."""
        held = self.evaluating or self.loading or (self.blocks and self.block_left)
        if held or self.rollout.version >= self.version:
            return
        self.loading = True
        self.rollout.pause(now)
        for index in self.rollout.generators:
            self.fleet.set(self.fleet.ranks[index], now, "sync")
        profile = self.scenario.profile
        seconds = profile.sync.load_s + (profile.scorer.swap_s if self.hybrid else 0.0)
        self.after(now + seconds, self._loaded, self.version)

    def _loaded(self, now: float, version: int) -> None:
        self.loading = False
        self.rollout.sync(now, version)
        if self._evaluation_due(version):
            self._evaluate(now, version)
        self.admit(now)
        for index, generator in self.rollout.generators.items():
            cause = self.why_idle() if generator.model.idle else BUSY
            self.fleet.set(self.fleet.ranks[index], now, cause)
        self._load_if_newer(now)

    def _evaluation_due(self, version: int) -> bool:
        every = self.scenario.eval_every
        return bool(every and self.scenario.eval_tasks) and version // every > self.evaluated_at // every

    def _evaluate(self, now: float, version: int) -> None:
        """Held-out tasks: outside the bound and the slots, before all others at the generators."""
        first = self.evaluated_at * self.scenario.eval_tasks
        self.evaluated_at = version
        self.evaluating = self.scenario.eval_tasks
        for number in range(self.scenario.eval_tasks):
            self.rollout.start(now, first + number, evaluation=True)
