"""The policy as the learner sees it: packed rows in, log-probs of chosen tokens out.

Log-probs are those of the *processed* distribution, ``log_softmax(logits / temperature)`` in
fp32 over the ids that the tokenizer knows: the definition that the generators record too.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from learner.attention import NAME, Layout, layout_of
from learner.prefix import Continued

PREFIX = "hf."


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """Rows without their padding: ``N`` real tokens side by side, and ``S`` selected targets.

    ``select`` [S] indexes the token *before* each target (its hidden state predicts it),
    ``flat`` [S] is the index of the target in the ``[R * L]`` arrays the rows came from.
    """

    ids: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    layout: Layout | Continued
    select: Tensor  # int64 [S]
    targets: Tensor  # int64 [S]
    temperature: Tensor  # float32 [S]
    flat: NDArray[np.int64]


def flatten_rows(
    ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    segments: NDArray[np.int32],
    mask: NDArray[np.bool_],
    temperature: NDArray[np.float32],
    device: torch.device,
) -> FlatRows:
    """Drop the padding of rows ``[R, L]`` and select the tokens that ``mask`` marks.

    A token of the mask must have a predecessor in its own sample. Rows of nothing but padding
    become one token that no loss selects, so that every rank still runs its collectives.
    """
    real = (segments > 0).reshape(-1)
    where = np.flatnonzero(real)
    if not len(where):
        where = np.zeros(1, np.int64)
    flat_positions = positions.reshape(-1)[where].astype(np.int64)
    starts = np.flatnonzero(flat_positions == 0)
    lengths = np.diff(np.append(starts, len(where)))
    marked = mask.reshape(-1)[where] & real[where]
    chosen = np.flatnonzero(marked)
    if len(chosen) and (flat_positions[chosen] == 0).any():
        raise ValueError("the mask marks the first token of a sample, which no context predicts")
    flat_ids = ids.reshape(-1)[where].astype(np.int64)

    def put(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return FlatRows(
        ids=put(flat_ids[None]),
        positions=put(flat_positions[None]),
        layout=layout_of(starts, lengths, device),
        select=put(chosen - 1),
        targets=put(flat_ids[chosen]),
        temperature=torch.from_numpy(temperature.reshape(-1)[where[chosen]]).to(device),
        flat=where[chosen],
    )


class PolicyModel(nn.Module):
    """A causal language model of transformers, with the vocabulary projected only where needed.

    ``vocab_used``: ids from here on are embedding padding; they get no probability.
    """

    def __init__(self, hf: Any, vocab_used: int | None = None) -> None:
        super().__init__()
        self.hf: Any = hf
        size = int(hf.config.vocab_size)
        if vocab_used is not None and not 0 < vocab_used <= size:
            raise ValueError(f"vocab_used = {vocab_used}: must lie in 1..{size}, the model's vocabulary")
        self.vocab_used = vocab_used or size

    def forward(self, rows: FlatRows, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [S] of the selected tokens and entropy [S] of their distributions, fp32.

        Entropy carries no gradient unless asked.
        """
        hidden = self.hf.model(
            input_ids=rows.ids, position_ids=rows.positions, use_cache=False, layout=rows.layout
        ).last_hidden_state[0]
        logits = self.hf.lm_head(hidden.index_select(0, rows.select))
        logits = logits[:, : self.vocab_used].float() / rows.temperature[:, None]
        full = torch.log_softmax(logits, dim=-1)
        # nll_loss gives a tensor of its own; FSDP warns of outputs that are views, such as an index gives.
        chosen = -torch.nn.functional.nll_loss(full, rows.targets, reduction="none")
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(full.exp() * full).sum(-1)
        return chosen, entropy

    def layers(self) -> Iterator[nn.Module]:
        """The decoder layers, in order."""
        yield from self.hf.model.layers


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    vocab_used: int | None = None,
) -> PolicyModel:
    """Load a folder in Hugging Face layout. Dropout is refused: log-probs must be reproducible."""
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(f"{path}: attention_dropout = {config.attention_dropout}; must be 0 for training")
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=NAME)
    model = PolicyModel(hf, vocab_used)
    return model.to(device) if device is not None else model


def parameter_name(name: str) -> str:
    """Name of a parameter in the Hugging Face layout."""
    return name.removeprefix(PREFIX)
