"""``springtide simulate``: figures, pictures, words, and one line for what cannot be run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.sim.study import QUICK
from deploy.cli import main
from tests.sim_tiny import TINY

KEYS = (
    "goodput_vs_sync", "goodput_vs_best_async", "wait_reduction_vs_best_static", "kv_hit_vs_request_lru",
)  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_figures_picture_and_words(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["simulate", str(tiny), "--steps", "6", "--seeds", "2", "--workers", "1",
             "--json", str(figures), "--picture", str(picture)]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "How to split 8 ranks: " in said and "What elastic ranks would buy: " in said
    assert "beginning with an even one (4/" in said and ("So they are" in said or "So turn them on" in said)
    tree: dict[str, Any] = json.loads(figures.read_text())["tiny"]
    for key in KEYS:
        figure = tree[key]
        low, high = figure["interval"]
        assert low <= figure["mean"] <= high and figure["seeds"] == 2, key
    assert tree["train_step_reduction"]["mean"] > 0
    for key in ("train_step_reduction", "train_step_reduction_vs_one_burst"):  # of no seed: no interval
        assert (tree[key]["interval"], tree[key]["seeds"]) == ([None, None], 1), key
        share = f"{tree[key]['mean']:.1%}"
        assert re.search(rf"training step by the cost model, .* by: {share}\n", said), key
    assert set(tree["policies"]) == set(QUICK)
    for name, row in tree["policies"].items():
        split = row["split"]
        used = split["generators"] + split["learners"] + split["scorers"]
        assert used == (16 if name == "sync" else 8), (name, split)
        assert row["goodput_tok_s"]["mean"] > 0
        assert 0 <= row["kv_hit"]["mean"] <= 1
    assert tree["goodput_vs_sync"]["mean"] > 1
    assert 0 < tree["goodput_static_untuned"]["mean"] < 1.1, "an even split is not much better than the best"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size < 200_000


def test_chosen_policies_only(tiny: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    words = ["simulate", str(tiny), "--steps", "4", "--seeds", "1", "--workers", "1", "--ranks", "5",
             "--policy", "areal", "sync", "--set", "load.batch=x0.5", "--set", "run.max_lag=1",
             "--json", str(figures)]  # fmt: skip
    assert main(words) == 0
    tree = json.loads(figures.read_text())["tiny"]
    assert set(tree["policies"]) == {"areal", "sync"} and tree["ranks"] == 5
    assert (tree["job"]["groups_per_step"], tree["job"]["group_size"], tree["job"]["max_lag"]) == (2, 4, 1)
    assert not set(KEYS) & set(tree), "nothing is compared with a policy that was not run"
    assert any("How to split 5 ranks: " in line for line in tree["advice"])


def test_a_given_split_is_not_tuned(tiny: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    words = ["simulate", str(tiny), "--steps", "4", "--seeds", "1", "--workers", "1", "--split", "3/4/1",
             "--policy", "areal", "tide", "tide_no_elastic", "--json", str(figures)]  # fmt: skip
    assert main(words) == 0
    tree = json.loads(figures.read_text())["tiny"]
    splits = {name: tuple(row["split"].values()) for name, row in tree["policies"].items()}
    assert splits == {"areal": (3, 5, 0), "tide": (3, 4, 1), "tide_no_elastic": (3, 4, 1)}
    assert tree["ranks"] == 8 and not any(row["sweep"] for row in tree["policies"].values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["txt"], "unknown workload 'txt' (did you mean 'text'?)"),
        (["text", "--policy", "tied"], "unknown policy 'tied' (did you mean 'tide'?)"),
        (["text", "--profile", "h100-qwen"], "unknown profile 'h100-qwen' (did you mean 'h100-qwen"),
        (["text", "--profile", "no/such.toml"], "no file no/such.toml"),
        (["text", "--ranks", "1"], "--ranks 1: must be at least 2"),
        (["text", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["text", "--split", "12"], "--split '12': give generators/learners/scorers"),
        (["text", "--split", "0/4"], "--split 0/4: generators and learners must be at least 1"),
        (["text", "--split", "4/4", "--ranks", "9"], "--split 4/4 has 8 ranks, --ranks says 9"),
        (["text", "--steps", "-3"], "--steps -3: must be at least 2"),
        (["text", "--json", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
        (["text", "--picture", "x.svg"], "only PNG is written"),
        (["text", "--sweep", "kv_tokens=1"], "unknown key 'kv_tokens' (did you mean generator.kv_tokens?)"),
        (["text", "--sweep", "zzz=1"], "unknown key 'zzz': valid are ranks split profile load.latency"),
        (["text", "--sweep", "run.max_lag"], "give KEY=V1,V2,..., such as generator.kv_tokens=x0.25"),
        (["text", "--sweep", "run.max_lag=1,,2"], "give KEY=V1,V2,..."),
        (["text", "--sweep", "run.max_lag=1,1"], "a value is given twice"),
        (["text", "--sweep", "run.max_lag=0.5"], "run.max_lag=0.5: must be a whole number (now 2)"),
        (["text", "--sweep", "run.max_lag=some"], "run.max_lag=some: give a number, or x and a factor"),
        (["text", "--sweep", "run.env_slots=3"], "run.env_slots = 3: must be 0 (no bound) or at least"),
        (["text", "--sweep", "generator.kv_tokens=x0.001"], "does not fit into h100-qwen2.5-7b"),
        (["text", "--sweep", "generator.prefill_share=2"], "prefill_share = 2.0 must lie between 0 and 1"),
        (["text", "--sweep", "load.tail=-1"], "load.tail=-1: give a factor above 0"),
        (["text", "--sweep", "load.phase=2"], "load.phase: workload text has one phase only"),
        (["text", "--sweep", "split=3/4"], "split=3/4: has 7 ranks, the job 32"),
        (["text", "--sweep", "ranks=1"], "ranks=1: ranks are a whole number of at least 2"),
        (["text", "--set", "kv_tokens=x2"], "unknown key 'kv_tokens' (did you mean generator.kv_tokens?)"),
        (["text", "--set", "load.batch"], "give KEY=VALUE, such as load.batch=x0.5; keys are ranks split"),
        (["text", "--sweep", "profile=h100"], "unknown profile 'h100' (did you mean 'h100-null'?)"),
    ],
)
def test_errors_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0] and lines[0].startswith("springtide: config: "), lines


def test_a_context_that_no_generator_holds_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_text(tiny.read_text().replace("prompt = 200", "prompt = 200\nmax_context = 2000000"))
    assert main(["simulate", str(tiny)]) == 2
    assert "a.max_context = 2000000 does not fit into h100-qwen2.5-7b" in capsys.readouterr().err


def test_sweep_writes_a_row_per_value(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["simulate", str(tiny), "--steps", "4", "--seeds", "2", "--workers", "1",
             "--policy", "stream", "tide", "tide_no_elastic", "--json", str(figures),
             "--picture", str(picture),
             "--sweep", "generator.kv_tokens=x0.008,x1", "--sweep", "split=3/5,6/2"]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "generator.kv_tokens" in said and "x0.008" in said and "3/5/0" in said
    rows: list[dict[str, Any]] = json.loads(figures.read_text())["tiny"]["sensitivity"]
    assert [(row["key"], row["value"]) for row in rows] == [
        ("generator.kv_tokens", "x0.008"), ("generator.kv_tokens", "x1"), ("split", "3/5"), ("split", "6/2"),
    ]  # fmt: skip
    for row in rows:
        ours = row["policies"]["tide"]["goodput_tok_s"]["mean"]
        theirs = row["policies"]["stream"]["goodput_tok_s"]["mean"]
        assert row["best_async"] == "stream"
        assert row["goodput_vs_best_async"]["mean"] == pytest.approx(ours / theirs, rel=0.1)
    scarce, ample = (row["policies"]["tide"]["kv_hit"]["mean"] for row in rows[:2])
    assert scarce < ample, "less than one per cent of the cache hits less"
    assert rows[3]["policies"]["stream"]["split"] == {"generators": 6, "learners": 2, "scorers": 0}
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_workers_at_once_and_is_one_line(number: int, code: int) -> None:
    """Ctrl-C reaches the whole group, as from a terminal; SIGTERM the command alone."""
    words = [sys.executable, "-m", "deploy.cli", "simulate", "text", "--workers", "2", "--steps", "400"]
    job = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 90
    try:
        workers = []
        while len(workers) < 2 or min(one.cpu_times().user for one in workers) < 1.0:
            assert time.monotonic() < deadline and job.poll() is None, "no worker works"
            time.sleep(0.1)
            below = psutil.Process(job.pid).children(recursive=True)
            workers = [one for one in below if "spawn_main" in " ".join(one.cmdline())]
        (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
        _, said = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == code
    assert said.strip().splitlines() == ["springtide: interrupted"]
    assert not psutil.wait_procs(workers, timeout=30)[1]
