"""The tiny model and its supervised start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.harness.chat import ChatHarness
from actors.tokenizer import Tokenizer
from cluster.config import Config, build
from cluster.errors import ConfigError
from cluster.types import ids, pack_ids
from deploy.tiny import make_tiny
from deploy.warmstart import play_episode, warm_start
from envs.frozenlake import WORDS, FrozenLake, FrozenLakeTasks
from learner.model import load_model
from learner.warmstart import rate
from learner.warmstart import warm_start as train


def config(**warm: Any) -> Config:
    return build(
        {
            "env": {"name": "frozenlake", "max_turns": 8},
            "model": {"maker": "tiny", "warm_start": True, "warm_params": warm},
            "harness": {"max_new_tokens": 2, "max_context": 128},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "tiny", hidden=32, layers=1)
    return tmp_path / "tiny"


def test_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    make_tiny(tmp_path / "again", hidden=32, layers=1)
    assert torch.equal(state, torch.random.get_rng_state())
    make_tiny(tmp_path / "other", hidden=32, layers=1, seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_architectures_load_as_policies(tmp_path: Path, architecture: str) -> None:
    make_tiny(tmp_path, architecture=architecture, hidden=64)
    model = load_model(tmp_path)
    assert model.hf.config.model_type == architecture
    assert model.hf.config.vocab_size % 32 == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"architecture": "lama"}, "did you mean 'llama'"),
        ({"hidden": 48}, "multiple of 32"),
        ({"layers": 0}, "layers = 0"),
        ({"words": ["up", "up"]}, r"twice: \['up'\]"),
    ],
)
def test_bad_parameters_are_refused(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny(tmp_path, **params)


def test_tokenizer_is_word_level_and_the_template_appends(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert len({token for word in WORDS for token in tokenizer.encode(word)}) == len(WORDS)
    harness = ChatHarness(tokenizer, config().harness)
    assert harness.rewrites == "never"
    assert tokenizer.decode([harness.end_of_turn or 0], skip_special=False) == "<end>"
    messages = [{"role": "user", "content": "up:edge"}]
    before = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
    reply = [*tokenizer.encode("down"), harness.end_of_turn]
    messages += [{"role": "assistant", "content": "down"}, {"role": "user", "content": "left:ice"}]
    after = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
    assert after[: len(before) + 2] == before + reply
    assert len(before) == 3 and len(after) == 8


def test_scripted_rows_are_the_ids_that_training_sees(folder: Path) -> None:
    harness = ChatHarness(Tokenizer(folder), config().harness)
    tasks = FrozenLakeTasks()
    row = play_episode(FrozenLake(), tasks, "warm", 0, lambda _: "up", harness, 5)
    assert row is not None
    whole, mask = row
    assert whole.shape == mask.shape and whole.dtype == np.int32
    up = harness.tokenizer.encode("up")[0]
    turns = int(mask.sum()) // 2
    assert whole[mask].tolist() == [up, harness.end_of_turn] * turns and 1 <= turns <= 5
    lake = FrozenLake()
    history = harness.start(lake.start(tasks.task("warm", 0), 0))
    for _ in range(turns):
        prompt = harness.prompt(history)
        assert prompt is not None
        harness.reply(history, prompt, pack_ids([up, harness.end_of_turn or 0]))
        harness.observe(history, lake.step(["up"]).observation)
    assert ids(bytes(history.ids)).tolist() == whole.tolist()


def test_imitation_learns_what_is_marked_and_nothing_else(folder: Path) -> None:
    rows = [np.asarray([2, 10 + i % 4, 3, 20 + i % 4, 1], np.int32) for i in range(64)]
    masks = [np.asarray([False, False, False, True, True]) for _ in rows]
    seen: list[tuple[int, int]] = []
    loss = train(
        folder,
        rows,
        masks,
        epochs=30,
        batch=16,
        lr=1e-2,
        vocab_used=63,
        report=lambda step, total, _: seen.append((step, total)),
    )
    assert seen[-1] == (120, 120) and len(seen) == 120
    assert loss < 0.05  # the reply follows from the observation
    assert not list(folder.glob("*.partial"))


def test_context_weight_teaches_to_predict_the_context(folder: Path) -> None:
    rows = [np.asarray([2, 10, 3, 20, 1], np.int32)] * 32
    masks = [np.asarray([False, False, False, True, True])] * 32
    first = train(folder, rows, masks, epochs=1, batch=32, lr=1e-9, context_weight=1.0)
    assert first == pytest.approx(np.log(64), rel=0.3)  # over all four predicted tokens
    last = train(folder, rows, masks, epochs=60, batch=32, lr=1e-2, context_weight=1.0)
    assert last < 0.05


def test_rows_that_do_not_fit_their_masks_are_refused(folder: Path) -> None:
    row = np.asarray([2, 10, 3], np.int32)
    for masks in ([], [np.asarray([False, True])]):
        with pytest.raises(ValueError, match="mask"):
            train(folder, [row], masks, epochs=1, batch=1, lr=1e-3)
    with pytest.raises(ValueError, match="first token"):
        train(folder, [row], [np.asarray([True, False, True])], epochs=1, batch=1, lr=1e-3)


def test_rate_warms_up_and_decays() -> None:
    rates = [rate(step, 100) for step in range(1, 101)]
    assert rates[0] < rates[5] < rates[9] and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)


def test_warm_start_is_deterministic_and_changes_the_weights(tmp_path: Path) -> None:
    blobs, losses = [], []
    for name in ("a", "b"):
        make_tiny(tmp_path / name, hidden=32, layers=1)
        losses.append(warm_start(config(episodes=64, tasks=32, epochs=2, threads=1), tmp_path / name))
        blobs.append((tmp_path / name / "model.safetensors").read_bytes())
    make_tiny(tmp_path / "fresh", hidden=32, layers=1)
    assert blobs[0] == blobs[1] and losses[0] == losses[1]
    assert blobs[0] != (tmp_path / "fresh" / "model.safetensors").read_bytes()


def test_unknown_warm_parameters_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'episodes'"):
        warm_start(config(episode=3), folder)
    with pytest.raises(ConfigError, match="batch = 0"):
        warm_start(config(batch=0), folder)
