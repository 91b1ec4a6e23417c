"""The switch ledger: each move with predicted and realised saving and cost, and what they teach. Pure.

The saving of a move is realised as the step that the rates of the settled steps before it sustain, minus that
of the settled steps after it, both under the load after it (``Balance.saved``). Moves that follow each other
too fast for that are measured *together*, from before the first to after the last, and share the realised
saving in proportion to what each had predicted.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.balance import Sample, Saving

MEASURE_STEPS = 5
"""Settled steps on either side over which a saving is measured."""
LEAST_STEPS = 2
"""With fewer settled steps of one load before the next move, the two are measured together."""
BACKOFF_STEPS = 4
"""A kind that failed waits this long, then twice as long, and so on up to 64 steps."""
KEPT_RECORDS = 200
SHIFT_STEPS = 2
"""The last steps before a shift is noticed tell of both loads already."""
KEPT_SAMPLES = 8
"""Settled steps that are kept: some of a shift's may not tell of one load."""
TRUST = (0.2, 1.5)
"""Bounds of realised / expected, as far as it scales later predictions."""
BELIEVED = 2
"""Readings of 1 that the measured ones are averaged with: one bad reading teaches little."""
NOISES = 2.0
"""A saving teaches only if it was expected to be this many standard errors of the measurement."""

Measure = Callable[[Sequence[Sample], Sequence[Sample]], Saving | None]
"""What the change between two windows of settled steps saved; None if they do not compare."""


@dataclass
class SwitchRecord:
    """A line of the ledger. ``realised_s`` is None until (or unless) it could be measured."""

    move: str  # "source>target"
    step: int
    reason: str
    predicted_s: float  # saving per step
    cost_predicted_s: float
    cost_s: float | None = None  # measured
    realised_s: float | None = None  # step before minus step after under the same load, or its share of that
    noise_s: float | None = None  # standard error of ``realised_s``
    steps: int = 0  # settled steps after it
    together: int = 1  # moves that were measured together
    state: str = "begun"  # begun, done or undone
    void: str = ""  # why no saving can be told
    id: int = 0  # of the move, in the role journal


