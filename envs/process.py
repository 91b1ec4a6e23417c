"""The pool's end of a sandbox: its zygote, and the environment processes that it forks.

Raw sockets with ``add_reader`` rather than streams: a step costs the worker some tens of
microseconds. One request is in flight per process; whatever goes wrong with it (deadline,
crash, nonsense, cancellation) ends that process and no other.
"""

import asyncio
import os
import signal
import socket
from collections import deque

import msgspec

from cluster.config import EnvConfig
from cluster.errors import EnvFailed, EnvTimeout
from envs import sandbox
from envs.child import CONTROL_LIMIT, HEADER, Answer, Ask, Control, Limits
from envs.registry import EnvBuilder

TAIL_BYTES = 8192  # kept of stdout and stderr together
REAP_TIMEOUT_S = 2.0  # a killed process is reported ended within this, or its sandbox is killed
_PART = 1 << 18
_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_controls = msgspec.msgpack.Decoder(Control)


class _Lost(Exception):
    """The other end closed its socket."""


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

    def __init__(
        self, zygote: "ZygoteClient", number: int, sock: socket.socket, output: int, limit: int
    ) -> None:
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


class ZygoteClient:
    """One sandbox with its zygote, seen from the pool."""

    def __init__(self, box: sandbox.Sandbox, frame_limit: int) -> None:
        self.alive = True
        self._closed = False
        self._box, self._frame_limit = box, frame_limit
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, Process] = {}
        self._spawning: dict[int, asyncio.Future[Control]] = {}
        self._number = 0
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()  # packets and descriptors to pass
        self._tail = Tail(box.output)
        self._ready: asyncio.Future[Control] = self._loop.create_future()
        self._loop.add_reader(box.control.fileno(), self._readable)

    @classmethod
    async def start(cls, builder: EnvBuilder, config: EnvConfig, namespaces: bool = True) -> "ZygoteClient":
        """Launch a sandbox and import the environment in it, within ``config.start_timeout_s``.

        Raises ConfigError when the backend cannot run here, EnvFailed when the import fails.
        """
        box = await sandbox.launch(builder, config.sandbox)
        self = cls(box, 4 * config.output_limit + (1 << 20))
        limits = Limits(config.memory_mb, max(config.output_limit, 128), namespaces=namespaces)
        try:
            self._post(Control("setup", builder=builder, limits=limits))
            async with asyncio.timeout(config.start_timeout_s):
                said = await self._ready
            if said.op != "ready":
                raise EnvFailed(said.error)
        except TimeoutError:
            message = f"importing {builder.path} took over {config.start_timeout_s:g} s"
            self.destroy()
            await self.close()
            raise EnvTimeout(message) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def spawn(self, timeout_s: float) -> Process:
        """Fork an environment process. Raises EnvFailed or EnvTimeout."""
        self._number += 1
        number = self._number
        ours, theirs = socket.socketpair()
        output_r, output_w = os.pipe()
        process = Process(self, number, ours, output_r, self._frame_limit)
        answer: asyncio.Future[Control] = self._loop.create_future()
        self._spawning[number] = answer
        self._processes[number] = process
        try:
            self._post(Control("spawn", number), theirs.detach(), output_w)
            async with asyncio.timeout(timeout_s):
                said = await answer
            if said.op != "spawned":
                raise EnvFailed(f"cannot fork an environment process: {said.error or 'it ended at once'}")
            process.isolated = said.isolated
        except TimeoutError:
            self._discard(process)
            raise EnvTimeout(f"forking an environment process took over {timeout_s:g} s") from None
        except BaseException:
            self._discard(process)
            raise
        finally:
            self._spawning.pop(number, None)
        return process

    def kill(self, number: int) -> None:
        """Ask the zygote to end a process and all that it started. Nothing for one ended already."""
        process = self._processes.get(number)
        if self.alive and process is not None and not process.exited.done():
            self._post(Control("kill", number))

    async def reaped(self, process: Process) -> bool:
        """Whether the process's end was reported within ``REAP_TIMEOUT_S``."""
        return bool((await asyncio.wait({process.exited}, timeout=REAP_TIMEOUT_S))[0])

    def destroy(self) -> None:
        """SIGKILL to the sandbox, with everything inside."""
        self.alive = False
        self._box.kill()

    async def close(self) -> None:
        """End the sandbox and wait for it; processes still in use fail with "process died"."""
        if self._closed:
            return
        self._closed, self.alive = True, False
        self._loop.remove_reader(self._box.control.fileno())
        self._drop_outbox()
        self._tail.close()
        await self._box.end()
        self._bury()

    def _post(self, order: Control, *descriptors: int) -> None:
        """Send a packet, later if the kernel's queue is full. Descriptors are closed once passed."""
        self._outbox.append((_encoder.encode(order), descriptors))
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        control = self._box.control
        while self._outbox:
            packet, descriptors = self._outbox[0]
            try:
                socket.send_fds(control, [packet], list(descriptors))
            except BlockingIOError:
                self._loop.add_writer(control.fileno(), self._flush)
                return
            except OSError:  # the zygote is gone, its processes too: the reader sees the end and says so
                self._drop_outbox()
                return
            self._outbox.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        self._loop.remove_writer(control.fileno())

    def _drop_outbox(self) -> None:
        self._loop.remove_writer(self._box.control.fileno())
        while self._outbox:
            for descriptor in self._outbox.popleft()[1]:
                os.close(descriptor)

    def _discard(self, process: Process) -> None:
        self.kill(process.number)
        process.close()

    def _readable(self) -> None:
        try:
            raw = self._box.control.recv(CONTROL_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if raw:
            self._hear(_controls.decode(raw))
            return
        self.alive = False
        self._loop.remove_reader(self._box.control.fileno())
        if not self._ready.done():
            lines = " | ".join(self._tail.text().splitlines()[-5:])
            self._ready.set_result(Control("broken", error=f"the sandbox ended at its start: {lines}"))
        self._bury()

    def _hear(self, said: Control) -> None:
        if said.op in ("ready", "broken"):
            if not self._ready.done():
                self._ready.set_result(said)
            return
        spawning = self._spawning.get(said.process)
        if spawning is not None and not spawning.done():
            spawning.set_result(said)
        if said.op == "exited":
            process = self._processes.pop(said.process, None)
            if process is not None and not process.exited.done():
                process.exited.set_result(said.status)

    def _bury(self) -> None:
        """The zygote is gone, and so are its processes, by SIGKILL."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.broken = True
            if not process.exited.done():
                process.exited.set_result(signal.SIGKILL)
        for answer in self._spawning.values():
            if not answer.done():
                answer.set_result(Control("exited", error="the sandbox ended"))
