"""An environment process: one trajectory at a time, many one after the other.

Also the messages of its sandbox. Frames on the data socket are 4 bytes of length, then msgpack;
the zygote (``envs/zygote.py``) forks these processes and speaks ``Control`` with the pool.
"""

import contextlib
import gc
import math
import numbers
import os
import signal
import socket
import struct
import threading
import traceback
from typing import Any

import msgspec

from cluster.codec import clean
from cluster.types import Task
from envs.base import Env, StepResult
from envs.registry import EnvBuilder

CONTROL_LIMIT = 65536  # bytes of one control packet
HEADER = struct.Struct("<I")
SPENT = "spent"  # answer to close: end this process rather than use it again


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
    """A request to an environment process: probe, start, step, pause, resume or close."""

    op: str
    task: Task | None = None
    seed: int = 0
    actions: list[str] = []


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Its answer: ``error`` is set when the environment failed; ``cut`` counts characters removed.

    ``pauses`` (to start): the environment has the capability "pause".
    """

    error: str = ""
    text: str = ""
    result: StepResult | None = None
    cut: int = 0
    pauses: bool = False


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
                body = encoder.encode(Answer(error=describe(error)))
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
            message = describe(error)
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
        if ask.op in ("pause", "resume"):
            if self._env is None:
                raise RuntimeError(f"{ask.op} before start")
            (self._env.pause if ask.op == "pause" else self._env.resume)()
            return Answer()
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
        return Answer(text=text, cut=cut, pauses="pause" in env.capabilities)

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


def describe(error: BaseException) -> str:
    """One line: type, message, and the foreign line of code that raised it."""
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
