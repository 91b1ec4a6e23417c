"""What a step would take with other counts of ranks: the cost model behind ``cluster/ranks.py``. Pure.

With ``n_g``, ``n_l``, ``n_s`` generators, learners and scorers, ``o`` groups in flight and batches of ``B``
groups, the model says::

    generate = B l / o + B w / n_g           a group's own time, and its share of ranks that work for all
    train    = W_t / S(n_l)                  S(n) = n * scaling ** log2(n), as in a profile
               max with W_s / n_s            decoupled: scorers run beside the learners
               plus W_s / S(n_l) + swap      colocated: the same ranks, one after the other
    step     = max(generate, train) + serial * min(generate, train) + fixed

``l``, ``w`` (cluster/works.py) and the works ``W`` in rank-seconds a step do not depend on the split.
``serial`` is 0 when generation and training overlap fully and 1 when they alternate (staleness bound 0);
it and ``fixed`` are measured, so one formula covers both ends.

``o`` follows from the staleness bound: it admits so many groups that at a commit ``P`` are in flight or
ready, and a batch more once the new weights are out. Learners that set the pace have the next batch ready
when they begin, so on average ``P - B/2`` are in flight, less what lies ready beyond that batch; then
generators are held back without standing still, with fewer sequences each. If generators set the pace, up to
``P + B/2`` are, less what becomes ready while the last of a batch's ``parts`` is trained (all of it where a
batch is formed whole). Groups beyond what the generators' KV memory holds do not count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Literal, NamedTuple

from cluster.running import ALPHA, JUMP, Estimate, Ratio
from cluster.works import Generation, Rows

SLOWLY = 0.1
"""Weight of a new step in ``serial``: it belongs to the job, not to the load, and waves of groups blur it."""

LEAD = 0.1
"""Generators that take longer than learners by more than this share are not held back: what lies ready then
came in a wave, and waits for the rest of its batch."""
FULL = 0.8
"""Of the KV memory: what more groups side by side gain beyond it goes in prefixes computed again."""
MOST_FLYING = 4.0
"""Times as many groups in flight as were seen: what more of them would do is not believed further."""

Phase = Literal["train", "eval", "cold"]
Scoring = Literal["decoupled", "colocated"]
Newcomers = Literal["", "generators", "learners"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What was seen between two commits. Rank-seconds are summed over the ranks of a role."""

    step: int  # the step that was just committed
    step_s: float  # seconds between its commit and the one before
    rwt_s: float  # generator rank-seconds waited, all causes but sync and switches
    twt_s: float  # learner rank-seconds waited for data (scorers not counted)
    signal_s: float = 0.0  # learner rank-seconds waited for scores
    generator_busy_s: float  # rank-seconds with at least one request running
    learner_busy_s: float  # rank-seconds training (without colocated scoring)
    scorer_busy_s: float = 0.0  # rank-seconds scoring, wherever it ran
    sync_s: float = 0.0  # seconds of the step in which nobody worked: publish, load, switch
    generated_tokens: int = 0  # sampled in the step
    trained_tokens: int = 0  # sampled tokens of the batch; 0 if unknown
    grown_tokens: int = 0  # that turns of the step added to rows, sampled or not
    row_tokens: int = 0  # of the batch's rows, sampled or not; 0 if unknown
    head_age_s: float = 0.0  # age of the oldest ready group when the batch formed
    groups: int = 0  # trained in this step; 0 if unknown
    depth: int = 0  # ready groups at the commit, after those of the batch are gone
    open: int = 0  # groups rolling out at the commit; 0 if unknown
    most: int = 0  # groups that could roll out at once, were it not for the staleness bound; 0: no limit
    demand: float = 0.0  # KV memory that tasks wanted, as a share of all that may be promised; 0: unknown
    unhealthy: int = 0  # generators that serve nobody now
    queued: float = 0.0  # requests that wait for a place at generators, per running one
    parts: int = 1  # of a batch, each trained once it is ready (a burst is one); 1: it is formed whole
    fill: float = 1.0  # groups in the batch / run.groups_per_step
    phase: Phase = "train"  # cold: the pipeline still fills; eval: held-out tasks run
    scoring: Scoring = "decoupled"  # how this step's batch was scored


