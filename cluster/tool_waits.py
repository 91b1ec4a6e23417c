"""How long environments take, learnt online by tool, and how long a cache is worth holding for one.

The hold maximises, over the waits seen (Continuum, arXiv 2511.02230)::

    P(wait <= tau) * recompute_s  -  E[min(wait, tau)] * footprint / capacity

the seconds of the rank that a kept cache saves, less the share of the rank's memory that it takes for as
long as it is held; both are seconds of one rank. Only ``r = footprint / (capacity * recompute_s)`` matters:
with ``M = E[min(wait, tau)]`` the objective is ``P - r M``, so the best tau lies where the upper concave hull
of the points ``(M, P)`` has slope ``r``. The hull is built now and then and searched by bisection.
"""

from bisect import bisect_right
from collections import deque
from math import inf

_WINDOW = 256  # waits kept per tool: quantiles to a few per cent, a change of regime shows in a few groups
_ENOUGH = 20  # waits before a tool's own distribution is believed (else the pooled one, else the prior)
_TOOLS = 256  # tools told apart; a name beyond that counts as pooled only
_REFRESH = 0.5  # of the window renewed: the hull is built again


class _Waits:
    """The newest waits of one tool."""

    __slots__ = ("_built", "_hold", "_slope", "added", "waits")

    def __init__(self) -> None:
        self.waits: deque[float] = deque(maxlen=_WINDOW)
        self._slope: list[float] = []  # minus the hull's slopes, rising
        self._hold: list[float] = []  # tau at the right end of each hull edge
        self.added = 0  # ever
        self._built = 0  # ``added`` when the hull was built

    def hold(self, ratio: float) -> float:
        """argmax of ``P - ratio * M``, 0 if no hold pays."""
        if self.added - self._built > _REFRESH * len(self.waits):
            self._build()
        at = bisect_right(self._slope, -ratio)
        return self._hold[at - 1] if at else 0.0

    def _build(self) -> None:
        """Upper concave hull of (E[min(wait, tau)], P(wait <= tau)) from (0, 0), by a monotone chain."""
        self._built = self.added
        count, total = len(self.waits), 0.0
        hull: list[tuple[float, float, float, float, float]] = []  # (x, y, dx, dy, wait): edges by their ends
        for n, wait in enumerate(sorted(self.waits), 1):
            total += wait
            mean, share = (total + (count - n) * wait) / count, n / count
            while hull:
                x, y, dx, dy, _ = hull[-1]
                if dy * (mean - x) > (share - y) * dx:
                    break
                hull.pop()
            else:
                x = y = 0.0
            hull.append((mean, share, mean - x, share - y, wait))
        self._slope = [-dy / dx if dx > 0.0 else -inf for _, _, dx, dy, _ in hull]
        self._hold = [edge[4] for edge in hull]


class ToolWaits:
    """Waits by tool; a tool with few of its own is taken to be like all the others."""

    __slots__ = ("_pooled", "_tools")

    def __init__(self) -> None:
        self._tools: dict[str, _Waits] = {}
        self._pooled = _Waits()

    def observe(self, tool: str, seconds: float) -> None:
        """An environment answered ``seconds`` after its turn ended. Negative times count as 0."""
        if seconds < 0.0:
            seconds = 0.0
        pooled = self._pooled
        pooled.waits.append(seconds)
        pooled.added += 1
        waits = self._tools.get(tool)
        if waits is None:
            if len(self._tools) >= _TOOLS:
                return
            waits = self._tools[tool] = _Waits()
        waits.waits.append(seconds)
        waits.added += 1

    def best_hold(self, tool: str, footprint: float, recompute_s: float, capacity: float) -> float:
        """Seconds after a turn for which the cache of ``footprint`` tokens is worth its room (0: not at all).

        ``recompute_s`` is what computing it again costs, ``capacity`` the rank's cache in tokens. Until
        enough waits are known: as long as holding has cost less than computing again would (the ski-rental
        rule: at most twice the cost of knowing the wait).
        """
        if recompute_s <= 0.0:
            return 0.0
        if footprint <= 0.0:
            return inf
        ratio = footprint / (capacity * recompute_s)
        waits = self._known(tool)
        return 1.0 / ratio if waits is None else waits.hold(ratio)

    def _known(self, tool: str) -> _Waits | None:
        waits = self._tools.get(tool)
        if waits is not None and waits.added >= _ENOUGH:
            return waits
        return self._pooled if self._pooled.added >= _ENOUGH else None
