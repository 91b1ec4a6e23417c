"""The benchmarks start and measure something; their figures are for ``make bench``."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from tests.bench import append, learner, run, twins


def test_every_benchmark_runs_without_arguments() -> None:
    files = {path.stem for path in Path(run.__file__).parent.glob("*.py")} - {"run", "twin_runs"}
    assert files == set(run.BENCHMARKS) | set(run.STUDIES)
    for name in run.BENCHMARKS:
        function = importlib.import_module(f"tests.bench.{name}").run
        parameters = inspect.signature(function).parameters.values()
        assert all(parameter.default is not parameter.empty for parameter in parameters), name


def test_table_tells_missed_from_met_failed_and_reported() -> None:
    rows = [
        run.Row("append", 0.6, 0.5, 1.0),
        run.Row("rollout", 0.4, 0.5, 1.0),
        run.Row("weight_sync", 90.0, None, 1.0),
        run.Row("goodput", None, None, 1.0, "exit status 1, see above"),
    ]
    assert [row.verdict for row in rows] == ["ok", "MISSED", "reported", "FAILED"]
    text = run.table(rows).splitlines()
    assert len(text) == 5
    assert "0.40" in text[2] and "MISSED" in text[2]
    assert "exit status 1" in text[4]


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--only", "appendix"])
    assert "append" in capsys.readouterr().err


def test_append_runs_and_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(append, "BATCHES", 1)
    monkeypatch.setattr(append, "ROUNDS", 1)
    file = tmp_path / "bench.json"
    # In this process, so that the smaller sizes count.
    assert run.measure(["append"], file, lambda name, _: (append.run(), "")) in (0, 1)
    report = json.loads(file.read_text())
    assert list(report["results"]) == ["append"]
    assert report["results"]["append"]["ratio"] > 0
    assert report["results"]["append"]["target"] == 0.5
    assert report["machine"]["cores"] >= 1


@pytest.mark.parametrize(("ratio", "code"), [(0.49, 1), (0.5, 0)])
def test_a_missed_target_fails_the_command(tmp_path: Path, ratio: float, code: int) -> None:
    result = {"ratio": ratio, "target": 0.5}
    assert run.measure(["append"], tmp_path / "bench.json", lambda name, _: (result, "")) == code


def test_a_benchmark_that_fails_fails_the_command(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert run.measure(["rollout"], file, lambda name, _: (None, "exit status 1, see above")) == 1
    assert json.loads(file.read_text())["results"]["rollout"]["verdict"] == "FAILED"


def test_learner_and_plain_loop_train_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "SIZES", (512,))
    result = learner.run(rounds=1, hidden=32, layers=1, vocab=64)
    assert result["tokens"]["512"]["ratio"] > 0
    full = {"tokens": {"8192": {"ratio": 0.95}}, "target_ratio_at_8192": 0.9}
    assert run.headline("learner", full) == (0.95, 0.9)


def extra(**marks: bool) -> dict[str, bool | float]:
    return {"void": False, "disturbed": False, "balanced": True, "cpu_share": 0.3, **marks}


def test_errors_of_twins_are_judged_by_their_mean_over_seeds() -> None:
    def one(error: float, void: bool = False) -> dict[str, object]:
        errors = {"goodput": error, "wait": 0.0, "kv_hit": -error}
        return {"errors": errors, "measured": {"extra": extra(void=void)}}

    told = twins.summary([one(0.14), one(0.04), one(0.06)])
    assert told["within"] and not told["unsound"]
    assert told["largest"] == {"goodput": 0.14, "wait": 0.0, "kv_hit": -0.14}
    assert told["errors"]["goodput"]["mean"] == pytest.approx(0.08)
    low, high = told["errors"]["goodput"]["interval"]
    assert low < 0.08 < high and told["errors"]["goodput"]["seeds"] == 3
    assert not twins.summary([one(0.14), one(0.08)])["within"]
    assert twins.summary([one(0.0), one(0.0, void=True)])["unsound"] == ["void"]


@pytest.mark.parametrize(
    ("marks", "ok"),
    [({}, True), ({"void": True}, False), ({"disturbed": True}, False), ({"balanced": False}, False)],
)
def test_elastic_ranks_win_only_on_runs_that_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], marks: dict[str, bool], ok: bool
) -> None:
    def played(recipe: str, words: tuple[str, ...], root: Path) -> tuple[twins.Figures, None]:
        fixed = "elastic.enabled=false" in words
        wait, goodput = (4.0, 90.0) if fixed else (1.0, 100.0)
        last = "generator.replicas=1" in words
        return twins.Figures(goodput, wait, {}, {}, 0.5, 1.0, 0.5, extra(**(marks if last else {}))), None

    figures = twins.Figures(1.0, 1.0, {}, {}, 0.5, 1.0, 0.5)
    monkeypatch.setattr(twins, "live", played)
    monkeypatch.setattr(twins, "predicted", lambda *_: figures)
    kind = {"kind": "learner>generator", "reason": "generation deficit +0.30", "predicted_s": 0.4}
    made = [{**kind, "step": 9, "realised_s": 0.5}, {**kind, "realised_s": None}]
    monkeypatch.setattr(twins, "moves", lambda _: made)
    report = twins.shift(144, 99, lambda _: None)
    told = capsys.readouterr().out
    assert "step 9: learner>generator" in told and "realised +0.50 s a step" in told and "untold" in told
    assert (report["wait_against_best"], report["goodput_against_best"]) == (0.25, 100.0 / 90.0)
    assert report["ok"] is ok


def test_where_a_machine_is_full_lies_between_two_runs() -> None:
    assert twins.crossing({8: 0.2, 32: 0.5, 48: 0.9}) == 40.0
    assert twins.crossing({8: 0.2, 32: 0.5}) is None
    assert twins.crossing({8: 0.8}) == 8.0
