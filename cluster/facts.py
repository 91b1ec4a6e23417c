"""What a step cost whom: running totals of the generators and what the loop tells, as ``StepFacts``."""

import time
from typing import Any

from cluster.balance import Phase, StepFacts
from cluster.fleet import Fleet, Totals
from cluster.waits import IdleClock

COLD_STEPS = 1
"""Steps at the start of a run whose waits tell of an empty pipeline, not of the split."""
FRESH_BELOW_S = 20.0
"""Steps shorter than this ask every generator at the barrier; in longer ones a report is recent enough."""


class StepWatch:
    """Windows over the fleet's totals: from barrier to barrier, and from report to report."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.idle = IdleClock()
        self._step: int | None = None  # the step at whose end the window began
        self._since = 0.0
        self._before = Totals()
        self._reported: dict[str, float] = {}

    def opened(self) -> None:
        """Work begins: the first step is counted from here."""
        if self._step is None:
            self._begin(0, time.monotonic())

    @property
    def short(self) -> bool:
        """The window is so short that reports a second old would blur it."""
        return time.monotonic() - self._since < FRESH_BELOW_S

    def barrier(self, metrics: dict[str, Any], counts: dict[str, int], evaluating: bool) -> StepFacts | None:
        """Facts of the step that was just committed, and a new window; ``metrics`` are what the loop told.

        None when the window does not start at the step before: after a restart, or asked twice.
        """
        step, now = int(metrics["step"]), time.monotonic()
        if step == self._step:
            return None
        whole = self._step is not None and (step == self._step + 1 or self._step == 0)
        seconds, before = now - self._since, self._before
        self._begin(step, now)
        if not whole or seconds <= 0:
            return None
        learners, waits = max(1, counts["learner"]), metrics.get("waits", {})
        phase: Phase = "eval" if evaluating else "cold" if step <= COLD_STEPS else "train"
        rwt, busy = self._generators(before, seconds, max(1, counts["generator"]))
        return StepFacts(
            step=step,
            step_s=seconds,
            rwt_s=rwt,
            twt_s=float(waits.get("data", 0.0)) * learners,
            signal_s=float(waits.get("signal", 0.0)) * learners,
            generator_busy_s=busy,
            learner_busy_s=float(metrics.get("learner_busy_s", 0.0)),
            scorer_busy_s=float(metrics.get("scorer_busy_s", 0.0)),
            sync_s=min(seconds, float(metrics.get("sync_s", 0.0))),
            generated_tokens=self._before.tokens - before.tokens,
            trained_tokens=int(metrics.get("trained_tokens", 0)),
            grown_tokens=self._before.grown_tokens - before.grown_tokens,
            row_tokens=int(metrics.get("row_tokens", 0)),
            unhealthy=sum(not slot.healthy for slot in self.fleet.slots.values()),
            queued=self._queued(),
            demand=(self._before.demand_s - before.demand_s) / seconds / max(1, counts["generator"]),
            head_age_s=float(metrics.get("head_age_s", 0.0)),
            groups=int(metrics.get("groups", 0)),
            depth=int(metrics.get("depth", 0)),
            fill=float(metrics.get("fill", 1.0)),
            phase=phase,
            scoring="colocated" if metrics.get("scoring") == "colocated" else "decoupled",
        )

    def _queued(self) -> float:
        """Requests that wait for a place at generators, per running one, as last reported."""
        told = [slot.health for slot in self.fleet.slots.values() if slot.healthy and slot.health is not None]
        return sum(health.waiting for health in told) / max(1, sum(health.running for health in told))

    def _begin(self, step: int, now: float) -> None:
        self._step, self._since, self._before = step, now, self.fleet.totals()

    def _generators(self, before: Totals, seconds: float, ranks: int) -> tuple[float, float]:
        """(waited, busy) rank-seconds of the window.

        A generator that tells how long it starved is believed; of one that tells only when it was busy,
        the rest counts as waiting. Loading weights is neither.
        """
        now = self._before
        synced = max(0.0, now.sync_s - before.sync_s)
        whole = max(0.0, ranks * seconds - synced)
        if now.starved_s:
            starved = sum(now.starved_s.values()) - sum(before.starved_s.values())
            waited = min(whole, max(0.0, starved))
            return waited, whole - waited
        busy = min(whole, max(0.0, now.busy_s - before.busy_s))
        return whole - busy, busy

    def take_rwt(self) -> dict[str, float]:
        """Generator rank-seconds waited since the last call, by cause.

        Of generators that do not tell: the idle share of the rollout slots instead, as if of one rank.
        """
        slots = self.idle.take()
        totals = self.fleet.totals().starved_s
        if not totals:
            return slots
        taken = {cause: total - self._reported.get(cause, 0.0) for cause, total in totals.items()}
        self._reported = totals
        return {cause: seconds for cause, seconds in taken.items() if seconds > 0}
