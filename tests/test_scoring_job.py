"""Whole jobs whose batches are scored by a scorer as segments stream, or by the learners: the same losses."""

from pathlib import Path

import pytest

from deploy.replay import replayed
from tests.jobs import Job
from tests.test_train import GROUPS, MEMBERS, RECORDED, train, worst
from tests.tiny_player import make_player

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1200)]


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


def test_a_scorer_scores_segments_before_their_group_is_claimed(tmp_path: Path) -> None:
    """Most trained tokens have their score by then; the losses are those of whole rows (the replay's)."""
    settings = RECORDED | {
        "run.max_lag": 1,
        "env.slots": 16,
        "env.latency": {"mean_s": 0.05, "sigma": 0.5},
        "learner.micro_rows": 2,
        "objective.kl_coef": 0.05,
        "scorer.replicas": 1,
    }
    run = train(Job(tmp_path / "streaming", 5, make_player(tmp_path / "player"), **settings))
    ledger = run.summary["ledger"]
    assert ledger["balanced"] and ledger["trained"] == 5 * GROUPS * MEMBERS
    metrics = [step.metrics for step in run.steps]
    assert all(m["scoring"] == "decoupled" and m["signal_missing_tokens"] == 0 for m in metrics)
    turns = [len(member.turns) for step in run.steps for group in step.groups for member in group.members]
    assert sum(turns) / len(turns) > 2
    # The first groups may be rolled out before the scorer has loaded its model.
    ahead = [step["scored_ahead"] for step in run.job.metrics()][1:]
    assert sum(ahead) / len(ahead) > 0.5, ahead
    assert not run.events("segments_left") and not run.events("segments_asked_again")
    assert metrics[-1]["kl_ref"] > 1e-6
    # Scores of segments and of whole rows differ in their rounding. Adam's first step moves each weight by
    # the learning rate whatever its gradient's size, so one whose gradient is nothing but rounding may go
    # the other way. Scores that are off by one token change a loss by tenths.
    assert worst(replayed(run.config, run.folder.record, run.model)) < 1e-4
