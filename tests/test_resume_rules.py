"""What a resumed run may change, and which folder ``eval`` takes from a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config, build
from cluster.errors import CheckpointDamaged, ConfigError
from deploy.paths import RunFolder
from deploy.resume import check_resume, differences, identity, steps_made

TREE: dict[str, Any] = {
    "env": {"name": "frozenlake", "params": {"size": 4}},
    "model": {"maker": "tiny", "params": {"hidden": 64}},
    "run": {"steps": 6},
}


def config(**changes: Any) -> Config:
    """``TREE`` with changes by dotted key, dots as two underscores."""
    tree = json.loads(json.dumps(TREE))
    for key, value in changes.items():
        *sections, name = key.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return build(tree)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__params__hidden": 128}, "model.params.hidden = 128 (was 64)"),
        ({"model__params__layers": 3}, "model.params.layers = 3 (was not set)"),
        ({"env__params__size": 5}, "env.params.size = 5 (was 4)"),
        ({"env__name": "coin"}, "env.name = 'coin' (was 'frozenlake')"),
        ({"run__seed": 1}, "run.seed = 1 (was 0)"),
        ({"run__group_size": 4}, "run.group_size = 4 (was 8)"),
        ({"harness__system": "be brief"}, "harness.system = 'be brief' (was '')"),
        ({"env__params": {}}, "env.params.size no longer set (was 4)"),
    ],
)
def test_what_would_be_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resume(tmp_path, config(), config(**changes))
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_every_refused_key_is_named() -> None:
    assert len(differences(config(), config(model__params__hidden=128, env__params__size=5))) == 2


@pytest.mark.parametrize(
    "changes",
    [{"run__steps": 9}, {"learner__lr": 0.5}, {"learner__ranks": 2}, {"objective__clip_high": 0.3},
     {"env__workers": 2}, {"eval__after": True}, {"run__max_lag": 4}],
)  # fmt: skip
def test_what_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_resume(tmp_path, config(), config(**changes))
    assert identity(config()) == identity(config(**changes))


def test_a_finished_run_is_refused_until_it_has_more_steps_to_make(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 6}))
    with pytest.raises(ConfigError, match="the run has made all its 6 steps; raise"):
        check_resume(tmp_path, config(), config())
    check_resume(tmp_path, config(), config(run__steps=7))


@pytest.mark.parametrize("text", ["", '{"steps": ', "[]", "{}"])
def test_a_summary_that_was_cut_short_does_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert steps_made(RunFolder(tmp_path)) is None


def checkpoint(folder: Path) -> Path:
    """A folder that passes its checksums."""
    from tests.test_cli_errors import write_manifest

    folder.mkdir(parents=True)
    (folder / "state").write_text(folder.name)
    write_manifest(folder)
    return folder


def test_eval_takes_the_newest_whole_checkpoint_of_a_run(tmp_path: Path) -> None:
    from deploy.evaluate import chosen

    run = tmp_path / "run"
    first, second = (checkpoint(run / "checkpoints" / f"step-00000{n}") for n in (2, 4))
    assert chosen(str(run)) == chosen(str(run / "checkpoints")) == second
    assert chosen(str(first)) == first, "what is named is taken"
    (second / "state").write_text("damaged")
    assert chosen(str(run)) == first
    (first / "state").write_text("damaged too")
    with pytest.raises(CheckpointDamaged, match="all 2 checkpoints"):
        chosen(str(run))


def test_eval_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    from deploy.evaluate import chosen

    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="the run has no checkpoint yet"):
        chosen(str(tmp_path))
    assert chosen(str(tmp_path / "model")) == tmp_path / "model"
