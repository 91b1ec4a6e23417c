"""Means with intervals, and paired comparisons over seeds. Intervals are of 95 %, by Student's t.

Policies are compared on the same seeds, hence on the same episodes: what a seed does to both cancels in the
difference (or in the logarithm of the ratio), so few seeds suffice.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Two-sided 95 % points of Student's t for 1 .. 30 degrees of freedom; beyond, see ``t_point``.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z95 = 1.959964


class Interval(NamedTuple):
    """A mean and where it lies with 95 % confidence; the bounds are infinite for a single value."""

    mean: float
    low: float
    high: float
    n: int

    def plain(self) -> dict[str, object]:
        """For JSON: ``{"mean": ..., "interval": [low, high], "seeds": n}``; an unknown bound is null."""
        bounds = [bound if math.isfinite(bound) else None for bound in (self.low, self.high)]
        return {"mean": self.mean, "interval": bounds, "seeds": self.n}


def t_point(freedom: int) -> float:
    """The two-sided 95 % point of Student's t. Raises ValueError for less than one degree of freedom."""
    if freedom < 1:
        raise ValueError(f"freedom = {freedom}: must be at least 1")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    # Cornish-Fisher in 1/freedom (Abramowitz and Stegun 26.7.5), good to 1e-4 here.
    z, d = _Z95, float(freedom)
    return z + (z**3 + z) / (4 * d) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d * d)


def interval(values: Sequence[float]) -> Interval:
    """Mean of independent values. Raises ValueError if there are none, or one is not finite."""
    if not values:
        raise ValueError("no values")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be finite, got {list(values)}")
    x = np.array(values, dtype=float)
    mean = float(x.mean())
    if len(x) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = t_point(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half, mean + half, len(x))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of ``ours - theirs``, seed by seed."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Geometric mean of ``ours / theirs``, seed by seed. Raises ValueError unless all are positive."""
    if not all(value > 0 for value in (*ours, *theirs)):
        raise ValueError(f"a ratio needs positive values, got {list(ours)} and {list(theirs)}")
    logs = interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    high = math.exp(logs.high) if math.isfinite(logs.high) else math.inf
    return Interval(math.exp(logs.mean), math.exp(logs.low), high, logs.n)


def reduction(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of ``1 - ours / theirs``, seed by seed: by what share ours is less."""
    if not all(value > 0 for value in theirs):
        raise ValueError(f"a reduction needs positive values to compare with, got {list(theirs)}")
    return interval([1 - a / b for a, b in zip(ours, theirs, strict=True)])
