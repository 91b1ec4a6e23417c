"""Signals: values that a frozen forward pass gives to sampled tokens, bound late.

The actor's forward needs no signal. A step takes a ``SignalSource`` (the whole batch's values, asked for
once) or ``MicroSignals`` (asked for per micro-batch), and asks after the forward pass whose loss
needs them.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from learner.batch import RankBatch
from learner.clock import Busy
from learner.late import Key, Scored, by_sample
from learner.late import MicroSignals as MicroSignals
from learner.late import Signal as Signal
from learner.late import SignalSource as SignalSource
from learner.mesh import rank_device
from learner.model import PolicyModel, flatten_rows, load_model
from learner.segment_scorer import SegmentScorer, kv_bytes
from learner.segments import Ask, Told

RESIDENT_BYTES = 2 * 2**30
"""On a CPU a frozen model of up to this size stays beside the policy: giving it back frees little."""


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
    """A frozen model that scores batches, and segments: the reference of the KL penalty.

    ``kept_bytes`` bounds the keys and values that it keeps between segments.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str = "float32",
        threads: int = 1,
        vocab_used: int | None = None,
        kept_bytes: int = 0,
    ) -> None:
        torch.set_num_threads(threads)
        self.path = str(path)
        self._device = rank_device()
        self._model = load_model(path, getattr(torch, dtype), self._device, vocab_used)
        self._model.requires_grad_(False).eval()
        room = kept_bytes // kv_bytes(self._model)
        self._segments = SegmentScorer(self._model, self._device, room)

    def score(self, batch: RankBatch) -> Signal:
        """Reference log-probs [R, L], valid where ``batch.mask``."""
        return score_rows(self._model, batch, self._device)

    def score_samples(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        """The same, cut into samples: ``keys[i]`` names sample ``i`` of the batch."""
        busy = Busy()
        values = by_sample(self.score(batch), batch, keys)
        tokens = int((batch.segments > 0).sum())
        return Scored(keys=tuple(keys), values=values, busy=busy.told(), tokens=tokens)

    def score_segments(self, asks: Sequence[Ask], most_tokens: int, done: Sequence[str]) -> Told:
        """Log-probs of the asks' targets; one forward pass takes ``most_tokens`` new ones."""
        return self._segments.score(asks, most_tokens, done)

    @property
    def nbytes(self) -> int:
        """Size of the weights."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def bring(self) -> None:
        """Weights to this rank's device."""
        self._model.to(self._device)
        _settle(self._device)

    def release(self) -> None:
        """Weights to the CPU, so that training has the device to itself."""
        if self._device.type != "cpu":
            self._model.to("cpu")
            torch.cuda.empty_cache()


class Colocated:
    """A frozen model that shares a rank with the policy: brought in for a burst, then taken away.

    On CUDA it waits in the CPU's memory in between. On a CPU it stays if small, else it is loaded
    anew for each burst. Seconds of the last burst: ``load_s`` (from disk, if it stays afterwards: once),
    ``swap_s`` (bringing and releasing together), ``score_s``.
    """

    def __init__(
        self, path: str | Path, dtype: str = "float32", threads: int = 1, vocab_used: int | None = None
    ) -> None:
        self._arguments = (path, dtype, threads, vocab_used)
        self._scorer: ReferenceScorer | None = None
        self.load_s = 0.0
        self.swap_s = 0.0
        self.score_s = 0.0

    def burst(self, batch: RankBatch) -> Signal:
        """Score a rank's rows; values [R, L]."""
        begun = time.monotonic()
        scorer = self._scorer or ReferenceScorer(*self._arguments)
        loaded = time.monotonic()
        scorer.bring()
        brought = time.monotonic()
        signal = scorer.score(batch)
        scored = time.monotonic()
        scorer.release()
        stays = rank_device().type != "cpu" or scorer.nbytes <= RESIDENT_BYTES
        self._scorer = scorer if stays else None
        self.score_s = scored - brought
        self.swap_s = (brought - loaded) + (time.monotonic() - scored)
        self.load_s = loaded - begun
        if not stays:
            self.swap_s, self.load_s = self.swap_s + self.load_s, 0.0
        return signal


def _settle(device: torch.device) -> None:
    """Wait for queued copies, so that what is timed has happened."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
