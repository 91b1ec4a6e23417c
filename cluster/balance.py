"""What a step would take with other counts of ranks: the cost model behind ``cluster/ranks.py``. Pure.

Works are measured in rank-seconds per step and do not depend on the split. With ``n_g``, ``n_l``, ``n_s``
generators, learners and scorers, the model says::

    generate = L + W_g / n_g                     L: the part of generating that more ranks do not shorten
    train    = W_t / S(n_l)                      S(n) = n * scaling ** log2(n), as in a profile
               max with W_s / n_s                decoupled: scorers run beside the learners
               plus W_s / S(n_l) + swap          colocated: the same ranks, one after the other
    step     = max(generate, train) + serial * min(generate, train) + fixed

``serial`` is 0 when generation and training overlap fully and 1 when they alternate (staleness bound 0);
it and ``fixed`` are measured, so one formula covers both ends. ``L`` is there because generators share out
sequences, not work: a decode iteration takes ``base + b * per_sequence``, so a fixed number of sequences
spread over ``n`` ranks generates at ``C / (base + C * per_sequence / n)``, and of the time only the share
``u`` (*saturation*) of the term with ``b`` shrinks with ``n``; the longest episode does not shrink at all.
Either the caller knows ``u``, or ``Saturation`` learns it from what happened when the count changed.

Generators that the staleness bound holds back are busy all the same, with fewer sequences each: groups that
lie ready beyond the next batch (the *surplus*) could be rolling out instead. Only the share ``1 - u`` of a
group's time shrinks when more roll out together, so a step's generation could take
``u + (1 - u) * open / (open + surplus)`` of what it took.

While the ready queue fills or drains, generators make more or fewer groups than a step trains. What the
trained ones took is the busy time times trained / made, ``made = trained + growth of the queue``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

ALPHA = 0.3
"""Weight of a new step in the running means: three steps carry two thirds."""
JUMP = 0.3
"""Two steps in a row that leave the mean by more than this share, on one side, are a new load."""

POINTS = 24
"""Steps that the saturation is learned from."""
BELIEF = 0.5
"""Standard deviation of the belief in the slope, as a share of it: what is seen counts by its own noise."""
LEAST_NOISE = 0.05
"""Step times are never known better than to this share."""

UNKNOWN = 0.5
"""Saturation, as far as throttled generators go, until it is learned: decoding reads the weights once for all
sequences, which nothing shortens, and each sequence's cache."""

Phase = Literal["train", "eval", "cold"]
Scoring = Literal["decoupled", "colocated"]


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
    generated_tokens: int = 0
    head_age_s: float = 0.0  # age of the oldest ready group when the batch formed
    groups: int = 0  # trained in this step; 0 if unknown
    depth: int = 0  # ready groups at the commit, after those of the batch are gone
    open: int = 0  # groups rolling out at the commit; 0 if unknown
    most: int = 0  # groups that could roll out at once, were it not for the staleness bound; 0: no limit
    fill: float = 1.0  # groups in the batch / run.groups_per_step
    saturation: float | None = None  # u of the module docstring; None: to be learned
    phase: Phase = "train"  # cold: the pipeline still fills; eval: held-out tasks run
    scoring: Scoring = "decoupled"  # how this step's batch was scored


class Estimate:
    """A running mean that follows a new load after two steps and shrugs off one odd step."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._strays: list[float] = []

    def add(self, seen: float) -> bool:
        """Take one step's figure; True when it completes a jump to a new load."""
        if self.value is None:
            self.value = seen
            return False
        away = seen - self.value
        if abs(away) > JUMP * max(abs(self.value), 1e-9):
            same_side = [s for s in self._strays if (s > self.value) == (away > 0)]
            self._strays = [*same_side, seen]
            if len(self._strays) >= 2:
                self.value = math.fsum(self._strays) / len(self._strays)
                self._strays = []
                return True
        else:
            self._strays = []
        self.value += ALPHA * away
        return False

    def rescale(self, factor: float) -> None:
        """The unit has changed."""
        self._strays = [stray * factor for stray in self._strays]
        if self.value is not None:
            self.value *= factor

    def get(self) -> float:
        """The mean; 0 before the first step."""
        return self.value if self.value is not None else 0.0


