"""The picture and the terminal view."""

import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from cluster.config import build
from cluster.controller import Controller
from cluster.memory import MemoryQueue
from cluster.metrics import JsonlSink
from cluster.types import Task
from deploy.report import draw_lag, draw_ledger, draw_reward, draw_waits, smoothed, write_report
from deploy.report_tide import draw_tasks
from deploy.view import View, duration, ledger_line, number, sparkline, tasks_line, view_status
from learner.measure import FROM_LOOP, Measure

LEDGER = {"admitted": 100, "pending": 0, "trained": 90, "dropped": {"stale": 6}, "failed": {"env": 4}}


def step_record(step: int) -> dict[str, Any]:
    return {
        "reward": {"outcome": step / 10, "success": step / 10, "format": 1.0}, "reward_std": 0.3,
        "success": step / 10, "lag_mean": 1.0, "lag_max": 2,
        "lag_hist": {"0": 1, "2": 3}, "goodput_tok_s": 1500.0,
        "wait_rwt_s": {"capacity": 0.2, "weights": 0.1}, "wait_twt_s": 0.4,
        "entropy": 1.0, "lag0_max_log_ratio": 1e-6, "ledger": LEDGER,
    }  # fmt: skip


def run_folder(tmp_path: Path, steps: int) -> Path:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, steps + 1):
        sink.record(step, step_record(step))
    sink.close()
    return tmp_path


@pytest.mark.parametrize("steps", [1, 30])
def test_report_is_a_picture(tmp_path: Path, steps: int) -> None:
    folder = run_folder(tmp_path, steps)
    (folder / "summary.json").write_text(json.dumps({"name": "demo", "ledger": LEDGER}))
    raw = write_report(folder).read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", raw[16:24])
    assert width > 1000 and height > 600


