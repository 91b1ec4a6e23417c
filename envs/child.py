"""The program inside a sandbox: a zygote that forks one process per environment.

Starting Python and importing an environment costs a third of a second; forking costs a few
milliseconds. So one sandbox holds a *zygote* (this program), which imports the environment's
module once and forks an *environment process* whenever the pool asks for one. Each of them is
the first process of a PID namespace of its own wherever the kernel allows it: when it dies, the
kernel ends everything that it started.

File descriptor 0 is the control socket (one message per packet). With every ``spawn`` come two
descriptors for the new process: its data socket (frames: 4 bytes length, then msgpack) and the
pipe that takes its stdout and stderr, so that nothing an environment prints meets the frames.
An environment process serves one trajectory at a time and may serve many, one after the other.
"""

import contextlib
import ctypes
import gc
import math
import numbers
import os
import resource
import selectors
import signal
import socket
import struct
import threading
import time
import traceback
from typing import Any, NoReturn

import msgspec

from cluster.codec import clean
from cluster.types import Task
from envs.base import Env, StepResult
from envs.registry import EnvBuilder, load_class

CONTROL_LIMIT = 65536  # bytes of one control packet
HEADER = struct.Struct("<I")
SPENT = "spent"  # answer to close: end this process rather than use it again
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Limits(msgspec.Struct, frozen=True):
    """What one environment process may use; ``output`` is bytes of one observation."""

    memory_mb: int
    output: int
    file_mb: int = 64
    open_files: int = 256
    namespaces: bool = True  # give each process a PID namespace


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """A control packet. To the zygote: setup, spawn, kill. From it: ready, broken, spawned, exited."""

    op: str
    process: int = 0  # the pool's number of an environment process
    builder: EnvBuilder | None = None
    limits: Limits | None = None
    status: int = 0  # as waitpid gives it
    isolated: bool = False
    error: str = ""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request to an environment process: probe, start, step or close."""

    op: str
    task: Task | None = None
    seed: int = 0
    actions: list[str] = []


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Its answer: ``error`` is set when the environment failed; ``cut`` counts characters removed."""

    error: str = ""
    text: str = ""
    result: StepResult | None = None
    cut: int = 0


def cut_text(text: str, limit: int) -> tuple[str, int]:
    """Keep head and tail of ``text`` within ``limit`` UTF-8 bytes (at least 128).

    Returns the text, free of lone surrogates, and how many characters were taken out.
    """
    if len(text) <= limit:
        text = clean(text)
        raw = text.encode()
        if len(raw) <= limit:
            return text, 0
    keep = max((limit - 64) // 2, 32)
    head = clean(text[:keep]).encode()[:keep].decode("utf-8", "ignore")
    tail = clean(text[-keep:]).encode()[-keep:].decode("utf-8", "ignore")
    cut = len(text) - len(head) - len(tail)
    return f"{head}\n[... {cut} characters cut ...]\n{tail}", cut


def checked(result: Any, limit: int) -> tuple[StepResult, int]:
    """Validate what an environment returned from ``step``, clean and cut its texts.

    Raises ValueError when a reward is not a finite number, or a field has the wrong type.
    """
    if not isinstance(result, StepResult):
        raise ValueError(f"step returned {type(result).__name__}, not StepResult")
    if not isinstance(result.observation, str):
        raise ValueError(f"observation is {type(result.observation).__name__}, not str")
    rewards: dict[str, float] = {}
    for name, value in dict(result.rewards).items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"reward {name!r} is {value!r}, not a finite number")
        rewards[clean(str(name))] = float(value)
    text, cut = cut_text(result.observation, limit)
    key = None if result.state_key is None else clean(str(result.state_key))
    return msgspec.structs.replace(
        result,
        observation=text,
        rewards=rewards,
        done=bool(result.done),
        valid=bool(result.valid),
        changed=bool(result.changed),
        state_key=key,
        info=_clean_deep(result.info) if result.info else {},
    ), cut


def _clean_deep(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_clean_deep(k): _clean_deep(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean_deep(v) for v in value]
    return value


class Server:
    """Serves one data socket: at most one live environment at a time."""

    def __init__(self, sock: socket.socket, builder: EnvBuilder, limits: Limits) -> None:
        self._sock, self._builder, self._limits = sock, builder, limits
        self._env: Env | None = None
        self._buffer = bytearray()

    def serve(self) -> None:
        """Answer until the other end closes the socket."""
        decoder, encoder = msgspec.msgpack.Decoder(Ask), msgspec.msgpack.Encoder()
        while (frame := self._read()) is not None:
            try:
                body = encoder.encode(self._answer(decoder.decode(frame)))
            except Exception as error:  # info that msgpack cannot carry
                body = encoder.encode(Answer(error=_describe(error)))
            self._sock.sendall(HEADER.pack(len(body)) + body)

    def close(self) -> None:
        """Close the live environment, if any."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _answer(self, ask: Ask) -> Answer:
        # An environment is foreign code: even SystemExit is its failure, not the end of this loop.
        try:
            return self._perform(ask)
        except BaseException as error:
            if not isinstance(error, MemoryError):
                traceback.print_exc()
            message = _describe(error)
            self._env = None
            del error
            gc.collect()
            return Answer(error=message)

    def _perform(self, ask: Ask) -> Answer:
        if ask.op == "step":
            if self._env is None:
                raise RuntimeError("step before start")
            result, cut = checked(self._env.step(ask.actions), self._limits.output)
            return Answer(result=result, cut=cut)
        self.close()
        if ask.op == "close":
            _end_stragglers()
            # A thread cannot be ended from outside: a process with leftover ones is not used again.
            return Answer(text=SPENT if threading.active_count() > 1 else "")
        env = self._builder.build()
        if ask.op == "probe":
            env.close()
            return Answer()
        if ask.task is None:
            raise RuntimeError("start without a task")
        self._env = env
        first = env.start(ask.task, ask.seed)
        if not isinstance(first, str):
            raise ValueError(f"start returned {type(first).__name__}, not str")
        text, cut = cut_text(first, self._limits.output)
        return Answer(text=text, cut=cut)

    def _read(self) -> bytes | None:
        buffer = self._buffer
        while True:
            if len(buffer) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(buffer)[0]
                if len(buffer) >= end:
                    frame = bytes(buffer[HEADER.size : end])
                    del buffer[:end]
                    return frame
            part = self._sock.recv(1 << 16)
            if not part:
                return None
            buffer += part


def _describe(error: BaseException) -> str:
    where = ""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if f.filename != __file__]
    if outside:
        where = f" ({os.path.basename(outside[-1].filename)}:{outside[-1].lineno})"
    cause = error.__cause__
    kind = type(error).__name__
    if kind == "EnvFailed" and cause is not None:  # the builder's message names the original already
        return cut_text(str(error), 2000)[0]
    return cut_text(f"{kind}: {error}{where}", 2000)[0]


def _end_stragglers() -> None:
    """Between trajectories: end what the last one left running. Only as first of a PID namespace,
    where "every process" means those that this one started."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


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
            self._send(Control("broken", error=f"cannot import {self._builder.path}: {_describe(error)}"))
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