class Saturation:
    """Share of the generation time that more generators shorten, from (generators, seconds) of past steps.

    A regression of seconds on ``1 / generators`` that is drawn towards what was believed before: with few
    points, noisy ones, or counts that hardly differed, the belief stays. It begins at 1 (all of it):
    the first move corrects it.
    """

    def __init__(self) -> None:
        self.share = 1.0  # at the present reference count
        self.reference = 0  # generators at the first step
        self.learned = False  # there were steps with different counts
        self._prior = 1.0  # belief before the points
        self._points: list[tuple[int, float]] = []

    def scale(self, generators: int) -> float:
        """Generation time with ``generators``, in units of that with the reference count."""
        return 1 - self.share + self.share * self.reference / generators

    def add(self, generators: int, seconds: float) -> None:
        """One step took so long to generate."""
        self.reference = self.reference or generators
        if len(self._points) >= POINTS:
            self._prior, self._points = self.share, self._points[POINTS // 2 :]
        self._points.append((generators, seconds))
        x = [self.reference / n for n, _ in self._points]
        y = [seconds for _, seconds in self._points]
        mean_x, mean_y = fmean(x), fmean(y)
        spread = math.fsum((a - mean_x) ** 2 for a in x)
        if mean_y <= 0 or spread <= 0 or len(x) < 4:
            return
        believed = self._prior * mean_y / (1 - self._prior + self._prior * mean_x)
        seen = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        rest = math.fsum((b - mean_y) ** 2 for b in y) - seen * seen / spread
        noise = max(LEAST_NOISE**2, rest / (len(x) - 2) / mean_y**2)
        weight = noise / BELIEF**2
        slope = min(mean_y / mean_x, max(0.0, (seen + weight * believed) / (spread + weight)))
        self.share = min(1.0, slope / (slope + mean_y - slope * mean_x))
        self.learned = True

    def shifted(self) -> None:
        """A new load: keep the belief and the two steps that showed it."""
        self._prior, self._points = self.share, self._points[-2:]


@dataclass
class Balance:
    """The works of the present load, and the step time that they give under any split."""

    scaling: float = 0.97  # of learner ranks, per doubling
    swap_s: float = 0.0  # seconds that colocated scoring adds to a step by swapping models
    generation: Estimate = field(default_factory=Estimate)  # seconds with the reference count
    saturation: Saturation = field(default_factory=Saturation)
    training: Estimate = field(default_factory=Estimate)
    scoring: Estimate = field(default_factory=Estimate)
    serial: Estimate = field(default_factory=Estimate)
    fixed: Estimate = field(default_factory=Estimate)
    depth: int | None = None  # ready groups at the end of the last step

    @property
    def known(self) -> bool:
        """Both sides have been measured."""
        return self.generation.get() > 0 and self.training.get() > 0

    def speed(self, ranks: int) -> float:
        """How many single learner ranks a group of ``ranks`` is worth."""
        return ranks * self.scaling ** math.log2(ranks) if ranks > 0 else 0.0

    def observe(self, facts: StepFacts, counts: Mapping[str, int]) -> bool:
        """Take a step made with ``counts``; True when the load has just shifted."""
        generators, learners = max(1, counts["generator"]), max(1, counts["learner"])
        seconds = facts.generator_busy_s * self._trained_share(facts) / generators
        self._learn_saturation(facts, generators, seconds)
        seconds *= self._unthrottled(facts)
        efficiency = self.speed(learners) / learners
        shifted = self.generation.add(seconds / self.saturation.scale(generators))
        shifted |= self.training.add(facts.learner_busy_s * efficiency)
        shifted |= self.scoring.add(facts.scorer_busy_s)
        if shifted:
            self.saturation.shifted()
        self.fixed.add(facts.sync_s)
        if facts.phase == "train":
            sides = sorted((self._generate(counts), self._train(counts, facts.scoring)))
            rest = facts.step_s - facts.sync_s - sides[1]
            if 0 < sides[0] < math.inf and sides[1] < math.inf:
                self.serial.add(min(1.0, max(0.0, rest / sides[0])))
        return shifted

    def _learn_saturation(self, facts: StepFacts, generators: int, seconds: float) -> None:
        """A belief that changes does not change what the present count takes."""
        saturation = self.saturation
        before = saturation.scale(generators) if saturation.reference else 1.0
        if facts.saturation is not None:
            saturation.reference = saturation.reference or generators
            saturation.share = min(1.0, max(0.0, facts.saturation))
        elif facts.phase != "cold":
            saturation.add(generators, seconds)
        else:
            saturation.reference = saturation.reference or generators
        self.generation.rescale(before / saturation.scale(generators))

    def _trained_share(self, facts: StepFacts) -> float:
        """Groups trained / groups made in the step; 1 if unknown."""
        before = 0 if facts.step == 1 else self.depth
        self.depth = facts.depth
        if before is None or facts.groups <= 0:
            return 1.0
        made = facts.groups + facts.depth - before
        return min(2.0, max(0.5, facts.groups / made)) if made > 0 else 2.0

    def _unthrottled(self, facts: StepFacts) -> float:
        """Generation time if the bound let as many groups roll out as there is room for, over what it was."""
        surplus = facts.depth - facts.groups
        if facts.open <= 0 or facts.groups <= 0 or surplus <= 0:
            return 1.0
        could = facts.open + surplus
        could = max(facts.open, min(could, facts.most)) if facts.most else could
        known = self.saturation.learned or facts.saturation is not None
        share = self.saturation.share if known else UNKNOWN
        return share + (1 - share) * facts.open / could

    def step_s(self, counts: Mapping[str, int], scoring: Scoring) -> float:
        """Predicted seconds of a step; infinite where a needed role has no rank."""
        generate, train = self._generate(counts), self._train(counts, scoring)
        longer, shorter = max(generate, train), min(generate, train)
        return longer if longer == math.inf else longer + self.serial.get() * shorter + self.fixed.get()

    def _generate(self, counts: Mapping[str, int]) -> float:
        generators = counts["generator"]
        return self.generation.get() * self.saturation.scale(generators) if generators > 0 else math.inf

    def _train(self, counts: Mapping[str, int], scoring: Scoring) -> float:
        speed = self.speed(counts["learner"])
        if speed <= 0:
            return math.inf
        train, score = self.training.get() / speed, self.scoring.get()
        if score <= 0:
            return train
        if scoring == "colocated":
            return train + score / speed + self.swap_s
        scorers = counts["scorer"]
        return max(train, score / scorers) if scorers > 0 else math.inf
