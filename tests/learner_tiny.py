"""Tiny models, samples and single-rank learners for the learner's tests."""

import dataclasses
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cluster.config import Config, build
from cluster.types import (
    Call,
    ContextOp,
    End,
    EndKind,
    Group,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from learner.batch import RankBatch, Sample, pack
from learner.checkpoint import tensors_of
from learner.model import flatten_rows, load_model
from learner.step import LearnerRank

VOCAB = 64


def make_model(folder: Path, kind: str = "llama", tied: bool = False, **changes: Any) -> Path:
    """A random model of 2 layers, hidden 64, vocabulary 64; weights large enough to matter."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    } | changes
    torch.manual_seed(1)
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    model.save_pretrained(folder)
    return folder


def make_config(path: Path, **sections: dict[str, Any]) -> Config:
    """A config with the sections given on top of small defaults."""
    learner = {"row_tokens": 64, "micro_rows": 8, "lr": 1e-2, "step_timeout_s": 60.0, "start_timeout_s": 60.0}
    tree: dict[str, Any] = {
        "env": {"name": "frozenlake"},
        "model": {"path": str(path)},
        "harness": {"max_context": 64, "max_new_tokens": 8},
        **sections,
    }
    tree["learner"] = learner | sections.get("learner", {})
    return build(tree)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def single_rank(config: Config, path: Path, **options: Any) -> Iterator[LearnerRank]:
    """A learner group of one in this process."""
    rank = LearnerRank(config, str(path), 0, 1, seed=0, **options)
    rank.join("127.0.0.1", free_port())
    try:
        yield rank
    finally:
        rank.leave()


def make_sample(index: int, length: int, prompt: int, seed: int = 0, **changes: Any) -> Sample:
    """Random ids; everything after the prompt was sampled at version 0."""
    rng = np.random.default_rng([seed, index])
    mask = np.arange(length) >= prompt
    return dataclasses.replace(
        Sample(
            trajectory=f"t{index}",
            group="g0",
            ids=rng.integers(0, VOCAB, length).astype(np.int32),
            mask=mask,
            behaviour=np.where(mask, -4.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turns=np.zeros(length, np.int16),
            temperature=0.7,
        ),
        **changes,
    )


def make_samples(seed: int = 0) -> tuple[list[Sample], list[np.ndarray]]:
    """Eight ragged samples and an advantage per token each."""
    shapes = [(5, 2), (9, 3), (30, 10), (31, 4), (2, 1), (17, 16), (12, 6), (40, 5)]
    samples = [make_sample(i, length, prompt, seed) for i, (length, prompt) in enumerate(shapes)]
    rng = np.random.default_rng(seed + 100)
    return samples, [np.where(s.mask, rng.normal(), 0).astype(np.float32) for s in samples]


def with_behaviour(path: Path, samples: list[Sample], noise: float = 0.0) -> list[Sample]:
    """Samples whose behaviour log-probs are those of the model at ``path``, plus noise."""
    model = load_model(path).eval()
    rng = np.random.default_rng(5)
    done = []
    for sample in samples:
        logprobs = score_alone(model, sample).astype(np.float64)
        logprobs += noise * rng.normal(size=len(logprobs))
        done.append(
            dataclasses.replace(sample, behaviour=np.where(sample.mask, logprobs, 0).astype(np.float32))
        )
    return done


def score_alone(model: Any, sample: Sample) -> np.ndarray:
    """Log-prob per token by the plain Hugging Face forward of one unpacked sample."""
    with torch.no_grad():
        row = rows_of(one_rank([sample], [np.zeros(len(sample.ids), np.float32)]))
        ids = torch.tensor(sample.ids[None].astype(np.int64))
        logits = model.hf(input_ids=ids, layout=row.layout).logits[0]
        logprobs = torch.log_softmax(logits[:-1] / sample.temperature, -1)
    out = np.zeros(len(sample.ids), np.float32)
    out[1:] = logprobs.gather(1, torch.tensor(sample.ids[1:, None].astype(np.int64)))[:, 0].numpy()
    return out


def one_rank(
    samples: list[Sample], coefficients: list[np.ndarray], micro_rows: int = 8, **kw: Any
) -> RankBatch:
    return pack(samples, coefficients, kw.pop("row_tokens", 64), 1, micro_rows, **kw).ranks[0]


def rows_of(batch: RankBatch) -> Any:
    return flatten_rows(
        batch.ids, batch.positions, batch.segments, batch.mask, batch.temperature, torch.device("cpu")
    )


def make_call(number: int, keep: int, added: list[int], output: list[int], **changes: Any) -> Call:
    fields: dict[str, Any] = {
        "call": number,
        "keep": keep,
        "added": pack_ids(added),
        "output": pack_ids(output),
        "logprobs": pack_floats([-0.5 - 0.01 * i for i in range(len(output))]),
        "versions": (VersionSpan(0, 0, len(output)),) if output else (),
        "stop": StopReason.STOP,
        "temperature": 1.0,
        "op": ContextOp.APPEND,
    } | changes
    return Call(**fields)


def make_trajectory(name: str, calls: list[Call], outcome: float | None = 1.0) -> Trajectory:
    turns = tuple(Turn(turn=i, calls=(call,)) for i, call in enumerate(calls))
    end = End(
        trajectory=name, group="g0", attempt=0, kind=EndKind.FINISHED, turns=len(turns), outcome=outcome
    )
    return Trajectory(id=name, group="g0", attempt=0, turns=turns, end=end)


def make_group(members: list[Trajectory]) -> Group:
    return Group(
        id="g0", task=Task(id="x", env="frozenlake", seed=0), size=len(members), members=tuple(members)
    )


def state_of(rank: LearnerRank) -> dict[str, torch.Tensor]:
    """Weights and moments, whole, by name."""
    _, optimizer = rank.joined()
    found = tensors_of(rank.model, optimizer)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in found.items()}


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == two.keys() and one
    for name in one:
        assert torch.equal(one[name], two[name]), name
