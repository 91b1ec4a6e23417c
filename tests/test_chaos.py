"""kill -9 of every component at random instants: the job goes on, and its books balance."""

import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import Job

from deploy.leftovers import SHARED_MEMORY

KILLS = 5  # of each component
SEED = 20
GONE_S = 90.0  # what a killed driver started ends by itself; about 15 s on an idle machine
LATENCY = {"mean_s": 0.15, "sigma": 0.5}


def settings(**more: Any) -> dict[str, Any]:
    return {
        "objective.kl_coef": 0.01,
        "scorer.replicas": 1,
        "learner.step_timeout_s": 120.0,
        "env.latency": LATENCY,
    } | more


def kill_one(job: Job, name: str, before: set[psutil.Process]) -> psutil.Process:
    """SIGKILL of the component; one whose process is not there yet is waited for. Returns the process."""

    def found() -> psutil.Process | None:
        process = job.processes().get(name)
        return process if process is not None and process not in before else None

    while True:
        process: psutil.Process = job.wait_for(found, 300.0, f"{name} has a process")
        job.remains()  # remembers its children
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it was replaced just now: the next one, then
            continue
        return process


def folders_of(drivers: set[int]) -> list[Path]:
    """Folders in shared memory and the temporary folder that these drivers made."""
    found = []
    for pid in drivers:
        found += SHARED_MEMORY.glob(f"springtide-{pid}-*")
        found += Path(tempfile.gettempdir()).glob(f"springtide-ray-{pid}-*")
    return found


def unfinished(job: Job) -> set[tuple[str, int]]:
    """Checkpoints that are being written or never were to their end: name, and when it last changed."""
    found = set()
    for path in job.folder.checkpoints.glob(".step-*.part"):
        with suppress(FileNotFoundError):  # it has just been finished
            found.add((path.name, path.stat().st_ctime_ns))
    return found


async def check_books(job: Job, steps: int) -> None:
    """No gap and no duplicate in what was trained, and two independent counts that agree."""
    ledger, audit, log = await job.books()
    assert ledger == audit
    assert ledger.balanced and ledger.pending == 0
    assert [record.step for record in log] == list(range(1, steps + 1))
    assert all(record.committed for record in log)
    trained = [trajectory for record in log for trajectory in record.trajectories]
    assert len(trained) == len(set(trained)) == ledger.trained
    groups = [group for record in log for group in record.groups]
    assert len(groups) == len(set(groups)) == steps * job.config.run.groups_per_step
    assert max(lag for record in log for lag in record.lags) <= job.config.run.max_lag
    assert job.summary()["ledger"] == {**ledger_fields(ledger), "balanced": True, "audited": True}


def ledger_fields(ledger: Any) -> dict[str, Any]:
    return {name: getattr(ledger, name) for name in ledger.__struct_fields__}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(3000)
async def test_any_component_may_be_killed(tmp_path: Path) -> None:
    """Each kill comes when the version reaches a random number, and a random moment later."""
    steps = 60
    chance = random.Random(SEED)
    job = Job(tmp_path, steps, **settings(**{"learner.ranks": 2}))
    kinds = ["worker-0", "scorer-0", "learner", "feeder", "controller", "valkey", "generator-0"]
    plan = sorted((chance.randint(0, steps - 8), kind) for kind in kinds for _ in range(KILLS))
    killed: dict[str, set[psutil.Process]] = {}
    with job.running():
        assert job.process is not None
        drivers = {job.process.pid}
        for version, kind in plan:
            job.wait_for(lambda v=version: job.trace("admission_open") and job.version() >= v, 400.0, kind)
            time.sleep(chance.uniform(0.0, 1.5))
            name = f"learner-{chance.randint(0, 1)}" if kind == "learner" else kind
            process = kill_one(job, name, killed.get(name, set()))
            killed.setdefault(name, set()).add(process)
        assert job.wait(600.0) == 0, job.tail()
        job.gone(GONE_S)
    assert not folders_of(drivers) and not job.folder.pids.exists()
    await check_books(job, steps)
    kills = Counter({name: len(processes) for name, processes in killed.items()})
    restarts = job.summary()["restarts"]
    assert set(restarts) == set(kills)
    # Only its own deaths restart it. (One that comes before its ``run`` is called again goes unseen.)
    assert 0 < restarts["generator-0"] <= kills["generator-0"] == KILLS
    assert 0 < restarts["controller"] <= kills["controller"] == KILLS


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(3000)
async def test_the_driver_may_be_killed_and_the_run_resumed(tmp_path: Path) -> None:
    """While starting, in mid-run and while a checkpoint is written; nothing survives a kill."""
    steps = 40
    chance = random.Random(SEED)
    job = Job(tmp_path, steps, **settings(**{"run.checkpoint_every": 2}))
    drivers: set[int] = set()

    def life(kind: str) -> None:
        job.start()
        assert job.process is not None
        drivers.add(job.process.pid)
        job.wait_for(lambda: job.processes().get("driver"), 180.0)
        if kind == "start-up":
            time.sleep(chance.uniform(0.0, 12.0))
        else:
            left = unfinished(job)  # of an earlier life
            target = job.version() + chance.randint(1, 4)
            job.wait_for(lambda: job.version() >= target, 400.0)
            if kind == "mid-run":
                time.sleep(chance.uniform(0.0, 1.5))
            else:
                # It is there for some hundredths of a second: looked for more often than that.
                job.wait_for(lambda: unfinished(job) - left, 400.0, "a checkpoint", poll_s=0.005)
        job.kill()
        job.gone(GONE_S)

    try:
        for kind in ("mid-run", "start-up", "checkpoint", "start-up", "mid-run", "checkpoint"):
            life(kind)
        job.start()
        assert job.process is not None
        drivers.add(job.process.pid)
        assert job.wait(900.0) == 0, job.tail()
        job.gone(GONE_S)
    finally:
        job.end()
    assert not folders_of(drivers) and not job.folder.pids.exists()
    await check_books(job, steps)
