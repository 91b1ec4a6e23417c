"""``springtide scale``: one clear line for what cannot be, and how it follows a job to its target."""

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from cluster.processes import record
from cluster.trace import Trace
from deploy.cli import main
from deploy.paths import RunFolder
from deploy.scale import Wish, announce, describe, job_of, pursue


def run_folder(root: Path, name: str = "coin-1") -> RunFolder:
    folder = RunFolder(root / name)
    folder.make()
    folder.write_config("{}")
    return folder


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one line that the command ends with."""
    assert main(["scale", *words]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert not captured.out and len(lines) == 1 and lines[0].startswith("springtide: config: "), captured
    return lines[0].removeprefix("springtide: config: ")


def test_an_unknown_run_names_the_nearest_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs", "coin-20261129-1")  # has ended
    line = said(capsys, ["coin", "--show"])
    nothing = f"{tmp_path}/coin is no run folder: it has no config.json; no job runs in "
    assert line == f"{nothing}{tmp_path} or {tmp_path}/runs"
    for name in ("coin-20261130-1", "coin-20261130-2", "lake-20261130-1"):
        run_folder(tmp_path / "runs", name).write_job({})
    assert said(capsys, ["coin", "--show"]).endswith("(did you mean runs/coin-20261130-2?)")
    assert said(capsys, ["runs/cion-20261130-1", "--auto"]).endswith("(did you mean runs/coin-20261130-1?)")
    jobs = "runs/coin-20261130-1, runs/coin-20261130-2, runs/lake-20261130-1"
    assert said(capsys, [str(tmp_path / "xyz"), "--learners", "2"]).endswith(f"(running jobs: {jobs})")


def test_a_job_whose_driver_is_gone_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    here = {"host": socket.gethostname()}
    alive, killed, never = (run_folder(tmp_path / "runs", f"coin-20261130-{i}") for i in (1, 2, 3))
    for folder in (alive, killed, never):
        folder.write_job(here)
    with subprocess.Popen(["sleep", "60"]) as driver:
        record(killed.pids / "driver", driver.pid)
        driver.kill()
    record(alive.pids / "driver", os.getpid())
    assert said(capsys, ["coin", "--show"]).endswith("(did you mean runs/coin-20261130-1?)")
    assert said(capsys, ["xyz", "--show"]).endswith("(running jobs: runs/coin-20261130-1)")
    (alive.pids / "driver").unlink()
    assert said(capsys, ["coin", "--show"]).endswith(f"; no job runs in {tmp_path} or {tmp_path}/runs")
    killed.write_job({"host": "elsewhere"})  # nobody here can tell
    assert said(capsys, ["coin", "--show"]).endswith("(did you mean runs/coin-20261130-2?)")


def test_help_says_how_long_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "--help"])
    assert "default: 900 s" in capsys.readouterr().out


def test_a_run_that_has_ended_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path)
    line = said(capsys, [str(folder.path), "--learners", "2"])
    assert line == f"no job runs in {folder.path}; continue it with: springtide train --resume {folder.path}"


def test_a_job_whose_driver_was_killed_is_not_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path)
    folder.write_job({"address": "127.0.0.1:1", "namespace": "n", "host": socket.gethostname()})
    assert "its driver is gone" in said(capsys, [str(folder.path), "--show"])
    record(folder.pids / "driver", os.getpid())
    assert job_of(folder)["namespace"] == "n"
    folder.job.write_text("{")
    assert "job.json is damaged" in said(capsys, [str(folder.path), "--show"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "scale needs --generators, --learners, --scorers or --env-workers (or --show, --auto)"),
        (["--generators", "0"], "--generators 0: at least 1"),
        (["--env-workers", "0"], "--env-workers 0: at least 1"),
        (["--scorers", "-1"], "--scorers -1: at least 0"),
        (["--auto", "--learners", "2"], "--auto takes targets back: give it without counts"),
    ],
)
def test_a_wish_that_makes_no_sense(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, [str(run_folder(tmp_path).path), *words]) == line


def status(ranks: dict[str, str], phase: str = "settled", workers: int = 1, **more: Any) -> dict[str, Any]:
    held = [rank for rank, role in ranks.items() if role == "generator"]
    generators = {f"generator-{rank}": [True, 3, 0] for rank in held}
    roles = {"ranks": ranks, "nodes": {"0": "abcdef"}, "phase": phase, "move": None, "target": {},
             "workers": 1, "switches": []}  # fmt: skip
    names = {f"worker-{i}": [0, 16] for i in range(workers)}
    return {"version": 3, "generators": generators, "roles": roles | more, "workers": names}


class FakeOperator:
    """A job that walks through the statuses given; the trace is written as it is asked."""

    def __init__(self, trace: Trace, statuses: list[dict[str, Any]], refusal: str = "") -> None:
        self.trace = trace
        self.statuses = statuses
        self.refusal = refusal
        self.asked: list[Mapping[str, int]] = []

    def status(self) -> dict[str, Any]:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def scale(self, counts: Mapping[str, int]) -> dict[str, Any]:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.asked.append(counts)
        self.trace("move_planned", {"move": 1, "rank": 2, "source": "generator", "target": "learner",
                                    "reason": "", "cost_s": 3.0, "predicted_s": 0.0})  # fmt: skip
        self.trace("move_begun", {"move": 1})
        self.trace("move_made", {"move": 1, "parts": {"gather": 0.25}})
        self.trace("move_done", {"move": 1, "kind": "generator>learner", "seconds": 1.5})
        return {"more_ranks": 0}

    def close(self) -> None:
        raise AssertionError("whoever attached it closes it")


FIRST = {"0": "learner", "1": "generator", "2": "generator"}
LAST = {"0": "learner", "1": "generator", "2": "learner"}


def test_it_waits_for_the_target_and_prints_the_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path)
    trace = Trace(folder.trace, "controller")
    moving = status(FIRST, "planned", move="2: generator > learner")
    operator = FakeOperator(trace, [status(FIRST), status(FIRST), moving, moving, status(LAST)])
    naps: list[float] = []
    clock = iter(range(99)).__next__
    assert pursue(Wish(learners=2, generators=1), operator, folder, 60.0, naps.append, clock) == 0
    assert operator.asked == [{"generators": 1, "learners": 2}]
    assert len(naps) == 3
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "generators 2 -> 1, learners 1 -> 2; one rank moves per sync barrier"
    assert "generator 2, learner 1 (waiting for generators 2 of 1, learners 1 of 2)" in out[1]
    assert "rank 2: generator > learner planned" in out[2]
    assert out[3].endswith("generator 1, learner 2: reached"), "an unchanged line is not repeated"
    assert out[4].startswith("move 1: rank 2 generator > learner, done") and "gather 0.25" in out[4]


def test_a_target_that_is_not_reached_in_time(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    operator = FakeOperator(Trace(folder.trace, "controller"), [status(FIRST)])
    with pytest.raises(ConfigError, match=r"not reached within 5 s: learners 1 of 2; the target stays"):
        pursue(Wish(learners=2), operator, folder, 5.0, lambda s: None, iter(range(99)).__next__)


def test_what_the_controller_refuses_is_not_waited_for(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    trace = Trace(folder.trace, "controller")
    operator = FakeOperator(trace, [status(FIRST)], "generators = 9 needs 6 more ranks, 2 are free")
    with pytest.raises(ConfigError, match="2 are free"):
        pursue(Wish(generators=9), operator, folder, 5.0, lambda s: None)


@pytest.mark.parametrize(
    ("wish", "now", "missing"),
    [
        (Wish(generators=2), status(FIRST), []),
        (Wish(generators=2), status(FIRST, "committed", move="0: spare > generator"),
         ["rank 0: spare > generator"]),
        (Wish(generators=1), status(FIRST), ["generators 2 of 1"]),
        (Wish(scorers=1), status(FIRST), ["scorers 0 of 1"]),
        (Wish(env_workers=2), status(FIRST), ["env workers 1 of 2"]),
        (Wish(env_workers=2), status(FIRST, workers=2), []),
    ],
)  # fmt: skip
def test_what_is_missing(wish: Wish, now: dict[str, Any], missing: list[str]) -> None:
    assert wish.missing(now) == missing


def test_a_generator_counts_when_it_is_at_work() -> None:
    now = status(FIRST)
    now["generators"]["generator-1"] = [False, -1, 0]
    assert Wish(generators=2).missing(now) == ["generators at work 1 of 2"]


def test_show_and_announce(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    Trace(folder.trace, "driver")("job_start", {})
    text = describe(folder, status(LAST, target={"learner": 2}))
    assert text.splitlines() == [
        "coin-1: version 3, generator 1, learner 2; target learner 2",
        "  rank 0: learner  on node abcdef", "  rank 1: generator", "  rank 2: learner",
        "  env workers: worker-0",
    ]  # fmt: skip
    line = announce(Wish(env_workers=3), status(LAST), {"more_ranks": 0})
    assert line == "env workers 1 -> 3"
    grown = announce(Wish(generators=3), status(FIRST), {"more_ranks": 1})
    assert grown == "generators 2 -> 3; 1 more rank from the cluster; one rank moves per sync barrier"
    assert json.loads(folder.config.read_text()) == {}
