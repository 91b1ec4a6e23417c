"""Our own Valkey server: start, restart, stop, and what goes wrong."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.errors import StreamFailed
from cluster.valkey import ValkeyServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    made = ValkeyServer(tmp_path / "a folder", fsync="always")
    made.start()
    yield made
    made.stop()


def gone(pid: int, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_restart_keeps_port_password_and_data(server: ValkeyServer) -> None:
    url, pid = server.url, server.pid
    with redis.Redis.from_url(url) as client:
        client.set("k", b"v")
    server.kill()
    assert not server.alive and server.poll() == -signal.SIGKILL
    server.restart()
    assert server.alive and server.url == url and server.pid != pid
    with redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"
    server.restart()  # of a running one: an orderly end first
    with redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"


def test_password_is_required_and_hidden(server: ValkeyServer) -> None:
    password = server.url.partition("//:")[2].partition("@")[0]
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=server.port, retry=once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
    config = server.folder / "valkey.conf"
    assert password in config.read_text() and config.stat().st_mode & 0o777 == 0o600
    server.stop()
    assert not config.exists()


def test_stop_reaps(server: ValkeyServer) -> None:
    pid = server.pid
    assert pid is not None
    server.stop()
    assert server.poll() == 0 and not Path(f"/proc/{pid}").exists()
    server.stop()  # harmless


def test_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert server.alive
    server.stop()
    assert not server.alive


def test_port_in_use_is_a_clear_error(server: ValkeyServer, tmp_path: Path) -> None:
    second = ValkeyServer(tmp_path / "second", port=server.port)
    start = time.monotonic()
    with pytest.raises(StreamFailed, match="in use"):
        second.start()
    assert time.monotonic() - start < 20.0 and not second.alive
    assert server.alive


def test_start_failure_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where a folder must be")
    server = ValkeyServer(tmp_path)
    with pytest.raises(StreamFailed, match="appendonlydir"):
        server.start()
    assert not server.alive and not (tmp_path / "valkey.conf").exists()


def test_ends_with_its_starter(tmp_path: Path) -> None:
    code = (
        "import sys, time; from cluster.valkey import ValkeyServer\n"
        "s = ValkeyServer(sys.argv[1]); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[1]
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert starter.stdout is not None
    with starter:
        pid = int(starter.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        starter.kill()
    assert gone(pid, 30.0)
