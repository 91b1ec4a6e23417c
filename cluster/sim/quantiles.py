"""Distributions given by some of their quantiles: what a workload file's figures are.

A number, or pairs of (percent, value): what was published, no curve fitted to it.
"""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError

Table = float | tuple[tuple[float, float], ...]
Floats = NDArray[np.float64]


class Quantiles:
    """A distribution given by some of its quantiles; between them log-linear (linear next to a zero)."""

    def __init__(self, table: Table, where: str) -> None:
        pairs = ((0.0, table), (100.0, table)) if isinstance(table, (int, float)) else table
        values = [float(value) for _, value in pairs]
        percents = [float(percent) for percent, _ in pairs]
        if len(pairs) < 2 or percents[0] != 0.0 or percents[-1] != 100.0:
            raise ConfigError(f"{where} = {table!r}: the pairs must reach from percent 0 to percent 100")
        for (left, low), (right, high) in pairwise(pairs):
            if not left < right or low > high:
                raise ConfigError(
                    f"{where}: [{right:g}, {high:g}] after [{left:g}, {low:g}]: "
                    "percents must grow and values must not fall"
                )
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ConfigError(f"{where} = {table!r}: values must be finite and not negative")
        self.constant = values[0] if values[0] == values[-1] else None
        self._at = np.array(percents) / 100.0
        self._values = np.array(values)
        self._logs = np.log(self._values) if values[0] > 0 else None

    def at(self, u: Floats) -> Floats:
        """Values at the probabilities ``u``."""
        if self.constant is not None:
            return np.full(len(u), self.constant)
        if self._logs is None:
            return np.asarray(np.interp(u, self._at, self._values))
        return np.asarray(np.exp(np.interp(u, self._at, self._logs)))

    def one(self, u: float) -> float:
        """The value at one probability."""
        return self.constant if self.constant is not None else float(self.at(np.array([u]))[0])

    def mean(self) -> float:
        """Of the piecewise curve: exact, segment by segment."""
        if self.constant is not None:
            return self.constant
        width, low, high = np.diff(self._at), self._values[:-1], self._values[1:]
        if self._logs is None:
            return float(np.sum(width * (low + high) / 2))
        rise = np.diff(self._logs)
        safe = np.where(rise > 1e-12, rise, 1.0)
        return float(np.sum(width * np.where(rise > 1e-12, (high - low) / safe, low)))


def times(table: Table, factor: float) -> Table:
    """Every value multiplied."""
    if isinstance(table, (int, float)):
        return table * factor
    return tuple((percent, value * factor) for percent, value in table)


def stretched(table: Table, factor: float) -> Table:
    """Values above the median moved to ``factor`` times their distance from it, which gets a pair."""
    if isinstance(table, (int, float)) or factor == 1.0:
        return table
    median = Quantiles(table, "table").one(0.5)
    low = tuple((percent, min(value, median)) for percent, value in table if percent < 50)
    high = tuple((percent, median + factor * (value - median)) for percent, value in table if percent > 50)
    return (*low, (50.0, median), *high)
