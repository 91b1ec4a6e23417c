"""One learner rank: a plain class whose ``step`` is the only place where weights move.

A step is idempotent: asked again for the step it just made, a rank answers from memory, so a
lost reply can be asked for again. It runs forward, resolves late signals at the loss, runs
backward for each micro-batch, then clips and applies. Losses carry their global normaliser (see
``learner.batch``), FSDP averages gradients over ranks, so the loss is scaled by the world size
and the applied gradient is the sum over all tokens of all ranks.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from cluster.config import Config
from cluster.errors import LearnerLost
from cluster.types import Weights
from learner.batch import NOT_SAMPLED, RankBatch
from learner.checkpoint import Meta, fingerprint, load_checkpoint, save_checkpoint
from learner.mesh import Place, join_mesh, leave_mesh, rank_device, set_last_micro_batch, shard
from learner.model import FlatRows, PolicyModel, flatten_rows, load_model
from learner.objective.loss import TokenInputs, max_log_ratios, token_loss
from learner.optimizer import apply_step, gradient_norm, learning_rate, make_optimizer
from learner.publish import Publisher
from learner.signals import Signal, SignalSource

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


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did. Metrics are global: every rank returns the same, but for ``busy``.

    ``applied`` is False when the update was skipped (no trained token, or a gradient that is not
    finite): the version advances all the same, the weights do not. ``busy`` is this rank's
    (start, end) in seconds since the epoch. ``repeated`` marks an answer from memory.
    """

    step: int
    rank: int
    metrics: dict[str, float]
    applied: bool
    busy: tuple[float, float]
    repeated: bool = False


class LearnerRank:
    """State of one rank: model shard, optimizer shard, version (optimizer steps so far)."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        world: int,
        seed: int,
        vocab_used: int | None = None,
    ) -> None:
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(seed * 1_000_003 + rank)
        self.config = config
        self.model_path = model_path
        self.rank = rank
        self.world = world
        self.seed = seed
        self.version = 0
        self.skipped = 0  # steps whose update was not applied
        self.last: StepResult | None = None
        self.place: Place | None = None
        # Master weights are fp32 whatever the compute type: bf16 would swallow small updates.
        self.model: PolicyModel = load_model(model_path, torch.float32, rank_device(), vocab_used)
        self.optimizer: torch.optim.AdamW | None = None

    def join(self, master_addr: str, port: int) -> None:
        """Join the group and shard. Collective; raises LearnerLost if a rank does not arrive."""
        timeout_s = max(self.config.learner.start_timeout_s, self.config.learner.step_timeout_s)
        self.place = join_mesh(master_addr, port, self.rank, self.world, timeout_s)
        shard(self.model, self.place.mesh, getattr(torch, self.config.learner.dtype))
        self.model.train()
        self.optimizer = make_optimizer(self.model, self.config.learner)

    def leave(self) -> None:
        """Leave the group; the rank cannot step any more."""
        self.place = None
        leave_mesh()

    def joined(self) -> tuple[Place, torch.optim.AdamW]:
        """Place and optimizer; raises LearnerLost before ``join``."""
        if self.place is None or self.optimizer is None:
            raise LearnerLost(f"rank {self.rank} has not joined the learner group")
        return self.place, self.optimizer

    def step(self, batch: RankBatch, step: int, signals: SignalSource | None = None) -> StepResult:
        """Make optimizer step ``step`` (version ``step - 1`` becomes ``step``). Collective.

        Raises LearnerLost when the rank is not at ``step - 1``, or when a peer or a kernel fails:
        the group must then be rebuilt from a checkpoint.
        """
        if self.version == step:
            return self._answer_again(step)
        if self.version != step - 1:
            raise LearnerLost(
                f"rank {self.rank} is at version {self.version} and cannot make step {step}; "
                f"it can make step {self.version + 1}"
            )
        newest = int(batch.versions.max(initial=NOT_SAMPLED))
        if newest > self.version:
            raise LearnerLost(f"token version {newest} is newer than the learner's, {self.version}")
        started = time.time()
        try:
            metrics, applied = self._update(batch, step, signals)
        except RuntimeError as error:
            raise LearnerLost(f"rank {self.rank} failed in step {step}: {error}") from error
        self.version = step
        self.skipped += not applied
        metrics["steps_skipped"] = float(self.skipped)
        self.last = StepResult(
            step=step, rank=self.rank, metrics=metrics, applied=applied, busy=(started, time.time())
        )
        return self.last

    def publish(self, publisher: Publisher) -> Weights | None:
        """Publish the current version. Collective; the handle on rank 0, None elsewhere."""
        self.joined()
        return publisher.publish(self.model, self.version)

    def save(self, root: str, extra: dict[str, Any], export: bool = True) -> str:
        """Write a checkpoint of the current version below ``root``; returns its folder. Collective.

        ``extra`` (builtins and bytes) must be the same on every rank. ``export`` adds the weights
        as a Hugging Face folder.
        """
        place, optimizer = self.joined()
        inner = {"extra": extra, "skipped": self.skipped}
        meta = Meta(step=self.version, world=self.world, fingerprint=fingerprint(self.config), extra=inner)
        folder = save_checkpoint(
            Path(root),
            self.model,
            optimizer,
            place,
            meta,
            keep=self.config.run.keep_checkpoints,
            source=Path(self.model_path) if export else None,
        )
        return str(folder)

    def load(self, folder: str) -> dict[str, Any]:
        """Take weights, moments, random state and version from a verified checkpoint. Collective.

        Returns the ``extra`` it was saved with.
        """
        place, optimizer = self.joined()
        meta = load_checkpoint(Path(folder), self.model, optimizer, place)
        self.version, self.last = meta.step, None
        self.skipped = int(meta.extra["skipped"])
        extra: dict[str, Any] = meta.extra["extra"]
        return extra

    def _answer_again(self, step: int) -> StepResult:
        if self.last is not None and self.last.step == step:
            return msgspec.structs.replace(self.last, repeated=True)
        now = time.time()
        return StepResult(step=step, rank=self.rank, metrics={}, applied=True, busy=(now, now), repeated=True)

    def _update(
        self, batch: RankBatch, step: int, signals: SignalSource | None
    ) -> tuple[dict[str, float], bool]:
        place, optimizer = self.joined()
        rate = learning_rate(step, self.config.run.steps, self.config.learner)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer.zero_grad(set_to_none=True)
        sums, peaks = self._accumulate(batch, signals, place)
        norm, applied = 0.0, False
        if batch.global_tokens:
            norm = float(gradient_norm(parameters))
            applied = apply_step(optimizer, parameters, rate, norm, self.config.learner.grad_clip)
        optimizer.zero_grad(set_to_none=True)
        metrics = _reduce(sums, peaks, place)
        return metrics | {"grad_norm": norm, "lr": rate, "update_applied": float(applied)}, applied

    def _accumulate(
        self, batch: RankBatch, signals: SignalSource | None, place: Place
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Forward and backward of every micro-batch; gradients end up reduced over ranks."""
        sums: dict[str, Tensor] = {}
        peaks = torch.zeros(2, dtype=torch.float64, device=place.device)
        if not batch.global_tokens:
            return sums, peaks
        objective = self.config.objective
        fresh = on_policy_tokens(batch, self.version)
        signal: Signal | None = None
        micro_batches = batch.micro_batches()
        for number, rows in enumerate(micro_batches, start=1):
            set_last_micro_batch(self.model, number == len(micro_batches))
            flat = _flatten(batch, rows, place.device)
            logprobs, entropy = self.model(flat, objective.entropy_coef != 0)
            if signal is None and signals is not None and objective.kl_coef > 0:
                signal = signals()
            inputs = _inputs(batch, rows, flat, fresh, signal, place.device)
            loss, part = token_loss(logprobs, entropy, inputs, objective)
            (loss * place.world).backward()  # type: ignore[no-untyped-call]
            part["row_tokens"] = torch.tensor(flat.ids.numel(), dtype=torch.float64, device=place.device)
            for name, value in part.items():
                sums[name] = sums[name] + value if name in sums else value
            peaks = torch.maximum(peaks, torch.stack(max_log_ratios(logprobs, inputs)))
        return sums, peaks


