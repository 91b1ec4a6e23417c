"""Scorer-actor pipelining: where and when a batch is scored, and how large it is. Pure.

The order of micro-batches is in ``cluster/micro_order.py``.

A batch is ``M`` micro-batches that become ready one after another. Each is *scored* by a frozen model
(reference, teacher ...), then *trained*. Two ways to share the ranks (TideRL, arXiv:2608.10402, for the
reference model; the cost model is ours, its published form was not available):

- **decoupled**: scorers on ranks of their own, a two-stage flow shop. With ``a_j`` the time micro-batch
  ``j`` is ready, ``f'`` and ``g'`` the seconds all scorers (all learners) need for one::

      r_j = max(r_{j-1}, a_j) + f'        x_j = max(x_{j-1}, r_j) + g'        C_dec = x_M

- **colocated**: the same ranks do both, in bursts: whatever is ready is scored after the frozen model was
  swapped in, and trained after it was swapped out: ``2 * swap + |burst| * (f' + g')`` each.

Scorers of their own score segments as they stream: a share ``ahead`` of a batch, measured, has its scores
when its groups are claimed, and only ``f' * (1 - ahead)`` of a micro-batch is left.

If all is ready at the start, nothing is scored ahead and the split is balanced (``f' = g'``), decoupled
takes one ``f'`` more than the work itself (the *fill* of the pipeline) and colocated two swaps more:
decoupled wins iff ``2 * swap > fill``. If arrivals are slow both end at about ``a_M``; then the better one is
the one that frees ranks for generation.

*Gated* means that no micro-batch is trained before the last one is ready (the batch is formed whole, then
trained), while scorers of their own still score early.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.micro_order import TAIL_SHARE as TAIL_SHARE
from cluster.micro_order import Micro as Micro
from cluster.micro_order import order as order

Mode = Literal["decoupled", "colocated"]
TIE = 0.01
"""Completions that differ by less than this share are equal: measured seconds are no better than that."""
BAND = 0.02
"""Share by which the other mode must win: above ``TIE``, so that two modes that tie do not alternate. Small,
since a change of mode costs nothing by itself, and ``AGREE_STEPS`` and running means damp noise already."""
AGREE_STEPS = 2
"""Steps in a row that must ask for the other mode."""
TRAIN_PER_SCORE = 3.0
"""Forward and backward against forward alone, in operations: the guess until scoring was measured."""

@dataclass(frozen=True)
class Costs:
    """Measured seconds and the ranks there are.

    ``score_s`` and ``train_s``: one full micro-batch on one rank. ``swap_s``: bringing the frozen model
    in, or taking it out, once. ``ahead``: share of a batch that scorers of their own have scored when its
    groups are claimed. ``colocated``: ranks that score and train when colocated; None means
    all, ``scorers + learners`` (fewer are freed for generation).
    """

    score_s: float
    train_s: float
    swap_s: float
    scorers: int
    learners: int
    colocated: int | None = None
    ahead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("score_s", "train_s", "swap_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value!r}: must be finite seconds, 0 or more")
        if not 0 <= self.ahead <= 1:
            raise ValueError(f"ahead = {self.ahead!r}: must be a share from 0 to 1")
        if self.scorers < 0:
            raise ValueError(f"scorers = {self.scorers}: must be 0 or more")
        if self.learners < 1:
            raise ValueError(f"learners = {self.learners}: must be at least 1")
        if self.colocated is not None and self.colocated < 1:
            raise ValueError(f"colocated = {self.colocated}: must be at least 1 (or None for all ranks)")

    @property
    def shared(self) -> int:
        """Ranks of the colocated mode."""
        return self.scorers + self.learners if self.colocated is None else self.colocated

    @property
    def freed(self) -> int:
        """Ranks that colocated scoring leaves to generation."""
        return max(0, self.scorers + self.learners - self.shared)


def arrivals(ras: int, tprm_s: float, count: int) -> tuple[float, ...]:
    """Seconds after the start at which each of ``count`` micro-batches is ready.

    The first ``ras`` are ready at 0, the others follow ``tprm_s`` apart:
    ``a_j = max(0, j - ras + 1) * tprm_s`` for ``j = 0 ..``. Raises ValueError for a negative argument.
    """
    for name, value in (("ras", ras), ("tprm_s", tprm_s), ("count", count)):
        if value < 0:
            raise ValueError(f"{name} = {value}: must be 0 or more")
    return tuple(max(0, j - ras + 1) * tprm_s for j in range(count))


def decoupled_s(
    ready: Sequence[float], costs: Costs, sizes: Sequence[float] | None = None, gated: bool = False
) -> float:
    """Seconds until the last micro-batch is trained, with scorers of their own; infinite without any.

    ``ready``: times in ascending order (see ``arrivals``). ``sizes``: each micro-batch as a share of a
    full one (default: all full).
    """
    if costs.scorers == 0 and costs.score_s > 0:
        return math.inf if ready else 0.0
    score = costs.score_s * (1.0 - costs.ahead) / max(1, costs.scorers)
    train = costs.train_s / costs.learners
    scored = trained = 0.0
    if gated and ready:
        trained = ready[-1]
    for at, size in zip(ready, _sizes(ready, sizes), strict=True):
        scored = max(scored, at) + score * size
        trained = max(trained, scored) + train * size
    return trained


def colocated(
    ready: Sequence[float], costs: Costs, sizes: Sequence[float] | None = None, gated: bool = False
) -> tuple[float, int]:
    """(seconds until the last micro-batch is trained, bursts) when the same ranks score and train.

    Greedy: a burst takes everything that is ready when the ranks are free, and costs
    ``2 * swap + |burst| * (score + train)``.
    """
    shares = _sizes(ready, sizes)
    work = (costs.score_s + costs.train_s) / costs.shared
    if gated and ready:
        return ready[-1] + 2 * costs.swap_s + math.fsum(shares) * work, 1
    now, done, bursts = 0.0, 0, 0
    while done < len(ready):
        now = max(now, ready[done])
        end = done
        while end < len(ready) and ready[end] <= now:
            end += 1
        now += 2 * costs.swap_s + math.fsum(shares[done:end]) * work
        done, bursts = end, bursts + 1
    return now, bursts


def full_batch_s(ready: Sequence[float], costs: Costs, sizes: Sequence[float] | None = None) -> float:
    """Baseline: wait for the whole batch, then one burst on shared ranks."""
    return colocated(ready, costs, sizes, gated=True)[0]


def thrash_s(ready: Sequence[float], costs: Costs, sizes: Sequence[float] | None = None) -> float:
    """Baseline: shared ranks that stream, with both swaps for every micro-batch."""
    work = (costs.score_s + costs.train_s) / costs.shared
    now = 0.0
    for at, size in zip(ready, _sizes(ready, sizes), strict=True):
        now = max(now, at) + 2 * costs.swap_s + work * size
    return now


def _sizes(ready: Sequence[float], sizes: Sequence[float] | None) -> Sequence[float]:
    if sizes is None:
        return (1.0,) * len(ready)
    if len(sizes) != len(ready):
        raise ValueError(f"{len(sizes)} sizes for {len(ready)} micro-batches")
    return sizes


@dataclass(frozen=True)
class ScoringFacts:
    """What the choice for the next batch rests on.

    ``micro_batches``: M of the next batch; ``ras`` of them ready at its start, the others ``tprm_s`` apart.
    """

    micro_batches: int
    ras: int
    tprm_s: float
    costs: Costs
    gated: bool = False


def completions(facts: ScoringFacts) -> tuple[float, float]:
    """(decoupled, colocated) seconds of the next batch under ``facts``."""
    ready = arrivals(min(facts.ras, facts.micro_batches), facts.tprm_s, facts.micro_batches)
    return (
        decoupled_s(ready, facts.costs, gated=facts.gated),
        colocated(ready, facts.costs, gated=facts.gated)[0],
    )


def better(decoupled: float, shared: float, freed: int, tie: float = TIE) -> Mode:
    """The mode that ends first; within ``tie``, the one that frees ranks (decoupled if none does)."""
    if math.isinf(decoupled):
        return "colocated"
    if abs(decoupled - shared) <= tie * max(decoupled, shared):
        return "colocated" if freed > 0 else "decoupled"
    return "decoupled" if decoupled < shared else "colocated"


class ScoringChooser:
    """Chooses the mode per step. It changes when ``agree_steps`` steps in a row prefer the other one.

    The mode in use keeps a lead of ``band``: the other must win by more than that, or tie and free
    ranks. A mode that cannot run (decoupled without scorers) is left at once.
    """

    def __init__(
        self,
        mode: Mode = "decoupled",
        band: float = BAND,
        tie: float = TIE,
        agree_steps: int = AGREE_STEPS,
    ) -> None:
        if mode not in ("decoupled", "colocated"):
            raise ValueError(f"mode {mode!r} is unknown (valid: decoupled, colocated)")
        if not 0 <= tie <= band < 1:
            raise ValueError(f"tie = {tie}, band = {band}: needs 0 <= tie <= band < 1")
        self.mode: Mode = mode
        self.band = band
        self.tie = tie
        self.agree_steps = max(1, agree_steps)
        self._asked = 0

    def choose(self, facts: ScoringFacts | None) -> Mode:
        """The mode of the next batch. None (nothing measured yet) keeps the one in use."""
        if facts is None:
            return self.mode
        decoupled, shared = completions(facts)
        freed = facts.costs.freed
        if math.isinf(decoupled):
            self.mode, self._asked = "colocated", 0
        else:
            asks = self._challenger(decoupled, shared, freed) != self.mode
            self._asked = self._asked + 1 if asks else 0
            if self._asked >= self.agree_steps:
                self.mode = "colocated" if self.mode == "decoupled" else "decoupled"
                self._asked = 0
        return self.mode

    def _challenger(self, decoupled: float, shared: float, freed: int) -> Mode:
        """The mode asked for now, with the lead that the one in use has."""
        best = better(decoupled, shared, freed, self.tie)
        if best == self.mode:
            return best
        gap = abs(decoupled - shared) / max(decoupled, shared)
        if gap > self.band or (best == "colocated" and freed > 0 and gap <= self.tie):
            return best
        return self.mode


def batch_range(
    ready: int,
    gap_s: float,
    train_s_per_group: float,
    b_min: int,
    b_ideal: int,
    fixed_s: float = 0.0,
) -> int:
    """Groups worth starting a step with, in ``b_min..b_ideal``; at least what is ready of them.

    Starting with ``n`` groups trains ``n / (fixed + n * t)`` groups a second, ``fixed_s`` being what a step
    costs whatever its size (weight sync, update, pipeline fill). Waiting ``gap_s`` for one more gives
    ``(n + 1) / (gap + fixed + (n + 1) * t)``, which is more iff ``n * gap < fixed``: so the smallest batch
    worth starting is ``fixed / gap``, rounded up. If groups arrive at least as fast as they
    are trained, waiting costs nothing in the long run and the batch is ``b_ideal``.
    Raises ValueError unless ``1 <= b_min <= b_ideal`` and times are not negative.
    """
    if not 1 <= b_min <= b_ideal:
        raise ValueError(f"b_min = {b_min}, b_ideal = {b_ideal}: needs 1 <= b_min <= b_ideal")
    for name, value in (("gap_s", gap_s), ("train_s_per_group", train_s_per_group), ("fixed_s", fixed_s)):
        if not value >= 0:
            raise ValueError(f"{name} = {value}: must be 0 or more")
    if gap_s <= train_s_per_group:
        return b_ideal
    worth = b_min if math.isinf(gap_s) else math.ceil(min(fixed_s / gap_s, float(b_ideal)))
    return min(b_ideal, max(b_min, worth, ready))


class Measured:
    """Exponentially weighted means: what scoring, training and swapping take (seconds), what is scored ahead.

    ``weight`` is that of the newest value. A value that is None is not known yet.
    """

    def __init__(self, weight: float = 0.3) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight = {weight}: must lie in (0, 1]")
        self.weight = weight
        self.score_s: float | None = None
        self.train_s: float | None = None
        self.swap_s: float | None = None
        self.ahead: float | None = None

    def observe(
        self,
        score_s: float | None = None,
        train_s: float | None = None,
        swap_s: float | None = None,
        ahead: float | None = None,
    ) -> None:
        """Take in seconds per full micro-batch on one rank (swap: once, one way) and the share of a batch
        that was scored when it was claimed; None was not seen."""
        seen = {"score_s": score_s, "train_s": train_s, "swap_s": swap_s, "ahead": ahead}
        for name, value in seen.items():
            if value is None:
                continue
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value!r}: must be finite, 0 or more")
            before = getattr(self, name)
            setattr(self, name, value if before is None else before + self.weight * (value - before))

    def costs(self, scorers: int, learners: int, colocated: int | None = None) -> Costs | None:
        """The costs to choose by; None until training was measured and scoring or a swap too.

        Unmeasured scoring is taken as ``train_s / TRAIN_PER_SCORE``, an unmeasured swap as free (then the
        first colocated batch measures it); without a batch of scorers' own, nothing is scored ahead.
        """
        if self.train_s is None or (self.score_s is None and self.swap_s is None):
            return None
        score = self.train_s / TRAIN_PER_SCORE if self.score_s is None else self.score_s
        ahead = min(1.0, self.ahead or 0.0)
        return Costs(score, self.train_s, self.swap_s or 0.0, scorers, learners, colocated, ahead)
