"""The end of a run when something below it will not end: each step has its time, none holds up the others."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors import engine as engines
from actors import remote
from actors.engine import Engine
from cluster.config import Config, GeneratorConfig, build
from cluster.errors import EngineFailed
from deploy import actors, evaluate, local, run, signals
from deploy.actors import Actors
from deploy.paths import RunFolder
from deploy.run import Job
from deploy.supervise import ComponentFailed, Supervisor
from deploy.view import View
from tests.stubborn import stay

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def config() -> Config:
    return build({"env": {"name": "coin"}, "model": {"path": "/nowhere"}})


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(actors, "actor_classes", lambda config: {})  # the real ones bring torch
    folder = RunFolder(tmp_path)
    folder.make()
    return Job(config(), folder, Path("/nowhere"), View("a job", 1))


class Stuck:
    """Seats whose release never returns."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def release(self) -> None:
        self.begun.set()
        threading.Event().wait()


def test_a_task_that_never_ends_does_not_keep_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "LEAVE_S", 0.1)
    monkeypatch.setattr(signals, "AGAIN_S", 0.01)
    held: list[asyncio.Task[None]] = []
    other: list[asyncio.Task[Any]] = []

    async def work() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it tells of those left, later
        held.append(asyncio.create_task(stay(asyncio.Event()), name="nodes"))
        other.append(asyncio.create_task(asyncio.sleep(60)))
        await asyncio.sleep(0)
        return "done"

    assert signals.run(work()) == "done"
    assert other[0].cancelled() and not held[0].done()
    assert capsys.readouterr().err == "springtide: nodes has not ended and is left behind\n"


def test_what_the_run_raises_is_raised() -> None:
    async def work() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        signals.run(work())


def test_nobody_waits_for_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    monkeypatch.setattr(run, "STOP_DEADLINE_S", 0.1)
    made = job.actors = Actors(job.config, job.folder, job.model, "redis://nowhere", "s")
    made.seats = seats = Stuck()  # type: ignore[assignment]
    begun = time.monotonic()
    signals.run(job._end_actors())
    assert seats.begun.is_set() and time.monotonic() - begun < 5.0


def test_bounded_work_raises_what_it_raises() -> None:
    def fail() -> None:
        raise OSError("no room")

    assert signals.bounded(lambda: None, 5.0)
    with pytest.raises(OSError, match="no room"):
        signals.bounded(fail, 5.0)


def test_what_is_below_ends_even_if_ray_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    spared = [child.pid for child in psutil.Process().children()]
    below = subprocess.Popen(SLEEPS)
    monkeypatch.setattr(ray, "shutdown", threading.Event().wait)
    monkeypatch.setattr(local, "SHUTDOWN_S", 0.1)
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    left = local.stop(None, spare=spared)
    assert [line.partition(" ")[0] for line in left] == [str(below.pid)]
    assert not psutil.pid_exists(below.pid)
    below.wait(5.0)


async def test_a_cancellation_that_the_work_loses_is_repeated(job: Job) -> None:
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    watching = Supervisor(lambda event, fields: None, 0)
    until = asyncio.create_task(job._until(watching, work()))
    await asyncio.sleep(0)
    watching._fail("controller", "its process is gone")
    async with asyncio.timeout(5):
        with pytest.raises(ComponentFailed, match="controller: its process is gone"):
            await until


async def test_actors_are_ended_though_one_cannot_be_called(
    monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    class Gone:
        """A handle when Ray is no longer there."""

        def __init__(self) -> None:
            self.close = self

        def remote(self) -> None:
            raise RuntimeError("Ray has not been started")

    ended: list[Any] = []

    def kill(handles: list[Any]) -> None:
        if any(isinstance(handle, Gone) for handle in handles):
            raise ValueError("no such actor")
        ended.extend(handles)

    monkeypatch.setattr(actors, "kill", kill)
    made = Actors(job.config, job.folder, job.model, "redis://nowhere", "s")
    made.handles = {"generator-0": Gone(), "feeder": (feeder := object())}
    await made.end_all(1.0)
    assert ended == [feeder] and not made.handles


def test_an_evaluation_does_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that builds it waits for the engine's process, and the interpreter for the thread."""
    other = subprocess.Popen(SLEEPS)
    below: list[subprocess.Popen[bytes]] = []

    class Hanging(Engine):
        def _build(self, padded: bool) -> tuple[Any, Any]:
            below.append(subprocess.Popen(SLEEPS))
            below[0].wait()
            raise RuntimeError("the engine's process ended")

    async def suites(*_: Any) -> evaluate.Suites:
        made = Hanging("/nowhere", GeneratorConfig(start_timeout_s=0.5), 64, "g", 0, vocabulary=10)
        try:
            await made.start()
        finally:
            await made.close()
        return {}

    monkeypatch.setattr(engines, "check_folder", lambda path: 10)
    monkeypatch.setattr(evaluate, "_run_suites", suites)
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="did not start within"):
        evaluate.run_suites(config(), Path("/nowhere"))
    assert time.monotonic() - begun < 20.0 and below[0].wait(5.0) != 0
    assert other.poll() is None, "what is not the engine's goes on"
    other.kill()
    other.wait()


async def test_a_worker_told_to_end_while_it_starts_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, go, ran = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Pool:
        async def start(self) -> None:
            begun.set()
            await go.wait()

        async def close(self) -> None:
            """Nothing is held."""

    class Plays:
        def __init__(self, *_: Any, **__: Any) -> None:
            """Takes what a worker takes."""

        async def run(self) -> None:
            ran.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(remote, "make_pool", lambda config, size: Pool())
    monkeypatch.setattr(remote, "Worker", Plays)
    monkeypatch.setattr(remote, "Tokenizer", lambda *_: None)
    monkeypatch.setattr(ray, "get_actor", lambda name: None)
    tree = {"env": {"name": "coin"}, "model": {"path": "/nowhere"}}
    worker = remote.EnvWorkerActor(tree, "/nowhere", "worker-0", "redis://127.0.0.1:1", "run", str(tmp_path))
    running = asyncio.create_task(worker.run())
    await begun.wait()
    await worker.stop()
    go.set()
    async with asyncio.timeout(10):
        await running
    assert not ran.is_set()
