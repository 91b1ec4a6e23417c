"""One learner rank: a plain class whose ``step`` is the only place where weights move.

A step is idempotent: asked again for the step it just made, a rank answers from memory, so a
lost reply can be asked for again. For each micro-batch it runs forward, resolves the late signal at the
loss, runs backward; then it clips and applies. (``deferred=False`` resolves the signal before the forward
pass instead: the same gradients, and forward waits for scores.) Losses carry their global normaliser (see
``learner.batch``), FSDP averages gradients over ranks, so the loss is scaled by the world size
and the applied gradient is the sum over all tokens of all ranks.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from cluster.config import Config
from cluster.errors import LearnerLost
from cluster.types import Weights
from learner.batch import RankBatch
from learner.checkpoint import Meta, load_checkpoint, random_state, restore_random_state, save_checkpoint
from learner.clock import Busy
from learner.late import MicroSignals, SignalSource
from learner.mesh import Place, join_mesh, leave_mesh, rank_device, set_last_micro_batch, shard
from learner.micro import PerMicro, flatten, reduce_metrics, token_inputs
from learner.micro import on_policy_tokens as on_policy_tokens
from learner.model import PolicyModel, load_model
from learner.objective.loss import max_log_ratios, token_loss
from learner.optimizer import apply_step, gradient_norm, learning_rate, make_optimizer
from learner.publish import Publisher
from learner.reshard import Part, gather_parts, load_parts
from learner.state import Gathered


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did. Metrics are global: every rank returns the same, but for times.

    ``applied`` is False when the update was skipped (no trained token, or a gradient that is not
    finite): the version advances all the same, the weights do not. ``busy`` is this rank's
    (start, end) in seconds since the epoch, ``waited_s`` the part of it spent waiting for signals.
    ``repeated`` marks an answer from memory.
    """

    step: int
    rank: int
    metrics: dict[str, float]
    applied: bool
    busy: tuple[float, float]
    repeated: bool = False
    waited_s: float = 0.0


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
        self.deferred = True  # the loss is made after the forward pass, when its signal is there
        self._waited = 0.0  # seconds of the step under way spent waiting for signals
        self._held: list[Part] = []  # gathered for another world
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

    def step(
        self, batch: RankBatch, step: int, signals: SignalSource | MicroSignals | None = None
    ) -> StepResult:
        """Make optimizer step ``step`` (version ``step - 1`` becomes ``step``). Collective.

        Raises LearnerLost when the rank is not at ``step - 1``, or when a peer or a kernel fails:
        the group must then be rebuilt from a checkpoint.
        """
        if self.version == step:
            return self._answer_again(step)
        batch.check(self.rank, self.version, step)
        busy = Busy()
        try:
            metrics, applied = self._update(batch, step, signals)
        except RuntimeError as error:
            raise LearnerLost(f"rank {self.rank} failed in step {step}: {error}") from error
        self.version = step
        self.skipped += not applied
        metrics["steps_skipped"] = float(self.skipped)
        self.last = StepResult(
            step=step,
            rank=self.rank,
            metrics=metrics,
            applied=applied,
            busy=busy.told(),
            waited_s=self._waited,
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
        meta = Meta(step=self.version, world=self.world, extra=inner)
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
        self.skipped = int(meta.extra.get("skipped", 0))  # early checkpoints do not tell
        extra: dict[str, Any] = meta.extra["extra"]
        return extra

    # -- to and from another world ------------------------------------------------------

    def gather(self) -> Gathered:
        """Whole state to the CPU of rank 0, there to be fetched by ``part``. Collective."""
        place, optimizer = self.joined()
        self._held = gather_parts(self.model, optimizer, place.rank == 0)
        return Gathered(
            version=self.version,
            skipped=self.skipped,
            random=random_state(),
            parts=len(self._held),
            nbytes=sum(array.nbytes for part in self._held for array in part.values()),
        )

    def part(self, index: int) -> Part:
        """One part of what was gathered; fetching it lets go of it."""
        part, self._held[index] = self._held[index], {}
        return part

    def adopt(self, version: int, skipped: int, random: Sequence[bytes], parts: Iterable[Part]) -> None:
        """Take this rank's shard of a gathered state (see ``learner.state.State``)."""
        _, optimizer = self.joined()
        load_parts(self.model, optimizer, parts)
        self.version, self.skipped, self.last = version, skipped, None
        if self.rank < len(random):
            restore_random_state(random[self.rank])
        else:  # the seeds of a fresh rank would repeat the stream that an earlier rank of this place drew
            torch.manual_seed((self.seed * 1_000_003 + self.rank) * 1_000_003 + version)

    def _answer_again(self, step: int) -> StepResult:
        if self.last is not None and self.last.step == step:
            return msgspec.structs.replace(self.last, repeated=True)
        return StepResult(
            step=step, rank=self.rank, metrics={}, applied=True, busy=Busy().told(), repeated=True
        )

    def _update(
        self, batch: RankBatch, step: int, signals: SignalSource | MicroSignals | None
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
        metrics = reduce_metrics(sums, peaks, place)
        return metrics | {"grad_norm": norm, "lr": rate, "update_applied": float(applied)}, applied

    def _accumulate(
        self, batch: RankBatch, signals: SignalSource | MicroSignals | None, place: Place
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Forward and backward of every micro-batch; gradients end up reduced over ranks."""
        sums: dict[str, Tensor] = {}
        peaks = torch.zeros(2, dtype=torch.float64, device=place.device)
        self._waited = 0.0
        if not batch.global_tokens:
            return sums, peaks
        objective = self.config.objective
        fresh = on_policy_tokens(batch, self.version)
        late = PerMicro(batch, signals if objective.kl_coef > 0 else None)
        micro_batches = batch.micro_batches()
        for number, rows in enumerate(micro_batches, start=1):
            set_last_micro_batch(self.model, number == len(micro_batches))
            signal = None if self.deferred else late.resolve(rows)
            flat = flatten(batch, rows, place.device)
            logprobs, entropy = self.model(flat, objective.entropy_coef != 0)
            if self.deferred:
                signal = late.resolve(rows)
            inputs = token_inputs(batch, rows, flat, fresh, signal, place.device)
            loss, part = token_loss(logprobs, entropy, inputs, objective)
            (loss * place.world).backward()  # type: ignore[no-untyped-call]
            part["row_tokens"] = torch.tensor(flat.ids.numel(), dtype=torch.float64, device=place.device)
            for name, value in part.items():
                sums[name] = sums[name] + value if name in sums else value
            peaks = torch.maximum(peaks, torch.stack(max_log_ratios(logprobs, inputs)))
        self._waited = late.waited_s
        return sums, peaks
