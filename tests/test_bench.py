"""The benchmarks start and measure something; their figures are for ``make bench``."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from tests.bench import append, learner, run


def test_every_benchmark_runs_without_arguments() -> None:
    files = {path.stem for path in Path(run.__file__).parent.glob("*.py")} - {"run"}
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