def test_report_of_sparse_records(tmp_path: Path) -> None:
    """A run that died early, without summary and with missing or null values, still gets its picture."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.record(0, {"eval_success": {"held-out": 0.1}})
    sink.record(1, {"reward": 0.5, "loss": math.nan})
    sink.close()
    assert write_report(tmp_path).stat().st_size > 10_000


def test_report_without_steps_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step yet"):
        write_report(tmp_path)


def test_drawings_show_the_numbers() -> None:
    records = [{"step": step, **step_record(step)} for step in range(1, 5)]
    axes = Figure().subplots(2, 2)
    draw_reward(axes[0][0], records, [*records, {"step": 4, "eval_success": {"held-out": 0.7}}])
    assert list(axes[0][0].lines[0].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert list(axes[0][0].lines[-1].get_ydata()) == [0.7]
    draw_lag(axes[0][1], records)
    assert [bar.get_height() for bar in axes[0][1].patches] == [4, 0, 12]
    draw_waits(axes[1][0], records)
    tops = [bar.get_y() + bar.get_height() for bar in axes[1][0].patches[4:]]
    assert tops == pytest.approx([0.7] * 4)  # both causes of RWT, with TWT on top
    draw_ledger(axes[1][1], LEDGER)
    shown = dict(zip([t.get_text() for t in axes[1][1].get_yticklabels()], axes[1][1].patches, strict=True))
    assert {name: bar.get_width() for name, bar in shown.items()} == {
        "pending": 0, "trained": 90, "dropped: stale": 6, "abandoned": 0, "failed: env": 4,
    }  # fmt: skip


def test_parked_tasks_are_drawn_if_there_were_any(tmp_path: Path) -> None:
    records = [{"step": n, "admission_events": {"parked": n, "resumed": 1.0, "moved": 0}} for n in (1, 2)]
    axes = Figure().subplots()
    draw_tasks(axes, [*records, {"step": 3}])
    lines = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}
    assert lines == {"parked (3)": [1, 2, 0], "resumed (2)": [1, 1, 0], "moved (0)": [0, 0, 0]}
    plain = write_report(run_folder(tmp_path, 3)).read_bytes()
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.record(2, {"admission_events": {"parked": 4, "resumed": 0, "moved": 0}})
    sink.close()
    heights = [struct.unpack(">II", raw[16:24])[1] for raw in (plain, write_report(tmp_path).read_bytes())]
    assert heights[1] > heights[0], "a row more"


def test_the_view_tells_of_tasks_and_their_places() -> None:
    tasks = {"resident": 12, "parked": 3, "queued": 0}
    status = {
        "step": {}, "generators": {}, "version": 1, "ready_depth": 0, "open_groups": 2, "ledger": LEDGER,
        "tasks": tasks, "admission": {"parked": 40, "resumed": 37, "moved": 2},
        "roles": {"ranks": {"0": "learner"}, "move": None, "target": {}, "switches": []},
    }  # fmt: skip
    config = build({"env": {"name": "coin"}, "model": {"path": "/nowhere"}})
    line = "12 resident, 3 parked, 0 queued; in all 40 parked, 37 resumed, 2 moved"
    for terminal in (True, False):
        shown, out = view(terminal, lambda: 0.0)
        with shown:
            shown.update(view_status(status, config))
        assert line in out.getvalue()
    assert tasks_line(dict.fromkeys(tasks, 0), {"parked": 0}) == "", "a job of requests has none"


async def test_the_view_shows_what_the_controller_was_told_of_a_step(tmp_path: Path) -> None:
    config = build({"env": {"name": "coin"}, "model": {"path": "/nowhere"}})
    measure = Measure(config, tmp_path / "metrics.jsonl")
    metrics: dict[str, Any] = {**dict.fromkeys(FROM_LOOP, 1.0), "lag_hist": {}, "row_tokens": 64.0}
    metrics |= {"mismatch_max_log_ratio": 0.125, "trained_tokens": 64.0, "loss": 0.5, "grad_norm": 2.0}
    metrics["reward"] = {"outcome": 0.25}
    metrics["wait_twt_s"] = {"data": 1.5, "signal": 0.25}
    tasks = [Task(id="t", env="coin", seed=1)]
    controller = Controller(config, MemoryQueue(), lambda split, n: tasks[0], {}, lambda *_: None)
    facts = await controller.step_facts({"step": 3})
    facts |= {"rwt": {"weights": 0.75}, "generated_tokens": 640, "sync_s": 0.0}
    controller.measured(3, measure.step(3, metrics, facts))
    measure.close()
    out = io.StringIO()
    shown = View("t", 10, Console(file=out, force_terminal=True, width=120, color_system=None))
    with shown:
        shown.update(view_status(await controller.status(), config))
    text = out.getvalue()
    for label in ("goodput", "sampled", "waits", "mismatch", "loss", "grad", "lag", "reward", "success"):
        line = next(line for line in text.splitlines() if f" {label} " in line)
        assert not line.split(f" {label} ")[1].lstrip().startswith("- "), line
    assert "RWT 0.75 s, TWT 1.75 s" in text and "max |log ratio| 0.125" in text


def test_a_resumed_run_shows_where_it_stands_and_its_own_pace() -> None:
    now = [0.0]
    shown, _ = view(True, lambda: now[0], steps=40)
    with shown:
        shown.update({"step": 0})
        now[0] = 20.0  # the feeder has read the checkpoint
        shown.update({"step": 29})
        assert shown.eta_s(now[0]) is None
        now[0] = 22.0
        shown.update({"step": 30, "reward": 0.5})
        assert shown.eta_s(now[0]) == pytest.approx(20.0)


def test_smoothed_skips_what_is_missing() -> None:
    found = smoothed([math.nan, 1.0, 3.0, math.nan, 5.0], window=2)
    assert math.isnan(found[0])
    assert found[1:] == [1.0, 2.0, 3.0, 5.0]


def view(terminal: bool, clock: Any, steps: int = 10) -> tuple[View, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    return View("springtide: demo", steps, console, clock), out


def test_logs_get_one_line_every_ten_seconds() -> None:
    now = [0.0]
    shown, out = view(False, lambda: now[0], steps=100)
    with shown:
        with shown.phase("starting engines"):
            now[0] = 3.5
        for _ in range(40):
            now[0] += 1.0
            shown.update({"step": int(now[0]) - 4, "reward": 0.25, "lag_max": 2, "ledger": LEDGER})
    lines = out.getvalue().splitlines()
    assert "starting engines 3.5 s" in lines[1]
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) == 4
    assert "step 10/100 | elapsed 0:14 | left 1:30 | reward 0.25 | lag max 2 | admitted 100 =" in progress[1]


def test_logs_always_get_the_last_step_and_ill_ranks() -> None:
    now = [0.0]
    shown, out = view(False, lambda: now[0])
    for step in (1, 10):
        now[0] += 1.0
        shown.update({"step": step, "ranks": {"generator-0": "ok", "learner-0": "restarting"}})
    assert "step 10/10" in out.getvalue()
    assert "learner-0 restarting" in out.getvalue()
    assert "generator-0" not in out.getvalue()


def test_terminal_panel_shows_state_and_cleans_up() -> None:
    shown, out = view(True, lambda: 0.0)
    with shown:
        shown.update({"step": 3, "reward": 0.5, "goodput_tok_s": 1234.0})
        shown.update({"max_lag": 2, "lag_mean": 1, "lag_max": 2})
        shown.update({"ledger": {**LEDGER, "trained": 89}, "ranks": {"learner-0": "ok"}})
    shown.stop()
    for text in ("step 3/10", "1,234 tok/s", "mean 1, max 2, bound 2", "does not balance: +1", "● learner-0"):
        assert text in out.getvalue()


def test_eta_needs_a_step_and_shrinks() -> None:
    now = [100.0]
    shown, _ = view(False, lambda: now[0])
    assert shown.eta_s(now[0]) is None
    shown.update({"step": 2})  # resumed at step 2: earlier steps do not count for the pace
    assert shown.eta_s(now[0]) is None
    now[0] += 8
    shown.update({"step": 4, "reward": 0.5})
    assert shown.eta_s(now[0]) == pytest.approx(24)


def test_finish_prints_every_row() -> None:
    shown, out = view(False, lambda: 0.0)
    shown.finish({"success": 0.98765, "trajectories": 12345, "report": "runs/x/report.png"})
    for text in ("0.988", "12,345", "runs/x/report.png"):
        assert text in out.getvalue()


def test_words() -> None:
    assert number({"a": 1, "b": 0.5}) == "1.5"
    assert number(None) == "-"
    assert duration(3700) == "1:01:40"
    assert sparkline([0, 1, 0.5]) == "▁█▅" or sparkline([0, 1, 0.5]) == "▁█▄"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert ledger_line(LEDGER).endswith("pending 0")
