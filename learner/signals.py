"""Signals: values that a frozen forward pass gives to sampled tokens, bound late.

The actor's forward needs no signal. A step takes a ``SignalSource``, calls it once, after its
first forward pass, and reads values aligned to its rows.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from learner.batch import RankBatch
from learner.mesh import rank_device
from learner.model import PolicyModel, flatten_rows, load_model


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """Values [R, L] aligned to a rank's rows; those outside ``valid`` [R, L] are never read."""

    values: NDArray[np.float32]
    valid: NDArray[np.bool_]


SignalSource = Callable[[], Signal]


def score_rows(model: PolicyModel, batch: RankBatch, device: torch.device) -> Signal:
    """Log-probs of every trained token of ``batch`` under ``model``, by micro-batch, no gradient.

    Same definition as in training: after the temperature the token was sampled with.
    """
    values = np.zeros(batch.ids.shape, np.float32)
    for rows in batch.micro_batches():
        flat = flatten_rows(
            batch.ids[rows],
            batch.positions[rows],
            batch.segments[rows],
            batch.mask[rows],
            batch.temperature[rows],
            device,
        )
        with torch.no_grad():
            logprobs, _ = model(flat)
        values[rows].reshape(-1)[flat.flat] = logprobs.cpu().numpy()
    return Signal(values=values, valid=batch.mask & np.isfinite(values))


class ReferenceScorer:
    """A frozen model that scores batches: the reference of the KL penalty."""

    def __init__(
        self, path: str | Path, dtype: str = "float32", threads: int = 1, vocab_used: int | None = None
    ) -> None:
        torch.set_num_threads(threads)
        self.path = str(path)
        self._device = rank_device()
        self._model = load_model(path, getattr(torch, dtype), self._device, vocab_used)
        self._model.requires_grad_(False).eval()

    def score(self, batch: RankBatch) -> Signal:
        """Reference log-probs [R, L], valid where ``batch.mask``."""
        return score_rows(self._model, batch, self._device)
