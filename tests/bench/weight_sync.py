"""Weight sync against a bare copy of the same bytes, and calls per second of one engine.

``python tests/bench/weight_sync.py [--json FILE]`` makes a tiny random Llama (about one million
parameters), starts one engine on one thread and measures

- *sync*: ``Engine.load_weights`` of a file in shared memory (pause, checksum, load, relabel, resume),
  with requests in flight, against ``shutil.copyfile`` of that file within shared memory. No target: 20 ms
  of a sync are a fixed wait inside vLLM's pause, so for a tiny model the ratio says little.
- *calls*: 64 concurrent games of a growing prompt (about 60 to 150 ids, 8 more every turn, 2 of them
  sampled), each turn sent when the one before was answered. CPU seconds per call are
  reported beside the rate, since they hardly depend on what else the machine does.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engine import Engine
from cluster.config import GeneratorConfig
from cluster.types import Request, Sampling, Weights, ids, pack_ids
from cluster.weights_file import write_weights

VOCABULARY, LENGTH = 512, 512
ROUNDS = 7  # syncs and copies measured, alternating
GAMES, TURNS, PROMPT, NEW, GLUE = 64, 12, 60, 2, 6


def run() -> dict[str, Any]:
    """Measure; ``ratio`` is seconds of a sync over seconds of a copy (medians)."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=_shared()) as shared:
        return asyncio.run(_measure(Path(folder), Path(shared)))


def _shared() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _make_model(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


async def _measure(folder: Path, shared: Path) -> dict[str, Any]:
    tensors = _make_model(folder)
    config = GeneratorConfig(max_num_seqs=GAMES, kv_cache_gb=0.5, threads=1)
    engine = Engine(folder, config, LENGTH, name="bench", seed=1)
    started = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - started
    try:
        sync_s, copy_s, nbytes = await _sync_rounds(engine, tensors, shared)
        await _play(engine, turns=2)
        calls = await _calls(engine)
    finally:
        await engine.close()
    return {
        "name": "weight_sync",
        "ratio": sync_s / copy_s,
        "target": None,
        "sync_s": sync_s,
        "copy_s": copy_s,
        "bytes": nbytes,
        "start_s": start_s,
        **calls,
    }


async def _sync_rounds(
    engine: Engine, tensors: dict[str, torch.Tensor], shared: Path
) -> tuple[float, float, int]:
    syncs, copies, nbytes = [], [], 0
    for version in range(1, ROUNDS + 1):
        path = shared / f"{version}.safetensors"
        # One tensor differs every time, so that no update is the one already live.
        tensors = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1e-3}
        nbytes, checksum = write_weights(path, tensors)
        await engine.submit("sync", [_request(f"{version}.{n}", [n + 1] * 40, 48) for n in range(8)])
        started = time.perf_counter()
        await engine.load_weights(
            Weights(version=version, location=str(path), checksum=checksum, nbytes=nbytes), epoch=0
        )
        syncs.append(time.perf_counter() - started)
        started = time.perf_counter()
        shutil.copyfile(path, shared / "copy")
        copies.append(time.perf_counter() - started)
        path.unlink()
        left = 8
        while left:
            left -= len(await engine.collect("sync", 10.0))
    return statistics.median(syncs), statistics.median(copies), nbytes


async def _calls(engine: Engine) -> dict[str, float]:
    core, own, started = _children_cpu_s(), time.process_time(), time.perf_counter()
    count = await _play(engine, TURNS)
    return {
        "calls_per_s": count / (time.perf_counter() - started),
        "engine_cpu_ms_per_call": (_children_cpu_s() - core) / count * 1e3,
        "own_cpu_ms_per_call": (time.process_time() - own) / count * 1e3,
        "load": os.getloadavg()[0],
    }


async def _play(engine: Engine, turns: int) -> int:
    """Play all games to the end; returns the number of calls."""
    random = np.random.default_rng(turns)
    prompts = {f"{n}": random.integers(0, VOCABULARY, PROMPT).tolist() for n in range(GAMES)}
    left = dict.fromkeys(prompts, turns)
    await engine.submit("play", [_request(name, prompt, NEW) for name, prompt in prompts.items()])
    calls = 0
    while left:
        following = []
        for completion in await engine.collect("play", 10.0):
            if completion.error:
                raise RuntimeError(completion.error)
            calls += 1
            name = completion.id
            left[name] -= 1
            if not left[name]:
                del left[name]
                continue
            prompts[name] += ids(completion.output).tolist()
            prompts[name] += random.integers(0, VOCABULARY, GLUE).tolist()
            following.append(_request(name, prompts[name], NEW))
        await engine.submit("play", following)
    return calls


def _request(name: str, prompt: list[int], tokens: int) -> Request:
    return Request(id=name, prompt=pack_ids(prompt), sampling=Sampling(max_tokens=tokens))


def _children_cpu_s() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run()
    text = json.dumps(result, indent=1)
    if arguments.json:
        arguments.json.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