class SwitchLedger:
    """Records of moves; expected costs, trust and back-off by kind."""

    def __init__(self, priors: Mapping[str, float], measure: Measure) -> None:
        self.priors = dict(priors)
        self._measure = measure
        self.records: list[SwitchRecord] = []
        self._costs: dict[str, deque[float]] = {}
        self._trust: dict[str, deque[float]] = {}
        self._failures: dict[str, int] = {}
        self._blocked: dict[str, int] = {}  # kind -> first step at which it may be tried again
        self._news: dict[str, Any] = {}  # metrics since ``take_news``
        self._open: list[SwitchRecord] = []  # made, and to be measured together
        self._before: list[Sample] = []  # settled steps before the first of them
        self._settled: list[Sample] = []  # settled steps since the last move, the newest

    @property
    def last(self) -> str:
        """Kind of the last move that was made; "" before the first."""
        return next((r.move for r in reversed(self.records) if r.state == "done"), "")

    # -- the life of a move -------------------------------------------------------------

    def begun(self, record: SwitchRecord) -> None:
        """A move begins; those before it are closed if enough was seen of them."""
        if not self._open or self._pure() >= LEAST_STEPS:
            self._close()
            self._before = list(self._settled)
        if not self._before:
            record.void = "no settled step before it"
        self.records = [*self.records[1 - KEPT_RECORDS :], record]

    def switched(self, kind: str, seconds: float, move: int = 0) -> None:
        """What a switch of ``kind`` took, made by ``move``."""
        self._costs.setdefault(kind, deque(maxlen=3)).append(seconds)
        self._news.setdefault("switch_seconds", {})[kind] = seconds
        record = self._begun(move)
        if record is not None and record.move == kind:
            record.cost_s = seconds
            self._news["switch_predicted_s"] = record.predicted_s

    def done(self, kind: str, move: int = 0) -> None:
        """``move`` was made."""
        record = self._begun(move)
        if record is not None:
            record.state = "done"
            if not record.void:
                self._open.append(record)
        self._failures.pop(kind, None)
        self._settled = []

    def undone(self, kind: str, step: int, again: bool = False, move: int = 0) -> None:
        """``move`` was undone: its kind backs off, unless it may be tried ``again`` at once."""
        record = self._begun(move)
        if record is not None:
            record.state, record.void = "undone", "it was undone"
        if again:
            return
        failures = self._failures.get(kind, 0)
        self._failures[kind] = failures + 1
        self._blocked[kind] = step + 1 + min(64, BACKOFF_STEPS * 2**failures)

    def _begun(self, move: int) -> SwitchRecord | None:
        """The record of ``move``, if that is the one under way: a restart may have lost it."""
        return self.records[-1] if self.under_way == move else None

    @property
    def under_way(self) -> int | None:
        """Id of the move that was begun last, while it has not ended."""
        last = self.records[-1] if self.records else None
        return last.id if last is not None and last.state == "begun" else None

    def abandoned(self, why: str) -> None:
        """The process that had begun the last move is gone, and the move with it."""
        if self.under_way is not None:
            self.records[-1].state, self.records[-1].void = "undone", why

    # -- settled steps ------------------------------------------------------------------

    def settled(self, sample: Sample) -> None:
        """A step of the steady run, without a switch."""
        self._settled = [*self._settled[1 - KEPT_SAMPLES :], sample]
        if self._open and len(self._settled) >= MEASURE_STEPS and self._pure() >= LEAST_STEPS:
            self._close()

    def unsettled(self, why: str) -> None:
        """Earlier steps no longer compare with later ones."""
        self._void(why)
        self._settled = []

    def shifted(self) -> None:
        """The generators have a new load, which the last settled step was the first to show.

        Open moves are measured by what came before it. What moves realised says little of the new load.
        """
        self._trust.clear()
        newest = [replace(one, pure=False) for one in self._settled[-1:]]
        self._settled = self._settled[:-SHIFT_STEPS]
        if self._pure() >= LEAST_STEPS:
            self._close()
        self._void("the load shifted")
        self._settled = newest

    def _pure(self) -> int:
        """Settled steps that tell of one load."""
        return sum(one.pure for one in self._settled)

    def _void(self, why: str) -> None:
        for record in self._open:
            record.void = why
        self._open = []

    def _close(self) -> None:
        """Tell what the open moves have saved."""
        opened, self._open = self._open, []
        if not opened:
            return
        saving = self._measure(self._before, self._settled)
        if saving is None:
            self._open = opened
            self._void("the load shifted")
            return
        predicted = math.fsum(record.predicted_s for record in opened)
        realised, noise, expected = saving
        for record in opened:
            share = record.predicted_s / predicted if predicted > 0 else 1 / len(opened)
            record.realised_s, record.noise_s = share * realised, None if noise is None else share * noise
            record.steps, record.together = len(self._settled), len(opened)
        self._news["switch_realised_s"] = opened[-1].realised_s
        alike = len({record.move for record in opened}) == 1
        if alike and noise is not None and expected > NOISES * noise:
            low, high = TRUST
            ratio = min(high, max(low, realised / expected))
            self._trust.setdefault(opened[-1].move, deque(maxlen=3)).append(ratio)

    # -- what it teaches ----------------------------------------------------------------

    def cost(self, kind: str) -> float:
        """Expected seconds: mean of the last three switches, or the prior.

        A move from spare costs what the cheapest kind with the same target does.
        """
        if seen := self._costs.get(kind):
            return math.fsum(seen) / len(seen)
        if kind in self.priors:
            return self.priors[kind]
        target = kind.partition(">")[2]
        return min((self.cost(k) for k in self.priors if k.endswith(f">{target}")), default=0.0)

    def trust(self, kind: str) -> float:
        """Realised / expected of the last three measured moves of a kind, drawn towards 1.

        Expected is what the model says once it has seen the steps after the move: what it has learned from
        them is not counted twice.
        """
        seen = self._trust.get(kind)
        return (math.fsum(seen) + BELIEVED) / (len(seen) + BELIEVED) if seen else 1.0

    def blocked(self, kind: str, step: int) -> bool:
        """The kind failed lately and backs off."""
        return self._blocked.get(kind, 0) > step

    def take_news(self) -> dict[str, Any]:
        """Metrics of the switches since the last call: ``switch_seconds`` by kind, predicted, realised."""
        news, self._news = self._news, {}
        return news

    # -- durability ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a restarted controller should remember, as plain values."""
        return {
            "costs": {kind: list(seen) for kind, seen in self._costs.items()},
            "trust": {kind: list(seen) for kind, seen in self._trust.items()},
            "records": [asdict(record) for record in self.records],
            "failures": self._failures,
            "blocked": self._blocked,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over ``state()`` of an earlier process; a saving half measured cannot be told any more."""
        self._costs = {kind: deque(seen, maxlen=3) for kind, seen in state["costs"].items()}
        self._trust = {kind: deque(seen, maxlen=3) for kind, seen in state["trust"].items()}
        self.records = [SwitchRecord(**record) for record in state["records"]]
        self._failures = dict(state.get("failures", {}))  # an older journal does not tell
        self._blocked = dict(state.get("blocked", {}))
        for record in self.records:
            if record.realised_s is None and not record.void:
                record.void = "the controller was restarted"
