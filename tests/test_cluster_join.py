"""Joining a running Ray cluster: the job works there, and leaves the cluster as it found it.

The cluster is what ``ray start --head`` makes, with token authentication as by default. What a user
must do is to let the job find the cluster's token; here it is named by RAY_AUTH_TOKEN_PATH.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.launch import send_token
from deploy.local import foreign_nodes
from tests.jobs import Job

START_S = 240.0
GONE_S = 60.0  # from the driver's end to the end of its last actor, which the cluster's raylet sees to

# Printed by a process that joins the cluster and looks at it from outside.
LOOK = """
import json, sys, ray
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(json.dumps({
    "actors": list_named_actors(all_namespaces=True),
    "groups": [g["state"] for g in placement_group_table().values()],
    "free": ray.available_resources().get("CPU", 0.0),
    "total": ray.cluster_resources().get("CPU", 0.0),
}))
"""


@dataclass(frozen=True)
class Cluster:
    """A head node in a process group of its own."""

    address: str
    head: subprocess.Popen[bytes]

    def look(self) -> dict[str, Any]:
        """What is in use, as a newcomer sees it."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOOK, self.address],
            capture_output=True, text=True, timeout=240, check=True,
            env=dict(os.environ, RAY_AUTH_MODE="token"),
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="join-") as folder,  # short: sockets live below it
        pytest.MonkeyPatch.context() as patch,
    ):
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        patch.delenv("RAY_AUTH_MODE", raising=False)  # the head turns it on, since there is a token
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        port = free_port()
        head = subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}",
                "--node-ip-address=127.0.0.1", "--num-cpus=8", f"--temp-dir={folder}/ray",
                f"--ray-client-server-port={free_port()}", "--include-dashboard=false",
                "--disable-usage-stats", f"--object-store-memory={128 * 2**20}",
            ],
            env=dict(os.environ, OMP_NUM_THREADS="1"), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            found = Cluster(f"127.0.0.1:{port}", head)
            deadline = time.monotonic() + START_S
            while not _listens(found.address):
                assert head.poll() is None, "ray start failed"
                assert time.monotonic() < deadline, "ray start takes too long"
                time.sleep(0.3)
            yield found
        finally:
            below = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            head.wait(60)
            for process in psutil.wait_procs(below, timeout=10)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_a_job_in_a_running_cluster(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.look()
    job = Job(tmp_path, steps=2, **{"cluster.address": cluster.address})
    with job.running():
        worker = job.wait_for(lambda: job.processes().get("worker-0"), 500.0, "a worker")
        assert "working_dir_files" in worker.cwd(), "actors run in the uploaded working directory"
        assert cluster.head.pid in [p.pid for p in worker.parents()], "actors run in the joined cluster"
        assert job.wait(600.0) == 0, job.tail()
        job.gone(GONE_S)
    assert job.summary()["ledger"]["balanced"]
    assert job.version() == 2
    assert cluster.head.poll() is None, "the cluster was taken down"
    after = _settled(cluster, before)
    assert not after["actors"]
    assert set(after["groups"]) <= {"REMOVED"}
    assert after["free"] == after["total"] == before["total"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_wrong_token_is_refused_with_one_line(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    job = Job(tmp_path, steps=2, **{"cluster.address": cluster.address})
    with job.running():
        assert job.wait(360.0) == 2, job.tail()
    last = job.log.read_text().splitlines()[-1]
    assert last.startswith(f"springtide: config: cluster.address = '{cluster.address}': ")
    assert "RAY_AUTH_TOKEN" in last


@pytest.mark.parametrize(
    ("address", "variable", "file", "mode"),
    [
        ("h:1", "", False, None),
        ("h:1", "", True, "token"),
        ("h:1", "RAY_AUTH_TOKEN", False, "token"),
        ("h:1", "RAY_AUTH_TOKEN_PATH", False, "token"),
        ("h:1", "RAY_AUTH_MODE", True, "given"),
        ("", "", True, None),
    ],
)
def test_the_token_is_sent_if_there_is_one(
    address: str, variable: str, file: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that the end of the test puts back what was there
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable:
        monkeypatch.setenv(variable, "given")
    if file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
    send_token(address)
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_nodes_on_other_machines_are_found() -> None:
    nodes = [
        {"NodeManagerAddress": "127.0.0.1", "Alive": True},
        {"NodeManagerAddress": "203.0.113.7", "Alive": True},
        {"NodeManagerAddress": "203.0.113.9", "Alive": False},
    ]
    assert foreign_nodes(nodes) == ["203.0.113.7"]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def _settled(cluster: Cluster, before: dict[str, Any]) -> dict[str, Any]:
    """The cluster's state once its resources are free again, or as it is after some seconds."""
    deadline = time.monotonic() + 60.0
    while True:
        found = cluster.look()
        if found["free"] == before["free"] or time.monotonic() > deadline:
            return found
        time.sleep(0.5)
