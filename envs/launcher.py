"""The pool's end of a sandbox: launch it, have its zygote fork processes, end it."""

import asyncio
import os
import signal
import socket
from collections import deque

import msgspec

from cluster.config import EnvConfig
from cluster.errors import EnvFailed, EnvTimeout
from envs import sandbox
from envs.child import CONTROL_LIMIT, Control, Limits
from envs.process import REAP_TIMEOUT_S, Process, Tail
from envs.registry import EnvBuilder

_encoder = msgspec.msgpack.Encoder()
_controls = msgspec.msgpack.Decoder(Control)


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