def on_policy_tokens(batch: RankBatch, version: int) -> NDArray[np.bool_]:
    """Trained tokens [R, L] that, like every sampled token before them in their sample, have
    ``version``: learner and generator must agree on these to rounding."""
    stale = batch.mask & (batch.versions != version)
    count = np.cumsum(stale, axis=1)
    starts = np.arange(stale.shape[1])[None, :] - batch.positions
    before = np.take_along_axis(count - stale, starts, axis=1)
    on_policy: NDArray[np.bool_] = batch.mask & (count == before)
    return on_policy


def _flatten(batch: RankBatch, rows: slice, device: torch.device) -> FlatRows:
    return flatten_rows(
        batch.ids[rows],
        batch.positions[rows],
        batch.segments[rows],
        batch.mask[rows],
        batch.temperature[rows],
        device,
    )


def _inputs(
    batch: RankBatch,
    rows: slice,
    flat: FlatRows,
    fresh: NDArray[np.bool_],
    signal: Signal | None,
    device: torch.device,
) -> TokenInputs:
    def take(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array[rows].reshape(-1)[flat.flat]).to(device)

    if signal is not None and signal.values.shape != batch.ids.shape:
        raise ValueError(f"signal of shape {signal.values.shape} for rows of shape {batch.ids.shape}")
    return TokenInputs(
        behaviour=take(batch.behaviour),
        advantage=take(batch.advantage),
        weight=take(batch.weight),
        on_policy=take(fresh),
        reference=None if signal is None else take(signal.values),
        reference_valid=None if signal is None else take(signal.valid),
    )


def _reduce(sums: dict[str, Tensor], peaks: Tensor, place: Place) -> dict[str, float]:
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
