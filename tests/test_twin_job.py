"""Jobs of timed twins: Ray, Valkey, controller, feeder, workers and every rank, and no model anywhere."""

import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.cpu import VOID_SHARE
from deploy.tokens import make_tokens
from tests.clocked import slowness
from tests.jobs import Job, lives, scale

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GONE_S = 60.0  # from the driver's end to the end of the last process
TOO_SLOW = 1.5  # times as slow as two idle cores: twins' times are no longer those of their profile

TWIN: dict[str, Any] = {
    "env.name": "load",
    "env.params": {"workload": "twin"},
    "env.sandbox": "inline",
    "env.max_turns": 16,
    "env.slots": 40,
    "harness.max_context": 1024,
    "harness.max_new_tokens": 64,
    "generator.replicas": 5,
    "learner.ranks": 2,
    "learner.row_tokens": 1024,
    "learner.micro_rows": 2,
    "objective.kl_coef": 0.01,
    "scorer.replicas": 1,
    "twin.profile": "twin",
    "run.deadline_s": 90.0,
}


def twin_job(root: Path, steps: int, **settings: Any) -> Job:
    root.mkdir(parents=True, exist_ok=True)
    make_tokens(root / "model")
    return Job(root, steps, root / "model", **(TWIN | settings))


def check(job: Job, steps: int) -> dict[str, Any]:
    """What must hold of every finished job; returns the summary."""
    summary = job.summary()
    assert summary["steps"] == steps
    ledger = summary["ledger"]
    assert ledger["balanced"] and ledger["audited"] and ledger["pending"] == 0
    assert summary["goodput_tok_s"] > 0
    assert summary["lag"]["max"] <= summary["lag"]["bound"]
    assert 0 < summary["cpu_share"] < 1
    for event in ("parked", "resumed", "moved"):
        assert summary["admission"][event] == sum(step["admission_events"][event] for step in job.metrics())
    measured = {int(step["step"]) for step in job.metrics()}
    if len(measured) == steps:  # a feeder that was killed may have taken the figures of its last step along
        assert digest_of(job, steps) == digest_told(job, steps)
    return summary


def digest_of(job: Job, steps: int) -> str:
    """What a learner's state must be that applied every step once, in order."""
    tokens = {int(step["step"]): int(step["trained_tokens"]) for step in job.metrics()}
    state = hashlib.sha256(b"initial").hexdigest()
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}/{step}/{tokens[step]}".encode()).hexdigest()
    return state


def digest_told(job: Job, steps: int) -> str:
    """What the last checkpoint says it is."""
    told = json.loads((job.folder.checkpoints / f"step-{steps:06d}" / "twin.json").read_text())
    return str(told["digest"])


@pytest.mark.timeout(900)
def test_eight_ranks_end_to_end(tmp_path: Path) -> None:
    job = twin_job(tmp_path, 20)
    with job.running():
        assert job.wait(600.0) == 0, job.tail()
    summary = check(job, 20)
    assert summary["ledger"]["trained"] == 20 * 16
    ahead = [step["scored_ahead"] for step in job.metrics()][2:]
    assert sum(ahead) / len(ahead) > 0.25, ahead
    assert not job.trace("segments_asked_again", "score_asked_again")
    (cpu,) = job.trace("cpu")
    job.gone(GONE_S)
    # A process with torch inside has more than 400 MB.
    assert max(cpu["rss_mb"].values()) < 300, cpu["rss_mb"]


@pytest.mark.timeout(900)
def test_kills_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """A generator, a learner, a scorer and the feeder die; the job ends with every book balanced."""
    job = twin_job(tmp_path, 16, **{"run.checkpoint_every": 4})
    with job.running():
        for at, name in ((3, "generator-1"), (5, "learner-1"), (7, "scorer-0"), (9, "feeder")):
            job.wait_for(lambda at=at: job.version() >= at, 300.0, f"step {at}")
            job.processes()[name].kill()
        assert job.wait(600.0) == 0, job.tail()
    check(job, 16)
    assert len(job.metrics()) >= 15
    assert len(job.trace("component_died")) >= 4


@pytest.mark.timeout(900)
def test_a_scorer_that_hangs_is_replaced(tmp_path: Path) -> None:
    """The only one stands still: nobody else could score, and it does not come back by itself."""
    steps = 10
    job = twin_job(tmp_path, steps, **{"scorer.timeout_s": 30.0})
    with job.running():
        job.wait_for(lambda: job.version() >= 4, 300.0, "step 4")
        hung = job.processes()["scorer-0"]
        hung.suspend()
        assert job.wait(500.0) == 0, job.tail()
        assert not lives(hung)
    summary = check(job, steps)
    assert summary["ledger"]["trained"] == steps * 16
    assert [event["scorer"] for event in job.trace("scorer_restarted")] == [7]


