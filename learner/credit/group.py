"""Group statistics: baseline, then scale. Rewards of one group in, one advantage per member out.

Sums are exact (``math.fsum``), so permuting a group permutes the result bit for bit.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import CreditConfig


def is_constant(rewards: Sequence[float], tolerance: float) -> bool:
    """Whether all rewards lie within ``tolerance`` of each other (max - min, so no cancellation)."""
    return max(rewards) - min(rewards) <= tolerance


def advantages(rewards: Sequence[float], config: CreditConfig) -> NDArray[np.float32]:
    """Advantage ``[G]`` of each member of one group of any size ``G >= 1``.

    Baseline: ``mean`` and ``leave_one_out`` (the mean of the others) subtract, ``none`` does not.
    Scale: ``std`` divides by the unbiased standard deviation plus ``epsilon``, ``none`` does not.
    Wherever a group statistic is used, a constant group and a group of one give exactly 0: they
    hold no comparison. Raises ValueError for a reward that is not finite or an empty group.
    """
    values = [float(reward) for reward in rewards]
    if not values:
        raise ValueError("a group without members has no advantage")
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        raise ValueError(f"reward {bad[0]} is not finite: leave that member out, a failure is no score")
    if config.baseline == "none" and config.scale == "none":
        return np.asarray(values, np.float32)
    if len(values) == 1 or is_constant(values, config.constant_tolerance):
        return np.zeros(len(values), np.float32)
    centred = _centre(values, config)
    if config.scale == "std":
        divisor = _deviation(values) + config.epsilon
        centred = [value / divisor for value in centred]
    return np.asarray(centred, np.float32)


def _centre(values: list[float], config: CreditConfig) -> list[float]:
    total, size = math.fsum(values), len(values)
    if config.baseline == "mean":
        return [value - total / size for value in values]
    if config.baseline == "leave_one_out":
        return [value - (total - value) / (size - 1) for value in values]
    return values


def _deviation(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
