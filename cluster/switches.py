"""The switch ledger: each move with predicted and realised saving and cost, and what they teach. Pure.

The saving of a move is realised as the mean time of the settled steps before it minus that of the settled
steps after it. Moves that follow each other too fast for that are measured *together*, from before the
first to after the last, and share the realised saving in proportion to what each had predicted.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any

MEASURE_STEPS = 5
"""Settled steps on either side over which a saving is measured."""
LEAST_STEPS = 2
"""With fewer settled steps before the next move, the two are measured together."""
BACKOFF_STEPS = 4
"""A kind that failed waits this long, then twice as long, and so on up to 64 steps."""
KEPT_RECORDS = 200
TRUST = (0.2, 1.5)
"""Bounds of realised / predicted, as far as it scales later predictions: one bad reading teaches little."""
NOISES = 2.0
"""A saving teaches only if it was predicted to be this many standard errors of the measurement."""


@dataclass
class SwitchRecord:
    """A line of the ledger. ``realised_s`` is None until (or unless) it could be measured."""

    move: str  # "source>target"
    step: int
    reason: str
    predicted_s: float  # saving per step
    cost_predicted_s: float
    cost_s: float | None = None  # measured
    realised_s: float | None = None  # mean step before minus mean step after, or its share of that
    noise_s: float | None = None  # standard error of ``realised_s``
    steps: int = 0  # settled steps after it
    together: int = 1  # moves that were measured together
    state: str = "begun"  # begun, done or undone
    void: str = ""  # why no saving can be told


class SwitchLedger:
    """Records of moves; expected costs, trust and back-off by kind."""

    def __init__(self, priors: Mapping[str, float]) -> None:
        self.priors = dict(priors)
        self.records: list[SwitchRecord] = []
        self._costs: dict[str, deque[float]] = {}
        self._trust: dict[str, deque[float]] = {}
        self._failures: dict[str, int] = {}
        self._blocked: dict[str, int] = {}  # kind -> first step at which it may be tried again
        self._news: dict[str, Any] = {}  # metrics since ``take_news``
        self._open: list[SwitchRecord] = []  # made, and to be measured together
        self._before: list[float] = []  # settled steps before the first of them
        self._settled: list[float] = []  # settled steps since the last move, the newest

    @property
    def last(self) -> str:
        """Kind of the last move that was made; "" before the first."""
        return next((r.move for r in reversed(self.records) if r.state == "done"), "")

    # -- the life of a move -------------------------------------------------------------

    def begun(self, record: SwitchRecord) -> None:
        """A move begins; those before it are closed if enough was seen of them."""
        if len(self._settled) >= LEAST_STEPS or not self._open:
            self._close()
            self._before = list(self._settled)
        elif self._open[-1].move != record.move:
            self._void("another kind of move followed at once")
            self._before = list(self._settled)
        if not self._before:
            record.void = "no settled step before it"
        self.records = [*self.records[1 - KEPT_RECORDS :], record]

    def switched(self, kind: str, seconds: float) -> None:
        """What a switch of ``kind`` took."""
        self._costs.setdefault(kind, deque(maxlen=3)).append(seconds)
        self._news.setdefault("switch_seconds", {})[kind] = seconds
        if self.records and self.records[-1].move == kind and self.records[-1].cost_s is None:
            self.records[-1].cost_s = seconds
            self._news["switch_predicted_s"] = self.records[-1].predicted_s

    def done(self, kind: str) -> None:
        """The last move was made."""
        if self.records and self.records[-1].state == "begun":
            self.records[-1].state = "done"
            if not self.records[-1].void:
                self._open.append(self.records[-1])
        self._failures.pop(kind, None)
        self._settled = []

    def undone(self, kind: str, step: int, again: bool = False) -> None:
        """The last move was undone: its kind backs off, unless it may be tried ``again`` at once."""
        if self.records and self.records[-1].state == "begun":
            self.records[-1].state, self.records[-1].void = "undone", "it was undone"
        if again:
            return
        failures = self._failures.get(kind, 0)
        self._failures[kind] = failures + 1
        self._blocked[kind] = step + 1 + min(64, BACKOFF_STEPS * 2**failures)

    def abandoned(self, why: str) -> None:
        """The process that had begun the last move is gone, and the move with it."""
        if self.records and self.records[-1].state == "begun":
            self.records[-1].state, self.records[-1].void = "undone", why

    # -- settled steps ------------------------------------------------------------------

    def settled(self, step_s: float) -> None:
        """A step of the steady run, without a switch, took ``step_s`` (barrier left out)."""
        self._settled = [*self._settled[1 - MEASURE_STEPS :], step_s]
        if self._open and len(self._settled) >= MEASURE_STEPS:
            self._close()

    def unsettled(self, why: str) -> None:
        """Earlier step times no longer compare with later ones."""
        self._void(why)
        self._settled = []

    def shifted(self) -> None:
        """A new load: what moves realised under the old one says little about it."""
        self.unsettled("the load shifted")
        self._trust.clear()

    def _void(self, why: str) -> None:
        for record in self._open:
            record.void = why
        self._open = []

    def _close(self) -> None:
        """Tell what the open moves have saved."""
        opened, self._open = self._open, []
        if not opened:
            return
        predicted = math.fsum(record.predicted_s for record in opened)
        realised = fmean(self._before) - fmean(self._settled)
        noise = _standard_error(self._before, self._settled)
        for record in opened:
            share = record.predicted_s / predicted if predicted > 0 else 1 / len(opened)
            record.realised_s, record.noise_s = share * realised, None if noise is None else share * noise
            record.steps, record.together = len(self._settled), len(opened)
        self._news["switch_realised_s"] = opened[-1].realised_s
        if noise is not None and predicted > NOISES * noise:
            self._learn(opened[-1].move, realised / predicted)

    def _learn(self, kind: str, ratio: float) -> None:
        """Predictions are scaled by the trust already: what counts is the ratio to the bare one."""
        low, high = TRUST
        bare = min(high, max(low, ratio * self.trust(kind)))
        self._trust.setdefault(kind, deque(maxlen=3)).append(bare)

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
        """Realised / predicted of the last three measured moves of a kind; 1 before the first."""
        seen = self._trust.get(kind)
        return math.fsum(seen) / len(seen) if seen else 1.0

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
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over ``state()`` of an earlier process; a saving half measured cannot be told any more."""
        self._costs = {kind: deque(seen, maxlen=3) for kind, seen in state["costs"].items()}
        self._trust = {kind: deque(seen, maxlen=3) for kind, seen in state["trust"].items()}
        self.records = [SwitchRecord(**record) for record in state["records"]]
        for record in self.records:
            if record.realised_s is None and not record.void:
                record.void = "the controller was restarted"


def _standard_error(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Of the difference of their means; None where a single step says nothing of noise."""
    if min(len(before), len(after)) < 2:
        return None
    return math.sqrt(variance(before) / len(before) + variance(after) / len(after))
