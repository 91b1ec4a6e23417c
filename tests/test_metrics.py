"""Names, sinks and sums of the metrics."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import build
from cluster.metrics import (
    METRICS,
    FanOut,
    JsonlSink,
    Rate,
    busy_seconds,
    intersection,
    overlap_fraction,
    read_steps,
    samples,
    union,
)
from learner.measure import FROM_LOOP, Measure

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    """The unit cells that whole-number intervals cover: the slow and obvious way."""
    return {cell for start, end in intervals for cell in range(start, end)}


@given(INTERVALS)
def test_union_covers_the_same_time(intervals: list[tuple[int, int]]) -> None:
    merged = union(intervals)
    assert covered(merged) == covered(intervals)
    assert all(first[1] < second[0] for first, second in pairwise(merged))
    assert busy_seconds(intervals) == len(covered(intervals))


@given(INTERVALS, INTERVALS)
def test_overlap_equals_shared_cells(
    learner: list[tuple[int, int]], generator: list[tuple[int, int]]
) -> None:
    shared = covered(learner) & covered(generator)
    assert covered(intersection(learner, generator)) == shared
    expected = len(shared) / len(covered(learner)) if covered(learner) else 0.0
    assert overlap_fraction(learner, generator) == pytest.approx(expected)


def test_overlap_of_the_plain_cases() -> None:
    assert overlap_fraction([(0, 1), (2, 3)], [(1, 2), (3, 4)]) == 0.0  # taking turns: synchronous
    assert overlap_fraction([(0, 1), (2, 3)], [(0, 4)]) == 1.0
    assert overlap_fraction([(0, 4)], [(0, 1), (0.5, 1), (3, 9)]) == 0.5


def test_rate_forgets_what_is_older_than_its_window() -> None:
    rate = Rate(window_s=10, start=0)
    assert rate.value(0) == 0
    rate.add(1, 50)
    assert rate.value(5) == pytest.approx(10)
    rate.add(9, 50)
    assert rate.value(10) == pytest.approx(10)
    assert rate.value(15) == pytest.approx(5)
    assert rate.value(30) == 0


def test_table_is_fit_for_prometheus() -> None:
    for name, metric in METRICS.items():
        assert name.isidentifier() and name == name.lower()
        assert metric.unit and metric.help
        assert (metric.kind == "histogram") == bool(metric.boundaries)
        assert list(metric.boundaries) == sorted(metric.boundaries)


def test_samples_unfold_tags_in_order() -> None:
    found = [(s.metric.name, s.tags, s.value) for s in samples(
        {"loss": 0.5, "ledger": {"trained": 4, "dropped": {"stale": 2}}, "wait_rwt_s": 1.5, "kl": None}
    )]  # fmt: skip
    assert found == [
        ("loss", {}, 0.5),
        ("ledger", {"state": "trained", "reason": ""}, 4.0),
        ("ledger", {"state": "dropped", "reason": "stale"}, 2.0),
        ("wait_rwt_s", {"cause": ""}, 1.5),
    ]


def test_unknown_names_and_tags_are_refused_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    with pytest.raises(ValueError, match=r"unknown metric 'lag_men'.*lag_mean"):
        sink.record(1, {"reward": 1.0, "lag_men": 1.0})
    with pytest.raises(ValueError, match="'loss' has tags"):
        sink.record(1, {"loss": {"a": 1.0}})
    sink.close()
    assert path.read_text() == ""


def test_jsonl_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, clock=lambda: 12.3456)
    values = {"loss": np.float32(0.5), "lag_max": np.int64(2), "kl": math.nan, "lag_hist": {0: 3, 1: 5}}
    FanOut([sink]).record(7, values)
    sink.close()
    sink.close()
    assert path.read_text().count("\n") == 1
    assert json.loads(path.read_text()) == {
        "t": 12.346, "step": 7, "loss": 0.5, "lag_max": 2.0, "kl": None, "lag_hist": {"0": 3, "1": 5},
    }  # fmt: skip


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"t": 1, "step": 1, "loss": 1.0}\n{"t": 2, "step": 2, "lo')
    sink = JsonlSink(path)
    sink.record(2, {"loss": 2.0})
    sink.close()
    assert [(entry["step"], entry["loss"]) for entry in read_steps(path)] == [(1, 1.0), (2, 2.0)]


def test_steps_executed_again_replace_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)):
        sink.record(step, {"loss": loss})
    sink.record(2, {"eval_success": {"held-out": 0.5}})
    sink.close()
    found = read_steps(path)
    assert [entry["loss"] for entry in found] == [1.0, 20.0, 3.0]
    assert found[1]["eval_success"] == {"held-out": 0.5}


def test_a_step_tells_what_became_of_tasks_since_the_one_before(tmp_path: Path) -> None:
    config = build({"env": {"name": "coin"}, "model": {"path": "/nowhere"}})
    measure = Measure(config, tmp_path / "metrics.jsonl")
    metrics: dict[str, Any] = {**dict.fromkeys(FROM_LOOP, 1.0), "lag_hist": {}, "row_tokens": 1}
    facts = {"generated_tokens": 0, "sync_s": 0.0, "generator_busy": [], "ranks": {}, "workers": {}}
    tasks = {"resident": 4, "parked": 1, "queued": 0}
    for step, (parked, moved) in enumerate(((5, 1), (9, 1), (2, 0)), start=1):  # the third: a new controller
        counted = {"parked": parked, "resumed": 0, "moved": moved}
        measure.step(step, metrics, {**facts, "tasks": tasks, "admission": counted})
    measure.close()
    steps = read_steps(tmp_path / "metrics.jsonl")
    assert [step["admission_events"]["parked"] for step in steps] == [5, 4, 2]
    assert [step["admission_events"]["moved"] for step in steps] == [1, 0, 0]
    assert steps[0]["tasks"] == tasks


def test_dashboard_shows_metrics_that_exist() -> None:
    """Ray exports under ``ray_``; counters end in ``_total``, histograms in ``_bucket``."""
    path = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "springtide.json"
    panels = json.loads(path.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = {name for text in expressions for name in re.findall(r"ray_springtide_(\w+)", text)}
    endings = {"gauge": "", "counter": "_total", "histogram": "_bucket"}
    exported = {name + endings[metric.kind] for name, metric in METRICS.items()}
    assert shown
    assert shown <= exported
