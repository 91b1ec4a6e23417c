"""The start of a job on a machine that is not as it should be: ports, sockets, folders, Ray itself."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.config import Config, build, dump
from cluster.errors import ConfigError, RayFailed
from cluster.trace import Trace
from deploy import launch, local, models, paths, prepare
from deploy.local import dashboard_port
from deploy.paths import RunFolder, check_target, make_importable, temporary_root, with_environment

REPO = Path(__file__).resolve().parent.parent


def config(**sections: dict[str, Any]) -> Config:
    return build({"env": {"name": "coin"}, "model": {"maker": "tiny"}, **sections})


@pytest.mark.parametrize(
    ("cluster", "port"),
    [({}, None), ({"dashboard_port": 8265}, None), ({"dashboard_port": 9000}, 9000),
     ({"dashboard": False}, None), ({"dashboard": False, "dashboard_port": 9000}, None)],
)  # fmt: skip
def test_only_a_port_of_the_users_choice_is_insisted_on(cluster: dict[str, Any], port: int | None) -> None:
    assert dashboard_port(config(cluster=cluster).cluster) == port


def test_a_temporary_folder_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert temporary_root() == Path("/var/tmp")
    monkeypatch.setattr(tempfile, "tempdir", f"/var/{'long' * 15}")
    assert temporary_root() == Path("/tmp")


def test_names_below_the_temporary_root_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest root that is taken leaves room for the longest name that Ray makes."""
    for length in range(5, 60):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
        root, pid = temporary_root(), os.getpid()
        session = f"session_2026-11-30_12-00-00_123456_{pid}"
        assert len(f"{root}/springtide-ray-{pid}-abcdefgh/{session}/sockets/plasma_store") <= 107
        assert root == Path("/tmp") or len(str(root)) == length


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("AF_UNIX path length cannot exceed 107 bytes"), "AF_UNIX path length cannot exceed 107"),
        (ValueError("first line\n  the cause\n"), "the cause"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_whatever_keeps_ray_from_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    with pytest.raises(RayFailed, match=f"^did not start: {said}") as caught:
        local.start(config(), "here", 2, REPO)
    assert caught.value.boundary == "ray"
    left = list(temporary_root().glob(f"springtide-ray-{os.getpid()}-*"))
    assert not left, "its folder is gone"


def started(monkeypatch: pytest.MonkeyPatch, path: Path, begin: Any) -> None:
    """``launch.start`` on a run folder, with everything heavy replaced; the job fails after ``begin``."""
    from deploy import run

    for name in ("check_environment", "model_folder", "check_model", "rehearse"):
        monkeypatch.setattr(launch, name, lambda *_: None)

    def train(_: Config, folder: RunFolder, *__: Any) -> None:
        begin(folder)
        raise RayFailed("did not start: no room")

    monkeypatch.setattr(run, "train", train)
    with pytest.raises(RayFailed):
        launch.start(config(), path)


def traced(folder: RunFolder, event: str) -> None:
    """One event in the trace of a job, as its components write it."""
    trace = Trace(folder.trace, "driver")
    trace(event, {})
    trace.close()


def test_a_start_that_failed_leaves_no_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(monkeypatch, tmp_path / "run", lambda folder: traced(folder, "queue_started"))
    assert not (tmp_path / "run").exists()


def test_a_start_that_saw_a_death_keeps_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(monkeypatch, tmp_path / "run", lambda folder: traced(folder, "component_died"))
    assert (tmp_path / "run/trace.jsonl").exists(), "the death can be looked into"


def test_a_job_that_had_begun_keeps_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(monkeypatch, tmp_path / "run", lambda folder: (folder.workers / "ends-0.jsonl").touch())
    assert (tmp_path / "run/config.json").exists()


def test_a_resume_that_failed_keeps_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.write_config(str(dump(config())))
    started(monkeypatch, folder.path, lambda _: None)
    assert folder.config.exists()


def test_a_target_is_looked_at(tmp_path: Path) -> None:
    check_target(str(tmp_path / "new.json"))
    (tmp_path / "old.json").write_text("")
    check_target(str(tmp_path / "old.json"))
    with pytest.raises(ConfigError, match="it is a folder"):
        check_target(str(tmp_path))
    with pytest.raises(ConfigError, match="no folder"):
        check_target(str(tmp_path / "nope" / "x.json"))


def test_where_an_environment_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside, here = tmp_path / "recipes", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    mine = config(env={"name": "mine.games:Parity"})

    def found(settings: Config = mine) -> str:
        return with_environment(settings, beside / "recipe.toml").env.folder

    assert found() == ""
    (here / "mine").mkdir()
    assert found() == str(here)
    (beside / "mine.py").write_text("")
    assert found() == str(beside), "the recipe's folder comes first"
    assert found(config(env={"name": "mine:A", "folder": "other"})) == str(here / "other"), "given"
    assert found(config()) == "", "a name of the registry"
    monkeypatch.setattr(paths, "REPO", beside)
    (here / "mine").rmdir()
    assert found() == "", "the clone is on the path anyway"


def test_children_import_from_the_environments_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/first")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for _ in range(2):
        make_importable(str(tmp_path))
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/first", str(tmp_path)]
    assert sys.path.count(str(tmp_path)) == 1
    with pytest.raises(ConfigError, match=r"env\.folder = '/nowhere': no such folder"):
        make_importable("/nowhere")


def test_two_jobs_that_make_the_same_model_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "same"

    def make(partial: Path, **_: Any) -> None:
        for place in (partial, folder):  # the other one is ready first
            place.mkdir(parents=True)
            (place / "config.json").write_text(place.name)

    monkeypatch.setattr(models, "resolve_maker", lambda _: make)
    prepare.make(config(), folder)
    assert (folder / "config.json").read_text() == "same"
    assert [path.name for path in folder.parent.iterdir()] == ["same"]
