"""Checkpoints: bit-equal resumption, damage noticed, any world size, never half a folder."""

import logging
import random
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.errors import CheckpointDamaged
from learner.checkpoint import load_checkpoint
from learner.manifest import checkpoints, latest_valid, verify
from tests.learner_tiny import (
    assert_equal,
    make_config,
    make_model,
    make_samples,
    one_rank,
    single_rank,
    state_of,
    with_behaviour,
)
from tests.test_learner import run_world


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def batch(model: Path):
    samples, advantage = make_samples()
    return one_rank(with_behaviour(model, samples, 0.1), advantage)


def test_update_after_resuming_is_bit_equal(model: Path, batch, tmp_path: Path) -> None:
    config = make_config(model, learner={"schedule": "cosine", "warmup_steps": 2})
    with single_rank(config, model) as rank:
        for step in (1, 2, 3):
            rank.step(batch, step)
        folder = rank.save(str(tmp_path), {"cursor": 17, "queue": b"\x00\xff"})
        drawn = (random.random(), np.random.random(), torch.rand(1).item())
        saved = state_of(rank)
        rank.step(batch, 4)
        straight = state_of(rank)
    with single_rank(config, model) as rank:
        random.seed(99), np.random.seed(99), torch.manual_seed(99)
        assert rank.load(folder) == {"cursor": 17, "queue": b"\x00\xff"}
        assert rank.version == 3
        assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn
        assert_equal(state_of(rank), saved)
        rank.step(batch, 4)
        assert_equal(state_of(rank), straight)
    assert any(saved[name].any() for name in saved if name.startswith("exp_avg_sq."))


def test_never_stepped_optimizer_and_parameter_without_gradient_survive(model: Path, tmp_path: Path) -> None:
    with single_rank(make_config(model), model) as rank:
        fresh = state_of(rank)
        folder = rank.save(str(tmp_path), {}, export=False)
        assert_equal(state_of(rank), fresh)  # saving moved nothing
        assert rank.load(folder) == {} and rank.version == 0
        assert_equal(state_of(rank), fresh)
        place, optimizer = rank.joined()
        first = next(p for p in rank.model.parameters())
        del optimizer.state[first]
        with pytest.raises(CheckpointDamaged, match="no optimizer state"):
            load_checkpoint(Path(folder), rank.model, optimizer, place)


