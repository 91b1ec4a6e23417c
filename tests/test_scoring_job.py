"""Whole jobs whose learners score their own batches: no scorer ranks, the same losses."""

from pathlib import Path

import pytest

from deploy.replay import replayed
from tests.jobs import Job
from tests.test_train import GROUPS, MEMBERS, RECORDED, train, worst
from tests.tiny_player import make_player

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.mark.parametrize("mode", ["colocated", "auto"])
def test_learners_that_score_themselves_train_what_a_replay_trains(mode: str, tmp_path: Path) -> None:
    """``auto`` without scorer ranks can only score on the learners, and starts so."""
    settings = RECORDED | {
        "run.max_lag": 1,
        "env.slots": 8,
        "learner.ranks": 2 if mode == "colocated" else 1,
        "learner.micro_rows": 2,
        "objective.kl_coef": 0.05,
        "scorer.mode": mode,
    }
    run = train(Job(tmp_path / mode, 4, make_player(tmp_path / "player"), **settings))
    assert run.summary["ledger"]["balanced"]
    assert run.summary["ledger"]["trained"] == 4 * GROUPS * MEMBERS
    metrics = [step.metrics for step in run.steps]
    assert all(m["scoring"] == "colocated" and m["signal_missing_tokens"] == 0 for m in metrics)
    assert all(m["spent"]["score"] > 0 for m in metrics)
    assert metrics[0]["kl_ref"] == pytest.approx(0.0, abs=1e-6)  # the reference is the start itself
    assert metrics[-1]["kl_ref"] > 1e-6
    compared = replayed(run.config, run.folder.record, run.model)
    assert [one.step for one in compared] == [1, 2, 3, 4]
    assert worst(compared) < 1e-5
