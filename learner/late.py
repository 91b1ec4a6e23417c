"""Scores that arrive late: their records, and the box in which a learner rank waits for them. No torch.

A scorer works on whole groups, as they become ready; a rank trains rows of many groups. So scores travel
per sample, keyed by (trajectory, row of that trajectory), and are laid out on a rank's rows
only when the loss of a micro-batch asks for them.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from learner.batch import RankBatch, Sample

Key = tuple[str, int]
"""(trajectory id, index of the sample among those of its trajectory)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """Values [R, L] aligned to rows; those outside ``valid`` [R, L] are never read."""

    values: NDArray[np.float32]
    valid: NDArray[np.bool_]


SignalSource = Callable[[], Signal]
"""A whole batch's signal, asked for once, as late as the first loss."""


class MicroSignals(Protocol):
    """A signal per micro-batch: asked for at that micro-batch's loss."""

    def rows(self, rows: slice) -> Signal:
        """Values [r, L] of these rows of the batch. Raises TimeoutError when they do not come."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What a scorer says of some samples: ``values[i]`` [T_i], NaN where there is none.

    ``busy`` is (start, end) in seconds since the epoch, ``tokens`` what was run forward in it.
    """

    keys: tuple[Key, ...]
    values: tuple[NDArray[np.float32], ...]
    busy: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """How a rank gets the signal of a step: ``offered`` by scorers, or scored ``here`` by itself.

    ``keys[i]`` names sample ``i`` of the step (see ``RankBatch.sample``).
    """

    mode: Literal["offered", "here"]
    keys: tuple[Key, ...] = ()


def keys_of(samples: Sequence[Sample]) -> tuple[Key, ...]:
    """The key of each sample, in order."""
    seen: dict[str, int] = {}
    keys: list[Key] = []
    for sample in samples:
        row = seen.get(sample.trajectory, 0)
        seen[sample.trajectory] = row + 1
        keys.append((sample.trajectory, row))
    return tuple(keys)


def by_sample(signal: Signal, batch: RankBatch, keys: Sequence[Key]) -> tuple[NDArray[np.float32], ...]:
    """Cut a signal on ``batch``'s rows into values [T] per sample, NaN where it is not valid."""
    flat = np.where(signal.valid, signal.values, np.float32(np.nan)).reshape(-1)
    owner = batch.sample.reshape(-1)
    return tuple(flat[owner == index].astype(np.float32) for index in range(len(keys)))


class ScoreBox:
    """Scores by key, put in by one thread and waited for by another."""

    def __init__(self) -> None:
        self._values: dict[Key, NDArray[np.float32]] = {}
        self._changed = threading.Condition()

    def offer(self, scored: Scored) -> None:
        """Take scores; those of a key that is known already are the same ones, asked for again."""
        with self._changed:
            self._values.update(zip(scored.keys, scored.values, strict=True))
            self._changed.notify_all()

    def take(self, keys: Sequence[Key], timeout_s: float) -> Mapping[Key, NDArray[np.float32]]:
        """Values of ``keys``, waiting for those that are missing. Raises TimeoutError naming one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := [key for key in keys if key not in self._values]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"no score within scorer.timeout_s = {timeout_s:.0f} s for {len(missing)} of "
                        f"{len(keys)} samples, first {missing[0]}"
                    )
                self._changed.wait(left)
            return {key: self._values[key] for key in keys}

    def clear(self) -> None:
        """Forget everything: a step is done."""
        with self._changed:
            self._values.clear()


class OfferedSignals:
    """``MicroSignals`` out of a ``ScoreBox``."""

    def __init__(self, box: ScoreBox, batch: RankBatch, keys: Sequence[Key], timeout_s: float) -> None:
        self._box = box
        self._batch = batch
        self._keys = keys
        self._timeout_s = timeout_s

    def rows(self, rows: slice) -> Signal:
        """See ``MicroSignals``. Raises ValueError if a score does not fit its sample."""
        owner, mask = self._batch.sample[rows], self._batch.mask[rows]
        samples = [int(index) for index in np.unique(owner[mask])]
        found = self._box.take([self._keys[index] for index in samples], self._timeout_s)
        values = np.full(owner.shape, np.nan, np.float32)
        for index in samples:
            at = owner == index
            score = found[self._keys[index]]
            if int(at.sum()) != len(score):
                raise ValueError(f"{len(score)} scores for the {int(at.sum())} tokens of {self._keys[index]}")
            values[at] = score
        return Signal(values=np.nan_to_num(values), valid=mask & np.isfinite(values))
