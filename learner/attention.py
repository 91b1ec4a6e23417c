"""Attention over packed samples without a mask: samples of like length are batched together.

A mask over a packed row costs ``L * L`` per row however short its samples are. Here the tokens of
a micro-batch lie flat (``[1, N]``, no padding), every token-wise layer runs on exactly the real
tokens, and attention gathers samples of similar length into one right-padded causal batch each.
Right padding is harmless under a causal mask, so no sample sees another and no mask exists.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from learner.prefix import Continued

NAME = "springtide_packed"
BUCKET_RATIO = 1.25  # a bucket holds samples of lengths within this ratio: padding below a quarter


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the samples of a flat micro-batch lie.

    ``gather`` [P] maps bucket slots to flat tokens (padding slots point at token 0), ``scatter``
    [N] maps flat tokens to their slot, ``pads`` lists the padding slots, ``buckets`` the
    (samples, length) of each consecutive bucket. ``whole`` means that the flat order already is
    the bucket order and nothing needs moving.
    """

    gather: Tensor
    scatter: Tensor
    pads: Tensor
    buckets: tuple[tuple[int, int], ...]
    whole: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(width for _, width in self.buckets)


def layout_of(starts: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> Layout:
    """Plan the buckets for samples at ``starts`` with ``lengths`` in the flat order."""
    order = np.argsort(lengths, kind="stable")
    groups: list[NDArray[np.int64]] = []
    while len(order):
        shortest = lengths[order[0]]
        size = int(np.searchsorted(lengths[order], shortest * BUCKET_RATIO, side="right"))
        groups.append(np.sort(order[:size]))
        order = order[size:]
    total = int(lengths.sum())
    scatter = np.empty(total, np.int64)
    gather_parts: list[NDArray[np.int64]] = []
    pad_parts: list[NDArray[np.int64]] = []
    buckets: list[tuple[int, int]] = []
    base = 0
    for group in groups:
        width = int(lengths[group].max())
        offsets = np.arange(width)
        real = offsets[None, :] < lengths[group][:, None]
        flat = np.where(real, starts[group][:, None] + offsets[None, :], 0).reshape(-1)
        slots = base + np.arange(flat.size)
        scatter[flat[real.reshape(-1)]] = slots[real.reshape(-1)]
        pad_parts.append(slots[~real.reshape(-1)])
        gather_parts.append(flat)
        buckets.append((len(group), width))
        base += flat.size
    gather = np.concatenate(gather_parts)
    pads = np.concatenate(pad_parts)
    whole = len(gather) == total and bool(np.array_equal(gather, np.arange(total)))
    return Layout(
        gather=torch.from_numpy(gather).to(device),
        scatter=torch.from_numpy(scatter).to(device),
        pads=torch.from_numpy(pads).to(device),
        buckets=tuple(buckets),
        whole=whole,
    )


class _ToSlots(torch.autograd.Function):
    """``x[gather]``; its backward is a gather too, since each token has exactly one real slot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.layout.scatter), None


class _FromSlots(torch.autograd.Function):
    """``x[scatter]``; backward gathers back and gives padding slots zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        spread = grads[0].index_select(0, ctx.layout.gather)
        return spread.index_fill_(0, ctx.layout.pads, 0.0), None


def to_slots(x: Tensor, layout: Layout) -> Tensor:
    """Flat tokens [N, ...] to bucket slots [P, ...]."""
    moved: Tensor = _ToSlots.apply(x, layout)  # type: ignore[no-untyped-call]
    return moved


def from_slots(x: Tensor, layout: Layout) -> Tensor:
    """Bucket slots [P, ...] back to flat tokens [N, ...]."""
    moved: Tensor = _FromSlots.apply(x, layout)  # type: ignore[no-untyped-call]
    return moved


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | Continued,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention interface of transformers: ``query`` [1, H, N, D] -> output [1, N, H, D].

    Raises ValueError for a sliding window that is shorter than a sample.
    """
    longest = layout.longest
    if sliding_window is not None and sliding_window < longest:
        raise ValueError(f"sliding window {sliding_window} is shorter than a sample of {longest} tokens")
    if isinstance(layout, Continued):
        layer = module.layer_idx
        assert isinstance(layer, int)
        return layout.attend(layer, query, key, value, scaling), None
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if not layout.whole:
        flat = [to_slots(tensor, layout) for tensor in flat]
    repeated = query.shape[1] != key.shape[1]
    parts: list[Tensor] = []
    sizes = [samples * width for samples, width in layout.buckets]
    split = [torch.split(tensor, sizes) for tensor in flat]
    for bucket, *qkv in zip(layout.buckets, *split, strict=True):
        q, k, v = (tensor.unflatten(0, bucket).transpose(1, 2) for tensor in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=repeated
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if not layout.whole:
        joined = from_slots(joined, layout)
    return joined.unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
