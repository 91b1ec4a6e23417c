"""Time that ranks wait, by cause, and busy intervals. Pure."""

Interval = tuple[float, float]


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


def busy_union(intervals: list[Interval]) -> list[Interval]:
    """Merge overlapping (start, end) intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap_s(left: list[Interval], right: list[Interval]) -> float:
    """Seconds in which an interval of both sides is open."""
    a, b = busy_union(left), busy_union(right)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
