"""Forward passes that go on from a prefix: keys and values of contexts, and attention over them.

The token-wise layers run on the new tokens of many contexts at once, laid side by side as in
``learner.attention``; each context's new tokens attend to its own prefix and to themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

GROW = 1.25
"""A store that is full grows by a quarter: its tokens are copied four times in the mean, a fifth is empty."""
BLOCK = 16


class Prefix:
    """Keys and values of one context's first tokens, layer by layer: stores [2, H, capacity, D]."""

    def __init__(self) -> None:
        self.capacity = 0
        self._stores: list[Tensor] = []

    def reserve(self, tokens: int) -> None:
        """Have room for ``tokens``; what is stored stays."""
        if tokens <= self.capacity:
            return
        wanted = max(tokens, int(self.capacity * GROW))
        self.capacity = -(-wanted // BLOCK) * BLOCK
        for layer, store in enumerate(self._stores):
            grown = store.new_empty((2, store.shape[1], self.capacity, store.shape[3]))
            grown[:, :, : store.shape[2]] = store
            self._stores[layer] = grown

    def extend(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``key``, ``value`` [H, n, D] at ``start``; returns those of all tokens [H, start + n, D]."""
        end = start + key.shape[1]
        if layer == len(self._stores):
            self._stores.append(key.new_empty((2, key.shape[0], self.capacity, key.shape[2])))
        store = self._stores[layer]
        store[0, :, start:end] = key
        store[1, :, start:end] = value
        return store[0, :, :end], store[1, :, :end]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """``count`` tokens of a context, after its first ``start``."""

    prefix: Prefix
    start: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """The layout of new tokens: ``parts`` lie side by side, in order."""

    parts: Sequence[Part]
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """``query`` [1, Hq, N, D], ``key`` and ``value`` [1, H, N, D] of the new tokens -> [1, N, Hq, D]."""
        outputs: list[Tensor] = []
        begun = 0
        repeated = query.shape[1] != key.shape[1]
        for part in self.parts:
            new = slice(begun, begun + part.count)
            begun += part.count
            keys, values = part.prefix.extend(layer, part.start, key[0, :, new], value[0, :, new])
            mask = None if part.start == 0 else self._mask(part, query.device)
            out = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, new], keys[None], values[None],
                attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=repeated,
            )  # fmt: skip
            outputs.append(out)
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _mask(self, part: Part, device: torch.device) -> Tensor:
        """[count, start + count]: a token sees what lies before it, and itself. Same in every layer."""
        shape = (part.count, part.start)
        if shape not in self._masks:
            seen = torch.ones(part.count, part.start + part.count, dtype=torch.bool, device=device)
            self._masks[shape] = seen.tril(diagonal=part.start)
        return self._masks[shape]

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(part.start + part.count for part in self.parts)
