"""Ctrl-C and SIGTERM, at any moment: a known exit code within seconds, and nothing of the job is left.

A terminal sends Ctrl-C to the whole foreground process group, so SIGINT goes to the group here; SIGTERM
goes to the driver alone, as a scheduler sends it.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.jobs import REPO, Job, make_player, told

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]

SOON_S = 180.0  # idle, a job is gone within 5 to 15 s
GONE_S = 30.0  # from the driver's end to the end of the last process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_player(tmp_path_factory.mktemp("model"))


def shown(job: Job, text: str) -> Callable[[], bool]:
    """Whether the job has printed it."""
    return lambda: text in job.log.read_text(errors="replace")


def listening(processes: list[psutil.Process]) -> set[int]:
    """Ports at which these processes listen."""
    ports = set()
    for process in processes:
        try:
            ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return ports


def answers(port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def check_gone(job: Job, pid: int, ports: set[int]) -> None:
    """No process, no open port, no folder in temporary places."""
    job.gone(GONE_S)
    assert not [port for port in ports if answers(port)]
    folders = [
        path
        for root in (Path(tempfile.gettempdir()), Path("/dev/shm"))
        for path in root.glob("springtide-*")
        if str(pid) in re.findall(r"\d+", path.name)[:1]
    ]
    assert not folders


def interrupt(job: Job, number: int, again: bool = False) -> int:
    """Send the signal, once more during the shutdown if asked; check that all is gone; the exit code."""
    assert job.process is not None
    pid, ports = job.process.pid, listening(job.remains())
    began = time.monotonic()
    send = os.killpg if number == signal.SIGINT else os.kill
    send(pid, number)
    if again:
        time.sleep(1.0)
        send(pid, number)
    code = job.wait(SOON_S)
    sys.stdout.write(f"gone after {time.monotonic() - began:.1f} s with {len(ports)} ports\n")
    check_gone(job, pid, ports)
    text = job.log.read_text(errors="replace")
    assert "Traceback" not in text
    assert "springtide: interrupted" in text
    return code


def test_while_it_checks_and_rehearses(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path, steps=50, model=model)
    with job.running():
        job.wait_for(shown(job, "Springtide: job"), 180.0)
        assert interrupt(job, signal.SIGINT) == 130


def test_while_ray_starts(tmp_path: Path, model: Path) -> None:
    """Ray puts a handler of its own in place while it starts."""
    job = Job(tmp_path, steps=50, model=model)
    with job.running():
        job.wait_for(shown(job, "starting the queue"), 240.0)
        job.wait_for(lambda: any("gcs_server" in told(p)[1] for p in job.remains()), 180.0)
        assert interrupt(job, signal.SIGTERM) == 143


def test_twice_while_engines_start(tmp_path: Path, model: Path) -> None:
    """The second Ctrl-C comes during the shutdown, and changes nothing."""
    job = Job(tmp_path, steps=50, model=model)
    with job.running():
        job.wait_for(lambda: "generator-0" in job.processes(), 400.0)
        assert interrupt(job, signal.SIGINT, again=True) == 130


def test_in_the_middle_of_a_run(tmp_path: Path, model: Path) -> None:
    job = Job(tmp_path, steps=5000, model=model)
    with job.running():
        job.wait_for(lambda: job.version() >= 2, 500.0)
        assert interrupt(job, signal.SIGINT) == 130
        command = f"springtide train --resume {job.folder.path}"
        assert f"springtide: interrupted; to continue: {command}\n" in job.log.read_text()
        assert "(raylet)" not in job.log.read_text(), "noise on the terminal"


def test_evaluation(tmp_path: Path, model: Path) -> None:
    """While the engine loads its model in a thread, which nothing can stop."""
    job = Job(tmp_path, steps=1, model=model)
    command = [sys.executable, "-m", "deploy.cli", "eval", str(job.recipe), "--checkpoint", str(model)]
    environment = dict(os.environ, PYTHONPATH=str(REPO), SPRINGTIDE_TEST_JOB=str(job.root))
    with job.log.open("wb") as log:
        job.process = subprocess.Popen(
            command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        driver = psutil.Process(job.process.pid)
        job.wait_for(lambda: any("/vllm/" in m.path for m in driver.memory_maps()), 400.0)
        assert interrupt(job, signal.SIGINT) == 130
    finally:
        job.end()