@pytest.mark.timeout(1500)
def test_env_workers_come_and_go_and_no_trajectory_is_lost(tmp_path: Path) -> None:
    """``springtide scale --env-workers`` on a running job, up and down again."""
    steps = 80
    few = {"generator.replicas": 3, "learner.ranks": 1, "objective.kl_coef": 0.0, "scorer.replicas": 0}
    # A wide bound: no group is so late that it has to be dropped, whoever plays it.
    slow = {"twin.speed": 3.0 / slowness()}
    job = twin_job(tmp_path, steps, **few | slow | {"env.slots": 24, "run.max_lag": 8})
    more = {"worker-1", "worker-2"}
    with job.running():
        job.wait_for(lambda: job.version() >= 2, 300.0, "step 2")
        said = scale(job, "--env-workers", "3")
        assert said.startswith("env workers 1 -> 3\n") and said.endswith(": reached\n")
        job.wait_for(lambda: more <= set(job.processes()), 120.0, "three workers")
        grown = job.version()
        job.wait_for(lambda: job.version() >= grown + 4, 300.0, "steps with three workers")
        assert scale(job, "--env-workers", "1").startswith("env workers 3 -> 1\n")
        job.wait_for(lambda: not more & set(job.processes()), 180.0, "one worker")
        shrunk = job.version()
        assert shrunk < steps, "the way back was made in a running job"
        assert job.wait(900.0) == 0, job.tail()
    summary = check(job, steps)
    ledger = summary["ledger"]
    assert ledger["trained"] == ledger["admitted"] == steps * 16, "nothing dropped, abandoned or failed"
    played = Counter[str]()
    for name in ("worker-0", *sorted(more)):
        lines = (job.folder.workers / f"ends-{name}.jsonl").read_text().splitlines()
        assert lines, f"{name} has played nothing"
        played.update(json.loads(line)["trajectory"] for line in lines)
    assert len(played) == steps * 16 and set(played.values()) == {1}, "each was played once"
    assert not job.trace("group_lost", "component_died") and not summary["restarts"]
    assert summary["admission"]["parked"] > 0, "two dozen tasks and more share small caches"
    assert "parked, " in job.log.read_text(), "the view tells of it"


@pytest.mark.timeout(900)
def test_thirty_two_ranks(tmp_path: Path) -> None:
    """24 generators, 6 learners, 2 scorers, in less than three minutes with their start on two idle cores."""
    slow, begun = slowness(), time.monotonic()
    job = twin_job(
        tmp_path,
        15,
        **{
            "generator.replicas": 24,
            "learner.ranks": 6,
            "scorer.replicas": 2,
            "env.workers": 2,
            "env.slots": 96,
            "run.groups_per_step": 8,
            "run.group_size": 8,
        },
    )
    with job.running():
        assert job.wait(720.0) == 0, job.tail()
    took = time.monotonic() - begun
    assert took < 180 * max(slow, slowness()), took
    summary = check(job, 15)
    assert summary["ranks"]["generator"] == 24


@pytest.mark.timeout(2500)
def test_ranks_follow_the_load(tmp_path: Path) -> None:
    """One phase asks for generators, the next for learners: ranks move both ways, nothing is lost.

    A machine that is too busy changes the load: a run that is void for it is made again, slower.
    """
    steps = 66  # the load shifts in step 49
    for speed in (4.0, 2.0, 1.0):
        job = shifting_job(tmp_path / f"speed-{speed:g}", steps, speed)
        with job.running():
            assert job.wait(300.0 * 4.0 / speed) == 0, job.tail()
        summary = check(job, steps)
        resized = job.trace("resized")
        assert not any(event["error"] for event in resized)
        ranks = [step["ranks"] for step in job.metrics()]
        assert all(r["generator"] + r["learner"] == 4 for r in ranks)
        most = {role: max(r[role] for r in ranks) for role in ("generator", "learner")}
        void = max(summary["cpu_share"], summary["cpu_share_machine"]) > VOID_SHARE
        if most == {"generator": 3, "learner": 3} or not (void or slowness() > TOO_SLOW):
            break
    assert most == {"generator": 3, "learner": 3}, ranks
    assert len(resized) >= 2


def shifting_job(root: Path, steps: int, speed: float) -> Job:
    return twin_job(
        root,
        steps,
        **{
            "env.params": {"workload": "twin-shift"},
            "env.slots": 80,
            "generator.replicas": 2,
            "objective.kl_coef": 0.0,
            "scorer.replicas": 0,
            "run.max_lag": 4,
            "elastic.enabled": True,
            "twin.profile": "twin-shift",
            "twin.speed": speed,
        },
    )
