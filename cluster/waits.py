"""Time that rollout slots wait, by cause. Pure."""


class IdleClock:
    """Integrates an idle fraction over time, split by cause; ``take`` returns and resets."""

    def __init__(self) -> None:
        self._fraction = 0.0
        self._cause = "capacity"
        self._since: float | None = None
        self._totals: dict[str, float] = {}

    def observe(self, fraction: float, cause: str, now: float) -> None:
        """From ``now`` on, this fraction of the slots is idle for this cause."""
        if self._since is not None and self._fraction > 0:
            spent = self._fraction * (now - self._since)
            self._totals[self._cause] = self._totals.get(self._cause, 0.0) + spent
        self._fraction, self._cause, self._since = fraction, cause, now

    def take(self) -> dict[str, float]:
        """Idle seconds by cause since the last call."""
        totals, self._totals = self._totals, {}
        return totals
