"""Several Ray nodes on this machine, each a process tree of its own, with token authentication as by default.

::

    with RayNodes(cpus=5) as cluster:
        cluster.add("a", cpus=2)
        job = Job(tmp_path, steps=30, **{"cluster.address": cluster.address})
        with job.running():
            ...
            cluster.kill("a")       # SIGKILL of its raylet, agents and workers
            cluster.add("a", cpus=2)
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

START_S = 240.0
STORE_MB = 128
# A raylet that was killed refuses connections at once, so it is known to be dead after three tries;
# one that is merely slow has twenty seconds for each.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "3",
}


class RayNodes:
    """A head and further nodes; all of them end with the context, found by process id."""

    def __init__(self, cpus: int) -> None:
        self.cpus = cpus
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = pytest.MonkeyPatch()
        self._temporary = tempfile.TemporaryDirectory(prefix="nodes-")  # short: sockets live below it
        self.folder = Path(self._temporary.name)

    def __enter__(self) -> Self:
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        self._environment.setenv("RAY_AUTH_MODE", "token")
        self._environment.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        try:
            port = free_port()
            self.address = f"127.0.0.1:{port}"
            self._start(
                "head", self.cpus, "--head", f"--port={port}", f"--temp-dir={self.folder}/ray",
                f"--ray-client-server-port={free_port()}", "--include-dashboard=false",
            )  # fmt: skip
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for name in [name for name in self.nodes if name != "head"] + ["head"]:
                if name in self.nodes:
                    self._end(name)
        finally:
            self._environment.undo()
            self._temporary.cleanup()

    def add(self, name: str, cpus: int) -> None:
        """Start a node and wait until it has joined. One after the other: raylets race for sockets."""
        self._start(name, cpus, f"--address={self.address}")

    def kill(self, name: str) -> None:
        """End a node as a power cut does: every process of it, at once."""
        node = psutil.Process(self.nodes[name].pid)
        for process in [*node.children(recursive=True), node]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.nodes.pop(name).wait(30)

    def _start(self, name: str, cpus: int, *words: str) -> None:
        log = self.folder / f"{name}-{len(list(self.folder.glob('*.log')))}.log"
        with log.open("wb") as output:
            self.nodes[name] = subprocess.Popen(
                [
                    Path(sys.executable).with_name("ray"), "start", "--block", "--node-ip-address=127.0.0.1",
                    f"--num-cpus={cpus}", f"--object-store-memory={STORE_MB * 2**20}",
                    "--disable-usage-stats", *words,
                ],
                env=dict(os.environ, OMP_NUM_THREADS="1", **HEALTH), cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (said := log.read_text(errors="replace")):
            if self.nodes[name].poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"ray start of {name} failed:\n{said[-2000:]}")
            time.sleep(0.2)

    def _end(self, name: str) -> None:
        process = self.nodes.pop(name)
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for left in psutil.wait_procs(below, timeout=10)[1]:
            with suppress(psutil.NoSuchProcess):
                left.kill()


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
