"""Spread and mask: a trajectory's advantage over the tokens of its samples."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Spread = Literal["token", "per_length"]


def spread(
    advantage: float, masks: Sequence[NDArray[np.bool_]], how: Spread = "token"
) -> list[NDArray[np.float32]]:
    """Coefficients ``[T]`` for each sample of one trajectory, exactly 0 outside the masks.

    ``token`` gives every trained token the advantage itself; ``per_length`` divides it by the
    number of trained tokens of the whole trajectory.
    """
    if how not in ("token", "per_length"):
        raise ValueError(f"spread {how!r} is unknown (valid: token, per_length)")
    trained = sum(int(mask.sum()) for mask in masks)
    value = advantage / trained if how == "per_length" and trained else advantage
    return [np.where(mask, np.float32(value), np.float32(0)) for mask in masks]