def test_a_checkpoint_that_does_not_tell_skipped_updates_loads(model: Path, tmp_path: Path) -> None:
    with single_rank(make_config(model), model) as rank:
        rank.version, rank.skipped = 2, 3
        folder = Path(rank.save(str(tmp_path), {"cursor": 17}, export=False))
        assert rank.load(str(folder)) == {"cursor": 17} and rank.skipped == 3
        meta = msgspec.msgpack.decode((folder / "meta.msgpack").read_bytes())
        del meta["extra"]["skipped"]
        (folder / "meta.msgpack").write_bytes(msgspec.msgpack.encode(meta))
        assert rank.load(str(folder)) == {"cursor": 17}
        assert (rank.version, rank.skipped) == (2, 0)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def damages(folder: Path):
    shard = next((folder / "state").glob("*.distcp"))
    return {
        "flipped byte": lambda: flip(shard, shard.stat().st_size // 2),
        "truncated shard": lambda: shard.write_bytes(shard.read_bytes()[:100]),
        "missing metadata": lambda: (folder / "state" / ".metadata").unlink(),
        "missing manifest": lambda: (folder / "manifest.json").unlink(),
        "broken manifest": lambda: (folder / "manifest.json").write_text("{"),
        "meta changed": lambda: flip(folder / "meta.msgpack", 3),
        "rng lost": lambda: shutil.rmtree(folder / "rng"),
        "export changed": lambda: flip(folder / "hf" / "model.safetensors", 5000),
    }


KINDS = (
    "flipped byte",
    "truncated shard",
    "missing metadata",
    "missing manifest",
    "broken manifest",
    "meta changed",
    "rng lost",
    "export changed",
)


@pytest.fixture(scope="module")
def two_checkpoints(model: Path, batch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    with single_rank(make_config(model), model) as rank:
        for step in (1, 2):
            rank.step(batch, step)
            rank.save(str(root), {"step": step})
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_the_previous_checkpoint_is_used(
    kind: str, two_checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(two_checkpoints, root)
    newest, previous = checkpoints(root)
    assert latest_valid(root) == newest
    damages(newest)[kind]()
    with caplog.at_level(logging.WARNING):
        assert latest_valid(root) == previous
    assert newest.name in caplog.text and verify(newest)
    damages(previous)["flipped byte"]()
    with pytest.raises(CheckpointDamaged, match="all 2"):
        latest_valid(root)


@pytest.mark.parametrize("kind", ["truncated shard", "missing metadata"])
def test_loading_a_broken_folder_raises_an_ordinary_exception(
    kind: str, model: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step-000002"
    shutil.copytree(two_checkpoints / "step-000002", folder)
    damages(folder)[kind]()
    with single_rank(make_config(model), model) as rank, pytest.raises(CheckpointDamaged):
        rank.load(str(folder))


def test_checkpoint_of_another_architecture_is_refused(two_checkpoints: Path, tmp_path: Path) -> None:
    deeper = make_model(tmp_path / "deeper", num_hidden_layers=3)
    wider = make_model(tmp_path / "wider", intermediate_size=128)
    for path in (deeper, wider):
        with single_rank(make_config(path), path) as rank, pytest.raises(CheckpointDamaged):
            rank.load(str(two_checkpoints / "step-000002"))


def test_old_checkpoints_go_and_leftovers_are_swept(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".step-000009.part").mkdir()
    assert latest_valid(tmp_path) is None and latest_valid(tmp_path / "absent") is None
    config = make_config(model, run={"keep_checkpoints": 2})
    with single_rank(config, model) as rank:
        for version, left in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (3, [2, 3]), (2, [2]), (4, [2, 4])):
            rank.version = version
            rank.save(str(tmp_path), {"version": version}, export=False)
            assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{v:06d}" for v in left]
            assert not verify(tmp_path / f"step-{version:06d}")


def test_disk_that_refuses_leaves_the_earlier_checkpoint(model: Path, tmp_path: Path) -> None:
    with single_rank(make_config(model), model) as rank:
        rank.save(str(tmp_path), {}, export=False)
        (tmp_path / ".step-000001.part").write_text("in the way")
        rank.version = 1
        with pytest.raises(CheckpointDamaged, match="writing"):
            rank.save(str(tmp_path), {}, export=False)
    assert latest_valid(tmp_path) == tmp_path / "step-000000"


def test_exported_folder_is_a_model(model: Path, two_checkpoints: Path) -> None:
    folder = two_checkpoints / "step-000002"
    exported = AutoModelForCausalLM.from_pretrained(folder / "hf")
    with single_rank(make_config(model), model) as rank:
        rank.load(str(folder))
        for name, parameter in rank.model.named_parameters():
            assert torch.equal(exported.get_parameter(name.removeprefix("hf.")), parameter.full_tensor())
    assert "hf/model.safetensors" in (folder / "manifest.json").read_text()


def test_checkpoint_with_the_fingerprint_of_an_earlier_release_is_read(
    model: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step-000002"
    shutil.copytree(two_checkpoints / "step-000002", folder)
    meta = msgspec.msgpack.decode((folder / "meta.msgpack").read_bytes())
    assert "fingerprint" not in meta
    (folder / "meta.msgpack").write_bytes(msgspec.msgpack.encode(meta | {"fingerprint": "0" * 64}))
    with single_rank(make_config(model), model) as rank:
        assert rank.load(str(folder)) == meta["extra"]["extra"]
        assert rank.version == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_state_is_bit_equal_through_a_chain_of_world_sizes(tmp_path: Path) -> None:
    """Some parameters have 2 rows, so on 3 ranks the last one holds an empty shard."""
    model = make_model(tmp_path / "m", head_dim=2, num_attention_heads=1, num_key_value_heads=1)
    results = []
    for world in (1, 2, 3, 1):
        results.append(run_world(model, world, tmp_path, "chain"))
        assert results[-1]["version"] == 1
    assert results[2]["empty"] > 0
    assert [r["extra"] for r in results] == [{}, {"count": 1}, {"count": 2}, {"count": 3}]
    first = torch.load(tmp_path / "state-0.pt")
    for count in (1, 2, 3):
        assert_equal(torch.load(tmp_path / f"state-{count}.pt"), first)
