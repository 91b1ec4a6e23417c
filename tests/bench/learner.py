"""Learner throughput against a plain PyTorch loop, same tokens, same run.

The plain loop is what one would write by hand: the same Hugging Face model with its own SDPA
attention, samples sorted by length and right-padded in micro-batches of the same token budget,
logits of every position, the same clipped surrogate, clipping by norm, foreach AdamW. Both do one
optimizer step on the same samples; rounds alternate, and the medians are compared.

``python tests/bench/learner.py`` prints the result of ``run()`` as JSON.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.config import build
from learner.batch import Sample, pack
from learner.step import LearnerRank
from tests.learner_tiny import free_port

ROW_TOKENS = 1024
MICRO_ROWS = 4
SIZES = (1024, 2048, 8192)


def make_samples(total: int, vocab: int) -> list[Sample]:
    """Samples of 60 to 260 tokens, about a third of them sampled, until ``total`` is reached."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    left = total
    while left > 0:
        length = min(left, int(rng.integers(60, 260)))
        mask = (np.arange(length) >= min(30, length - 1)) & (rng.random(length) < 0.4)
        mask[-1] = length > 1
        samples.append(
            Sample(
                trajectory=f"t{len(samples)}",
                group="g",
                ids=rng.integers(0, vocab, length).astype(np.int32),
                mask=mask,
                behaviour=np.where(mask, -np.log(vocab), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=np.zeros(length, np.int16),
                temperature=1.0,
            )
        )
        left -= length
    return samples


class PlainLoop:
    """The hand-written loop."""

    def __init__(self, path: Path, lr: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )

    def step(self, samples: list[Sample], advantage: list[NDArray[np.float32]]) -> None:
        total = sum(sample.trained for sample in samples)
        order = sorted(range(len(samples)), key=lambda i: -len(samples[i].ids))
        while order:
            width = len(samples[order[0]].ids)
            count = max(1, ROW_TOKENS * MICRO_ROWS // width)
            self._backward([samples[i] for i in order[:count]], [advantage[i] for i in order[:count]], total)
            order = order[count:]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, samples: list[Sample], advantage: list[NDArray[np.float32]], total: int) -> None:
        shape = (len(samples), len(samples[0].ids))
        ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        old, values = torch.zeros(shape), torch.zeros(shape)
        for row, (sample, value) in enumerate(zip(samples, advantage, strict=True)):
            size = len(sample.ids)
            ids[row, :size] = torch.from_numpy(sample.ids.astype(np.int64))
            mask[row, :size] = torch.from_numpy(sample.mask)
            old[row, :size] = torch.from_numpy(sample.behaviour)
            values[row, :size] = torch.from_numpy(value)
        logits = self.model(ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - old[:, 1:]).exp()
        loss = -torch.minimum(ratio * values[:, 1:], ratio.clamp(0.8, 1.28) * values[:, 1:])
        (loss * mask[:, 1:]).sum().div(total).backward()


def run(rounds: int = 5, hidden: int = 128, layers: int = 4, vocab: int = 512) -> dict[str, Any]:
    """Tokens/s of both and their ratio, per batch size; a rank of one, one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="springtide-bench-") as folder:
        path = Path(folder)
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab,
                hidden_size=hidden,
                intermediate_size=hidden * 3,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=ROW_TOKENS,
            )
        ).save_pretrained(path)
        tree = {
            "env": {"name": "frozenlake"},
            "model": {"path": folder},
            "learner": {"row_tokens": ROW_TOKENS, "micro_rows": MICRO_ROWS, "lr": 1e-4},
        }
        rank = LearnerRank(build(tree), folder, 0, 1, seed=0)
        rank.join("127.0.0.1", free_port())
        plain = PlainLoop(path, 1e-4)
        try:
            sizes = {str(total): _compare(rank, plain, total, vocab, rounds) for total in SIZES}
        finally:
            rank.leave()
    parameters = sum(p.numel() for p in plain.model.parameters())
    return {"parameters": parameters, "target_ratio_at_8192": 0.9, "tokens": sizes}


def _compare(rank: LearnerRank, plain: PlainLoop, total: int, vocab: int, rounds: int) -> dict[str, float]:
    samples = make_samples(total, vocab)
    rng = np.random.default_rng(1)
    advantage = [np.where(s.mask, rng.normal(), 0).astype(np.float32) for s in samples]
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        batch = pack(samples, advantage, ROW_TOKENS, 1, MICRO_ROWS).ranks[0]
        rank.step(batch, rank.version + 1)
        middle = time.perf_counter()
        plain.step(samples, advantage)
        end = time.perf_counter()
        if number:  # the first round warms up
            ours.append(middle - start)
            theirs.append(end - middle)
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "learner_tok_s": round(total / mine, 1),
        "plain_tok_s": round(total / other, 1),
        "ratio": round(other / mine, 3),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
