"""The summary of a run: what is counted over several starts, and how it reads."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import build
from cluster.metrics import JsonlSink
from cluster.types import Ledger
from deploy.moves import line_of
from deploy.paths import RunFolder
from deploy.summary import closing_rows, summarise_run

CONFIG = build({"env": {"name": "coin"}, "model": {"path": "/nowhere"}})
LEDGER = Ledger(admitted=40, trained=12, dropped={"lag": 24}, failed={"sandbox": 1}, pending=3)


def run(tmp_path: Path, events: list[tuple[float, str]], steps: int) -> dict[str, Any]:
    """Summary of a run with these events at these seconds; each step trained 100 tokens."""
    folder = RunFolder(tmp_path / "run")
    folder.make()
    sink = JsonlSink(folder.metrics)
    for step in range(1, steps + 1):
        sink.record(step, {"trained_tokens": 100, "lag_hist": {"1": 2}})
    sink.close()
    folder.trace.write_text("".join(f'{{"t": {t}, "by": "x", "event": "{event}"}}\n' for t, event in events))
    return summarise_run(CONFIG, folder, LEDGER, LEDGER, {}, began=0.0)


def test_the_time_between_two_starts_is_nobodys_training_time(tmp_path: Path) -> None:
    first = [(0.0, "job_start"), (10.0, "admission_open"), (12.0, "trained"), (20.0, "trained")]
    second = [(1000.0, "job_start"), (1030.0, "admission_open"), (1035.0, "trained"), (1040.0, "trained")]
    summary = run(tmp_path, [*first, *second], steps=4)
    assert summary["train_s"] == pytest.approx(20.0)
    assert summary["resumes"] == 1
    assert summary["goodput_tok_s"] == pytest.approx(20.0)
    assert "resumed 1 times" in closing_rows(summary)["wall"]


def test_a_start_that_trains_nothing_counts_nothing(tmp_path: Path) -> None:
    events = [(0.0, "job_start"), (50.0, "job_start"), (60.0, "admission_open"), (64.0, "trained")]
    summary = run(tmp_path, events, steps=1)
    assert (summary["train_s"], summary["resumes"]) == (pytest.approx(4.0), 1)


def test_the_closing_table_says_what_became_of_each_trajectory(tmp_path: Path) -> None:
    summary = run(tmp_path, [(0.0, "job_start"), (1.0, "admission_open"), (3.0, "trained")], steps=1)
    rows = closing_rows(summary)
    assert rows["trajectories"] == (
        "40 admitted, 12 trained, 24 dropped (lag), 1 failed (sandbox), 3 pending, balanced"
    )
    assert "resumed" not in rows["wall"]


def test_a_move_that_was_not_measured_says_why() -> None:
    move = {
        "rank": 1, "kind": "generator>learner", "state": "done", "prepare_s": 1.0, "seconds": 2.0,
        "cost_s": 3.0, "parts": {}, "predicted_s": 0.5,
        "realised_s": None, "unmeasured": "the load shifted", "error": "",
    }  # fmt: skip
    assert line_of(move).endswith("predicted 0.50 s, not measured: the load shifted")
    assert line_of(move | {"realised_s": 0.25}).endswith("predicted 0.50 s, realised 0.25 s")