@dataclass(frozen=True)
class Sample:
    """One step as the switch ledger keeps it: rates and works, from which a step of either split follows."""

    counts: Mapping[str, int]
    scoring: Scoring
    busy_s: float  # of each generator
    made: float  # tokens, or groups where tokens are not told
    batch: float  # tokens or groups of the batch
    training: float  # rank-seconds, of one learner alone
    score: float  # rank-seconds
    pure: bool = True  # what was trained and what was made are of the same load


class Saving(NamedTuple):
    """What a change of counts saved."""

    realised_s: float  # a step
    noise_s: float | None  # its standard error; None where single steps say nothing of noise
    expected_s: float  # what the model says of it now


@dataclass
class Balance:
    """The works of the present load, and the step time that they give under any split."""

    scaling: float = 0.97  # of learner ranks, per doubling
    swap_s: float = 0.0  # seconds that colocated scoring adds to a step by swapping models
    generation: Generation = field(default_factory=Generation)
    training: Estimate = field(default_factory=Estimate)
    scoring: Estimate = field(default_factory=Estimate)
    rows: Rows = field(default_factory=Rows)
    overlap: Ratio = field(default_factory=Ratio)  # of a step's rest to its shorter side
    fixed: Estimate = field(default_factory=Estimate)
    sample: Sample | None = None  # of the last step
    _last: StepFacts | None = None  # the step before, or one that was not read
    _told: bool = False  # the number of groups in flight is
    _held: bool = False  # learners set the pace
    _room: Ratio = field(default_factory=Ratio)  # groups that one generator's memory holds
    _found: Newcomers = ""  # the last shift

    @property
    def known(self) -> bool:
        """Both sides have been measured."""
        return self.training.get() > 0 and self.generation.seconds(1, 0.0) > 0

    def speed(self, ranks: int) -> float:
        """How many single learner ranks a group of ``ranks`` is worth."""
        return ranks * self.scaling ** math.log2(ranks) if ranks > 0 else 0.0

    def passed(self, facts: StepFacts) -> None:
        """A step that is not read: only where it left the queue counts."""
        self._last = facts

    def observe(self, facts: StepFacts, counts: Mapping[str, int]) -> Newcomers:
        """Take a step made with ``counts``; tells who has just been found to have a new load."""
        generators, learners = max(1, counts["generator"]), max(1, counts["learner"])
        self._told = self._told or facts.open > 0
        made, ended = self._made(facts)
        before = self._last.open if self._last is not None else 0
        self._last = facts
        pipeline = facts.open + facts.depth
        alpha = facts.groups / (pipeline + facts.groups) if pipeline and facts.groups else ALPHA
        seconds = facts.generator_busy_s / generators
        self._room.add((facts.open + ended / 2) / generators, facts.demand, alpha)
        flying = self._in_flight(facts.open + ended / 2, generators)
        shifted = self.generation.add(
            seconds, generators, flying, (max(1, facts.groups), made, facts.depth, facts.open),
            (facts.trained_tokens, facts.generated_tokens), alpha, facts.queued,
        )  # fmt: skip
        work = facts.learner_busy_s * self.speed(learners) / learners
        grown = self.training.add(work)
        self.scoring.add(facts.scorer_busy_s)
        batch = (work, facts.scorer_busy_s, facts.row_tokens, max(1, facts.groups))
        self.rows.add(batch, (facts.grown_tokens, made), (before, facts.open), shifted)
        self.fixed.add(facts.sync_s)
        told = facts.trained_tokens > 0 and facts.generated_tokens > 0
        self.sample = Sample(
            dict(counts), facts.scoring, seconds, facts.generated_tokens if told else made,
            facts.trained_tokens if told else max(1, facts.groups), work, facts.scorer_busy_s,
            self.generation.mixed <= 0,
        )  # fmt: skip
        generate = self.generation.seconds(generators, flying)
        self._held = generate <= (1 + LEAD) * self._train(counts, facts.scoring)
        if facts.phase == "train":  # what was trained in it, not what a new load will take
            train = self._trained(counts, facts.scoring, self.training.get(), self.scoring.get())
            sides = sorted((generate, train))
            rest = facts.step_s - facts.sync_s - sides[1]
            if 0 < sides[0] < math.inf and sides[1] < math.inf:
                self.overlap.add(rest, sides[0], SLOWLY)
        found: Newcomers = "generators" if shifted else "learners" if grown else ""
        self._found = found or self._found
        return found

    def _made(self, facts: StepFacts) -> tuple[float, float]:
        """Groups made in the step, those in flight counted half; groups that became ready."""
        if facts.groups <= 0:
            return 1.0, 1.0
        last = self._last
        if last is None and facts.step > 1:
            return float(facts.groups), float(facts.groups)
        depth, flying = (last.depth, last.open) if last is not None else (0, 0)
        ended = max(0.0, facts.groups + facts.depth - depth)
        return max(0.0, ended + (facts.open - flying) / 2), ended

    def _in_flight(self, groups: float, generators: int) -> float:
        """Of so many that the bound lets in, those that make progress; 0 if their number is not told.

        What the memory of ``generators`` does not hold queues there, or is parked and computed again: it
        makes nobody faster.
        """
        if not self._told:
            return 0.0
        most, batch = (self._last.most, self._last.groups) if self._last is not None else (0, 0)
        room = FULL * self._room.get() * generators
        return max(1.0, below(min(groups, most or math.inf), batch, room or math.inf))

    # -- predictions --------------------------------------------------------------------

    def step_s(
        self, counts: Mapping[str, int], scoring: Scoring, generate: float = 1.0, train: float = 1.0
    ) -> float:
        """Predicted seconds of a step; infinite where a needed role has no rank.

        ``generate``, ``train``: factors of the measured works.
        """
        work, score = self._works()
        seconds = self._trained(counts, scoring, train * work, train * score)
        return self._step(generate * self._generate(counts, seconds), seconds)

    def saving_error(
        self, now: tuple[Mapping[str, int], Scoring], then: tuple[Mapping[str, int], Scoring]
    ) -> float:
        """Standard error, by the noise of the measured works, of the seconds that one split saves another."""
        errors = ((self.generation.error(), 0.0), (0.0, self.training.error()))
        sides = []
        for generate, train in errors:
            up, down = (
                self.step_s(*now, 1 + sign * generate, 1 + sign * train)
                - self.step_s(*then, 1 + sign * generate, 1 + sign * train)
                for sign in (1, -1)
            )
            sides.append((up - down) / 2)
        return math.hypot(*sides)

    @property
    def confirmed(self) -> bool:
        """The newest step made it certain that the last shift found was one."""
        return self.generation.confirmed if self._found == "generators" else self.training.confirmed

    def held_back(self, counts: Mapping[str, int], scoring: Scoring) -> float:
        """Share of the generators' busy time that the staleness bound costs, because of slower learners."""
        last, generators = self._last, counts["generator"]
        if last is None or not self._told or last.groups <= 0 or generators <= 0:
            return 0.0
        now = self.generation.seconds(generators, self._in_flight(last.open + last.groups / 2, generators))
        free = self._generate(counts, self._train(counts, scoring))
        return max(0.0, 1 - free / now) if now > 0 else 0.0

    @property
    def serial(self) -> float:
        """Share of the shorter side that does not overlap with the longer one."""
        return min(1.0, max(0.0, self.overlap.get()))

    def _step(self, generate: float, train: float) -> float:
        longer, shorter = max(generate, train), min(generate, train)
        if longer == math.inf:
            return longer
        return longer + self.serial * shorter + self.fixed.get()

    def _generate(self, counts: Mapping[str, int], train: float) -> float:
        """With as many groups in flight as the bound admits once generators set the pace."""
        generators, last = counts["generator"], self._last
        if generators <= 0:
            return math.inf
        if last is None or not self._told:
            return self.generation.seconds(generators, 0.0)
        seen = last.open + last.groups / 2
        most = min(last.open + last.depth + last.groups / 2, MOST_FLYING * seen) if self._held else seen
        flying = most
        for _ in range(4):
            seconds = self.generation.seconds(generators, self._in_flight(flying, generators))
            if seconds <= 0:
                break
            ready = last.groups * min(1.0, train / seconds) / last.parts
            flying = max(seen, most - ready)
        return seconds

    def _train(self, counts: Mapping[str, int], scoring: Scoring) -> float:
        return self._trained(counts, scoring, *self._works())

    def _works(self) -> tuple[float, float]:
        """Training and scoring work of a batch of the present load, even if none has been trained yet."""
        last = self._last
        if self.generation.mixed > 0 and last is not None and last.groups > 0 and self.rows.known:
            return self.rows.works(last.groups)
        return self.training.get(), self.scoring.get()

    def _trained(self, counts: Mapping[str, int], scoring: Scoring, work: float, score: float) -> float:
        speed = self.speed(counts["learner"])
        if speed <= 0:
            return math.inf
        train = work / speed
        if score <= 0:
            return train
        if scoring == "colocated":
            return train + score / speed + self.swap_s
        scorers = counts["scorer"]
        return max(train, score / scorers) if scorers > 0 else math.inf

    # -- what was realised --------------------------------------------------------------

    def saved(self, before: Sequence[Sample], after: Sequence[Sample]) -> Saving | None:
        """What the change of counts between two windows of steps saved a step.

        The step that each split's measured rates sustain under the later load: generators' seconds per token
        as they were seen in both windows, times the tokens of a batch as it is now; training and scoring
        work as they are now, on the ranks of either split. None if the generators' loads differ.
        """
        pure, earlier = [one for one in after if one.pure] or after, [one for one in before if one.pure]
        batch = fmean(one.batch for one in pure)
        if earlier and abs(fmean(one.batch for one in earlier) / batch - 1) > JUMP:
            return None
        work, score = fmean(one.training for one in pure), fmean(one.score for one in pure)
        steps, model, noises = [], [], []
        for window in (before, after):
            counts, scoring = window[-1].counts, window[-1].scoring
            rate, error = _rate(window)
            generate, train = rate * batch, self._trained(counts, scoring, work, score)
            steps.append(self._step(generate, train))
            model.append(self.step_s(counts, scoring))
            if error is not None:  # it matters where generators set the pace
                noises.append(error * batch if generate > train else 0.0)
        noise = math.hypot(*noises) if len(noises) == 2 else None
        return Saving(steps[0] - steps[1], noise, model[0] - model[1])


def below(mean: float, batch: float, room: float) -> float:
    """Mean of what fits into ``room``, of groups in flight that fall from half a batch above their mean to as
    much below it: a batch enters at once."""
    high, low = mean + batch / 2, max(0.0, mean - batch / 2)
    if room >= high:
        return mean
    if room <= low:
        return room
    full = (high - room) / (high - low)  # share of the time
    return full * room + (1 - full) * (room + low) / 2


def _rate(window: Sequence[Sample]) -> tuple[float, float | None]:
    """A generator's busy seconds per unit that all make, and its standard error."""
    made = math.fsum(one.made for one in window)
    seconds = math.fsum(one.busy_s for one in window) / made if made > 0 else 0.0
    rates = [one.busy_s / one.made for one in window if one.made > 0]
    return seconds, math.sqrt(variance(rates) / len(rates)) if len(rates) > 1 else None
