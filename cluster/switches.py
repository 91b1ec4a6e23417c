"""The switch ledger: each move with predicted and realised saving and cost, and what they teach. Pure."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MEASURE_STEPS = 4
"""Settled steps over which a move's saving is measured (fewer if another move follows)."""
BACKOFF_STEPS = 4
"""A kind that failed waits this long, then twice as long, and so on up to 64 steps."""
KEPT_RECORDS = 200
TRUST = (0.2, 1.5)
"""Bounds of realised / predicted, as far as it scales later predictions: one bad reading teaches little."""
NOISE = 0.05
"""A predicted saving below this share of a step drowns in the noise of step times and teaches nothing."""


@dataclass
class SwitchRecord:
    """A line of the ledger. ``realised_s`` is None until (or unless) it could be measured."""

    move: str  # "source>target"
    step: int
    reason: str
    predicted_s: float  # saving per step
    cost_predicted_s: float
    cost_s: float | None = None  # measured
    realised_s: float | None = None  # mean step before minus mean step after
    steps: int = 0  # settled steps behind ``realised_s``
    state: str = "begun"  # begun, done or undone
    void: str = ""  # why no saving can be told
    before_s: float = 0.0
    after: list[float] = field(default_factory=list)  # settled step times so far


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
        self._recent: deque[float] = deque(maxlen=MEASURE_STEPS)  # settled step times since the last move

    @property
    def last(self) -> str:
        """Kind of the last move that was made; "" before the first."""
        return next((r.move for r in reversed(self.records) if r.state == "done"), "")

    # -- the life of a move -------------------------------------------------------------

    def begun(self, record: SwitchRecord) -> None:
        """A move begins; what is known of the one before it is closed."""
        self._close()
        record.before_s = math.fsum(self._recent) / len(self._recent) if self._recent else 0.0
        if not self._recent:
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
        self._failures.pop(kind, None)
        self._recent.clear()

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
        self._recent.append(step_s)
        if (record := self._open()) is not None:
            record.after.append(step_s)
            if len(record.after) >= MEASURE_STEPS:
                self._close()

    def unsettled(self, why: str) -> None:
        """Earlier step times no longer compare with later ones."""
        if (record := self._open()) is not None:
            record.void = why
        self._recent.clear()

    def shifted(self) -> None:
        """A new load: what moves realised under the old one says little about it."""
        self.unsettled("the load shifted")
        self._trust.clear()

    def _open(self) -> SwitchRecord | None:
        """The record whose saving is being measured."""
        record = self.records[-1] if self.records else None
        if record is None or record.state != "done" or record.void or record.realised_s is not None:
            return None
        return record

    def _close(self) -> None:
        """Turn the settled steps since the last move into its realised saving."""
        record = self._open()
        if record is None:
            return
        if not record.after:
            record.void = "no settled step after it"
            return
        record.steps = len(record.after)
        record.realised_s = record.before_s - math.fsum(record.after) / record.steps
        self._news["switch_realised_s"] = record.realised_s
        if record.steps >= 2 and record.predicted_s > NOISE * record.before_s:
            low, high = TRUST
            ratio = record.realised_s / record.predicted_s * self.trust(record.move)
            self._trust.setdefault(record.move, deque(maxlen=3)).append(min(high, max(low, ratio)))

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
