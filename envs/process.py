"""The pool's end of an environment process.

Raw sockets with ``add_reader`` rather than streams: a step costs the worker some tens of
microseconds. One request is in flight per process; whatever goes wrong with it (deadline,
crash, nonsense, cancellation) ends that process and no other.
"""

import asyncio
import os
import signal
import socket
from typing import Protocol

import msgspec

from cluster.errors import EnvFailed, EnvTimeout
from envs.child import HEADER, Answer, Ask

TAIL_BYTES = 8192  # kept of stdout and stderr together
REAP_TIMEOUT_S = 2.0  # a killed process is reported ended within this, or its sandbox is killed
_PART = 1 << 18
_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


class _Lost(Exception):
    """The other end closed its socket."""


class Warden(Protocol):
    """Who can end an environment process: the zygote's client."""

    def kill(self, number: int) -> None:
        """Order the end of a process and all that it started."""

    async def reaped(self, process: "Process") -> bool:
        """Whether its end was reported in time."""

    def destroy(self) -> None:
        """Kill the whole sandbox."""


class Tail:
    """The last ``TAIL_BYTES`` of what a process prints, read as it comes and never more kept."""

    def __init__(self, fd: int) -> None:
        self._fd, self._kept = fd, bytearray()
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def text(self) -> str:
        """What is kept, as text; reads first what still lies in the pipe."""
        while self._read():
            continue
        return self._kept.decode("utf-8", "replace").strip()

    def forget(self) -> None:
        """Start anew (another trajectory)."""
        self._kept.clear()

    def close(self) -> None:
        """Stop reading; the descriptor itself belongs to the caller."""
        self._loop.remove_reader(self._fd)

    def _read(self) -> bool:
        try:
            part = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            self._loop.remove_reader(self._fd)
            return False
        self._kept += part
        del self._kept[:-TAIL_BYTES]
        return len(part) == 1 << 16


class Process:
    """One environment process."""

    def __init__(self, zygote: Warden, number: int, sock: socket.socket, output: int, limit: int) -> None:
        self.number = number
        self.broken = False  # not to be used again
        self.isolated = False  # first of its own PID namespace
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # wait status
        self.tail = Tail(output)
        self._zygote, self._sock, self._output, self._limit = zygote, sock, output, limit
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[bytes] | None = None
        self._buffer = bytearray()
        self._unsent = b""
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    async def ask(self, ask: Ask, timeout_s: float) -> Answer:
        """Send one request and await its answer.

        Raises EnvTimeout after ``timeout_s`` seconds (the process has been ended), EnvFailed when
        the process died or sent nonsense. An ``Answer.error`` is the caller's to raise.
        """
        if self.broken:
            raise EnvFailed("the environment process has ended already")
        if self._waiting is not None:
            raise RuntimeError("one request at a time")
        body = _encoder.encode(ask)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting = future
        timer = self._loop.call_later(timeout_s, self._expire, future, f"{ask.op} took over {timeout_s:g} s")
        done = False
        try:
            self._send(HEADER.pack(len(body)) + body)
            answer = _answers.decode(await future)
            done = True
            return answer
        except _Lost:
            raise EnvFailed(f"environment process died in {ask.op}: {await self._obituary()}") from None
        except msgspec.DecodeError as error:
            raise EnvFailed(f"environment process sent nonsense in {ask.op}: {error}") from error
        except EnvTimeout as error:
            await self.end()
            raise EnvTimeout(f"{error}; its process was ended{self.last_lines()}") from None
        finally:
            timer.cancel()
            self._waiting = None
            if not done:
                self.broken = True
                self._zygote.kill(self.number)

    async def end(self) -> None:
        """Kill and await the end; at most ``REAP_TIMEOUT_S``, then the whole sandbox is killed."""
        self.broken = True
        self._zygote.kill(self.number)
        if not await self._zygote.reaped(self):
            self._zygote.destroy()

    def close(self) -> None:
        """Let go of the descriptors."""
        if self._closed:
            return
        self._closed = self.broken = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self.tail.close()
        self._sock.close()
        os.close(self._output)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(_Lost())

    def last_lines(self, count: int = 5) -> str:
        """``; output: ...``, the last lines that the process printed, or nothing."""
        if self._closed:
            return ""
        lines = self.tail.text().splitlines()[-count:]
        return "; output: " + " | ".join(lines)[-1000:] if lines else ""

    async def _obituary(self) -> str:
        if not await self._zygote.reaped(self):
            return "no exit status"
        code = os.waitstatus_to_exitcode(self.exited.result())
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return how + self.last_lines()

    def _expire(self, future: asyncio.Future[bytes], message: str) -> None:
        if not future.done():
            future.set_exception(EnvTimeout(message))

    def _send(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # it died: the reader sees the end and says so
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            part = self._sock.recv(_PART)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._fail(_Lost())
            return
        buffer = self._buffer
        buffer += part
        if len(buffer) < HEADER.size:
            return
        length = HEADER.unpack_from(buffer)[0]
        if length > self._limit:
            self._fail(EnvFailed(f"an answer of {length} bytes exceeds the limit of {self._limit}"))
        elif self._waiting is None or self._waiting.done() or len(buffer) > HEADER.size + length:
            self._fail(EnvFailed("the environment process spoke without being asked"))
        elif len(buffer) == HEADER.size + length:
            self._waiting.set_result(bytes(buffer[HEADER.size :]))
            buffer.clear()

    def _fail(self, error: Exception) -> None:
        self.broken = True
        self._loop.remove_reader(self._sock.fileno())
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
