"""A supervised start: imitate given play, so that reinforcement finds successes to reinforce."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from learner.export import full_tensors
from learner.model import FlatRows, PolicyModel, flatten_rows, load_model

Report = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""

_WARMUP_STEPS = 10
_LAST_RATE = 0.05  # share of the learning rate that is left at the end
_GRAD_CLIP = 1.0


def warm_start(
    folder: Path,
    ids: Sequence[NDArray[np.int32]],
    masks: Sequence[NDArray[np.bool_]],
    *,
    epochs: int,
    batch: int,
    lr: float,
    context_weight: float = 0.0,
    vocab_used: int | None = None,
    seed: int = 0,
    threads: int = 1,
    report: Report | None = None,
) -> float:
    """Train the model in ``folder`` on rows of token ids and write it back; returns the last loss.

    ``ids[i]`` [T_i] is a whole episode, ``masks[i]`` [T_i] marks the tokens to imitate (never the
    first one). The other tokens count with ``context_weight``: predicting what the environment
    says teaches the model to read it, and nothing about what to do. The loss is the weighted mean
    over the tokens of a batch. The same arguments give the same weights. Raises ValueError when
    rows and masks do not fit together.
    """
    if len(ids) != len(masks) or not ids or any(i.shape != m.shape for i, m in zip(ids, masks, strict=True)):
        raise ValueError(f"{len(ids)} rows and {len(masks)} masks: each row needs a mask of its shape")
    torch.set_num_threads(threads)
    model = load_model(folder, vocab_used=vocab_used)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng(seed)
    per_epoch = math.ceil(len(ids) / batch)
    total, last = epochs * per_epoch, math.nan
    for step in range(total):
        if step % per_epoch == 0:
            order = rng.permutation(len(ids))
        chosen = order[(step % per_epoch) * batch :][:batch]
        rows, weight = _flatten([ids[i] for i in chosen], [masks[i] for i in chosen], context_weight)
        loss = _loss(model, rows, weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRAD_CLIP)
        for group in optimizer.param_groups:
            group["lr"] = lr * rate(step + 1, total)
        optimizer.step()
        last = float(loss.detach())
        if report is not None:
            report(step + 1, total, last)
    _write(model, folder)
    return last


def rate(step: int, total: int) -> float:
    """Share of the learning rate at ``step`` (1 is the first): short warm-up, then linear decay."""
    return min(1.0, step / _WARMUP_STEPS) * max(_LAST_RATE, 1 - step / total)


def _flatten(
    ids: list[NDArray[np.int32]], masks: list[NDArray[np.bool_]], context_weight: float
) -> tuple[FlatRows, Tensor]:
    """Pad to [R, L] and flatten again: selected targets and their weights [S]."""
    shape = (len(ids), max(len(row) for row in ids))
    tokens = np.zeros(shape, np.int32)
    segments = np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    for at, (row, mask) in enumerate(zip(ids, masks, strict=True)):
        tokens[at, : len(row)] = row
        segments[at, : len(row)] = 1
        weights[at, : len(row)] = np.where(mask, 1.0, context_weight)
        if mask[0]:
            raise ValueError("a mask marks the first token of a row, which no context predicts")
        weights[at, 0] = 0.0
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    rows = flatten_rows(
        tokens, positions, segments, weights > 0, np.ones(shape, np.float32), torch.device("cpu")
    )
    return rows, torch.from_numpy(weights.reshape(-1)[rows.flat])


def _loss(model: PolicyModel, rows: FlatRows, weight: Tensor) -> Tensor:
    logprobs: Tensor = model(rows)[0]
    return -(logprobs * weight).sum() / weight.sum()


def _write(model: PolicyModel, folder: Path) -> None:
    """Replace the weights in the folder; the rename is the last act."""
    tensors = {name: value.contiguous() for name, value in full_tensors(model, torch.float32)}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
