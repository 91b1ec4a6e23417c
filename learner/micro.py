"""One micro-batch between the batch's arrays and the loss: rows, late signal, inputs, sums over ranks."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from learner.batch import RankBatch
from learner.late import MicroSignals, Signal, SignalSource
from learner.mesh import Place
from learner.model import FlatRows, flatten_rows
from learner.objective.loss import TokenInputs

SUMS = (
    "loss",
    "loss_policy",
    "loss_kl",
    "loss_entropy",
    "tokens",
    "entropy",
    "ratio",
    "ratio_square",
    "clipped",
    "mismatch_kl",
    "lag0_tokens",
    "kl_ref",
    "kl_tokens",
    "row_tokens",
)


class PerMicro:
    """Both kinds of signal as one: the signal [r, L] of a micro-batch, and the time spent waiting."""

    def __init__(self, batch: RankBatch, source: SignalSource | MicroSignals | None) -> None:
        self._batch = batch
        self._source = source
        self._whole: Signal | None = None
        self.waited_s = 0.0

    def resolve(self, rows: slice) -> Signal | None:
        """The signal of these rows, waiting for it if need be; None without a source."""
        if self._source is None:
            return None
        begun = time.monotonic()
        try:
            if not callable(self._source):
                return self._source.rows(rows)
            if self._whole is None:
                self._whole = self._source()
                got, want = self._whole.values.shape, self._batch.ids.shape
                if got != want:
                    raise ValueError(f"signal of shape {got} for rows of shape {want}")
            return Signal(values=self._whole.values[rows], valid=self._whole.valid[rows])
        finally:
            self.waited_s += time.monotonic() - begun


def on_policy_tokens(batch: RankBatch, version: int) -> NDArray[np.bool_]:
    """Trained tokens [R, L] that, like every sampled token before them in their sample, have
    ``version``: learner and generator must agree on these to rounding."""
    stale = batch.mask & (batch.versions != version)
    count = np.cumsum(stale, axis=1)
    starts = np.arange(stale.shape[1])[None, :] - batch.positions
    before = np.take_along_axis(count - stale, starts, axis=1)
    on_policy: NDArray[np.bool_] = batch.mask & (count == before)
    return on_policy


def flatten(batch: RankBatch, rows: slice, device: torch.device) -> FlatRows:
    """Rows of a batch as the model takes them."""
    return flatten_rows(
        batch.ids[rows],
        batch.positions[rows],
        batch.segments[rows],
        batch.mask[rows],
        batch.temperature[rows],
        device,
    )


def token_inputs(
    batch: RankBatch,
    rows: slice,
    flat: FlatRows,
    fresh: NDArray[np.bool_],
    signal: Signal | None,
    device: torch.device,
) -> TokenInputs:
    """What the loss needs per selected token [S]; ``signal`` is of these rows."""
    def take(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.reshape(-1)[flat.flat]).to(device)

    return TokenInputs(
        behaviour=take(batch.behaviour[rows]),
        advantage=take(batch.advantage[rows]),
        weight=take(batch.weight[rows]),
        on_policy=take(fresh[rows]),
        reference=None if signal is None else take(signal.values),
        reference_valid=None if signal is None else take(signal.valid),
    )


def reduce_metrics(sums: dict[str, Tensor], peaks: Tensor, place: Place) -> dict[str, float]:
    """Add sums over ranks, take maxima over ranks, and only then divide."""
    zero = torch.zeros((), dtype=torch.float64, device=place.device)
    packed = torch.stack([sums.get(name, zero) for name in SUMS])
    dist.all_reduce(packed)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    total = dict(zip(SUMS, packed.tolist(), strict=True))
    tokens = max(1.0, total["tokens"])
    ratio = total["ratio"] / tokens
    variance = total["ratio_square"] / tokens - ratio**2
    return {
        "loss": total["loss"],
        "loss_policy": total["loss_policy"],
        "loss_kl": total["loss_kl"],
        "loss_entropy": total["loss_entropy"],
        "entropy": total["entropy"] / tokens,
        "ratio_mean": ratio,
        "ratio_std": max(0.0, variance) ** 0.5,
        "clip_fraction": total["clipped"] / tokens,
        "mismatch_kl": total["mismatch_kl"] / tokens,
        "mismatch_max_log_ratio": peaks[0].item(),
        "max_abs_log_ratio_at_lag0": peaks[1].item(),
        "lag0_tokens": total["lag0_tokens"],
        "kl_ref": total["kl_ref"] / max(1.0, total["kl_tokens"]),
        "signal_missing_tokens": total["tokens"] - total["kl_tokens"] if total["kl_tokens"] else 0.0,
        "tokens_trained": total["tokens"],
        "tokens_in_rows": total["row_tokens"],
    }
