"""The program inside a sandbox: a zygote that forks one process per environment.

Starting Python and importing an environment costs a third of a second; forking costs a few
milliseconds. So one sandbox holds a *zygote* (this program), which imports the environment's
module once and forks an *environment process* (``envs/child.py``) whenever the pool asks for one.
Each of them is the first process of a PID namespace of its own wherever the kernel allows it:
when it dies, the kernel ends everything that it started.

File descriptor 0 is the control socket (one message per packet). With every ``spawn`` come two
descriptors for the new process: its data socket and the pipe that takes its stdout and stderr,
so that nothing an environment prints meets the frames.
"""

import contextlib
import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import time
import traceback
from typing import NoReturn

import msgspec

from envs.child import CONTROL_LIMIT, Control, Limits, Server, describe
from envs.registry import EnvBuilder, load_class

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def _unshare_pids() -> bool:
    """Children of this process will live in a new PID namespace; False where that is refused."""
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWPID) == 0:  # privileged
        return True
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _apply(limits: Limits) -> None:
    mb = 1 << 20
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_mb * mb),
        (resource.RLIMIT_FSIZE, limits.file_mb * mb),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _become_environment(sock: int, pipe: int, builder: EnvBuilder, limits: Limits) -> NoReturn:
    """In the new process: own session, own limits, stdin empty, stdout and stderr in the pipe."""
    code = 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        data = socket.socket(fileno=os.dup(sock))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        os.closerange(3, data.fileno())
        os.closerange(data.fileno() + 1, 4096)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _apply(limits)
        server = Server(data, builder, limits)
        try:
            server.serve()
        finally:
            server.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Zygote:
    """The loop that forks, kills and reaps; it never runs environment code after the import."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._builder = EnvBuilder("")
        self._limits = Limits(0, 0)
        self._pids: dict[int, int] = {}  # process number -> pid
        self._plain: set[int] = set()  # pids without a namespace of their own

    def run(self) -> None:
        """Serve until the pool closes the control socket; then nothing is left alive."""
        setup = self._receive()[0]
        if setup is None or setup.builder is None or setup.limits is None:
            return
        self._builder, self._limits = setup.builder, setup.limits
        try:
            load_class(self._builder.path)
        except BaseException as error:  # whatever a foreign module raises while imported
            traceback.print_exc()
            self._send(Control("broken", error=f"cannot import {self._builder.path}: {describe(error)}"))
            return
        gc.collect()
        gc.freeze()  # keep the collector from touching, and so copying, shared pages
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        self._send(Control("ready"))
        try:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                        self._reap()
                    elif not self._obey():
                        return
        finally:
            for pid in self._pids.values():
                self._end(pid)
            self._await_all()

    def _obey(self) -> bool:
        order, received = self._receive()
        if order is None:
            return False
        if order.op == "spawn":
            self._spawn(order.process, received)
        elif order.op == "kill" and order.process in self._pids:
            self._end(self._pids[order.process])
        return True

    def _receive(self) -> tuple[Control | None, list[int]]:
        raw, received, _, _ = socket.recv_fds(self._control, CONTROL_LIMIT, 2)
        return (msgspec.msgpack.decode(raw, type=Control) if raw else None), received

    def _send(self, message: Control) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the pool left: EOF follows
            self._control.send(msgspec.msgpack.encode(message))

    def _spawn(self, number: int, received: list[int]) -> None:
        """Fork twice: only a child of the process that left the PID namespace is in the new one.

        The middle process ends at once; as subreaper the zygote then is the parent. The new one
        waits for ``go``: asking for the parent-death signal before would tie it to the middle.
        """
        report_r, report_w = os.pipe()
        go_r, go_w = os.pipe()
        middle = os.fork()
        if middle == 0:
            code = 1
            try:
                isolated = self._limits.namespaces and _unshare_pids()
                pid = os.fork()
                if pid == 0:
                    os.close(go_w)
                    os.read(go_r, 1)
                    _become_environment(received[0], received[1], self._builder, self._limits)
                os.write(report_w, f"{pid} {int(isolated)}".encode())
                code = 0
            except OSError:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(report_w)
        os.close(go_r)
        told = os.read(report_r, 64).decode().split()
        os.waitpid(middle, 0)
        os.close(report_r)
        for fd in received:
            os.close(fd)
        if told:
            pid, isolated = int(told[0]), told[1] == "1"
            self._pids[number] = pid
            if not isolated:
                self._plain.add(pid)
            self._send(Control("spawned", number, isolated=isolated))
            os.write(go_w, b"g")
        else:
            self._send(Control("exited", number, status=1 << 8, error="fork failed"))
        os.close(go_w)

    def _end(self, pid: int) -> None:
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        numbers_of = {pid: number for number, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                self._sweep()
                return
            number = numbers_of.get(pid)
            if number is None:
                continue
            if pid in self._plain:
                self._plain.discard(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            del self._pids[number]
            self._send(Control("exited", number, status=status))

    def _await_all(self) -> None:
        """Reap what was killed, so that no zombie is left to a first process that never reaps."""
        deadline = time.monotonic() + 1.0
        while self._pids and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.001)

    def _sweep(self) -> None:
        """Without namespaces, orphans of an ended environment come to the subreaper: end them."""
        if not self._plain and self._limits.namespaces:
            return
        known = set(self._pids.values())
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                if pid not in known:
                    self._end(pid)


def main() -> None:
    """Run the zygote on descriptor 0."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    Zygote(control).run()


if __name__ == "__main__":
    main()
