"""A connection to Redis or Valkey that outlives the server: retries, deadlines, replay after a restart.

With ``appendfsync everysec`` a killed server may forget its last moments: each connection keeps its
acknowledged orders of the last ``replay_s`` seconds and sends them again when it meets another incarnation
(run id) of the server, before anything else. So every order must be idempotent. What that server cannot
take yet, because another writer still has to replay an admission, goes before any later order; until it is
settled nothing is forgotten here, as the server may be killed once more.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoScriptError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.errors import StreamFailed

T = TypeVar("T")
Command = tuple[Any, ...]

log = logging.getLogger(__name__)

CONSUMERS = "feeders"
SOCKET_TIMEOUT_S = 15.0
SETTLE_S = 10.0  # after a restart, how long an order may wait for another writer's replay
_TRANSIENT = ("BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "NOGROUP", "UNBLOCKED")


def _load_scripts() -> dict[str, tuple[str, str]]:
    """Name -> (sha1, text) of every script, each with ``common.lua`` before it."""
    folder = Path(__file__).parent / "lua"
    common = (folder / "common.lua").read_text()
    texts = {p.stem: f"{common}\n{p.read_text()}" for p in folder.glob("*.lua") if p.stem != "common"}
    return {n: (sha1(t.encode(), usedforsecurity=False).hexdigest(), t) for n, t in texts.items()}


SCRIPTS = _load_scripts()


def without_password(url: str) -> str:
    """``redis://:secret@host:1/0`` -> ``redis://host:1/0``: what may be shown."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Link:
    """A connection that outlives the server: retries with a deadline, replays after a restart."""

    def __init__(self, url: str, base: str, replay_s: float, deadline_s: float, first_s: float) -> None:
        self.shown = without_password(url)
        self._base = base
        self._replay_s, self.deadline_s, self._first_s = replay_s, deadline_s, first_s
        self._run_id = ""
        self._meeting = asyncio.Lock()  # one connection replays while the others wait
        self._restarted = float("-inf")
        self._ring: deque[tuple[float, Command]] = deque()  # acknowledged orders, oldest first
        self._unsettled: list[Command] = []  # those of the ring that wait for another writer's replay
        self._ordering = asyncio.Lock()  # one call settles while the others wait
        if url.startswith("valkey"):
            url = "redis" + url.removeprefix("valkey")
        try:
            self.client: Any = Redis.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),  # ``call`` retries, within a deadline
                socket_connect_timeout=2.0,
                socket_timeout=SOCKET_TIMEOUT_S,
                redis_connect_func=self._on_connect,
            )
        except ValueError as error:
            raise StreamFailed(f"queue URL {self.shown!r} is not valid: {error}") from error

    async def _on_connect(self, connection: Any) -> None:
        """Runs on every new connection, before its first command."""
        try:
            await connection.on_connect()
            async with self._meeting:
                await connection.send_command("INFO", "server")
                info: bytes = await connection.read_response()
                run_id = info.partition(b"run_id:")[2].split(b"\r\n")[0].decode()
                if run_id != self._run_id:
                    await self._meet(connection)
                    self._run_id = run_id
        except BaseException:  # a cancelled handshake must not leave an unread reply behind
            await connection.disconnect(nowait=True)
            raise

    async def _meet(self, connection: Any) -> None:
        """First contact with this incarnation of the server: scripts, consumer group, replay."""
        for _, text in SCRIPTS.values():
            await connection.send_command("SCRIPT", "LOAD", text)
            await connection.read_response()
        await connection.send_command("XGROUP", "CREATE", self._base + "ready", CONSUMERS, "0", "MKSTREAM")
        try:
            await connection.read_response()
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        if not self._run_id:
            return
        self._restarted = time.monotonic()
        log.warning("queue server %s restarted: sending %d orders again", self.shown, len(self._ring))
        unsettled: list[Command] = []
        for command in [command for _, command in self._ring]:
            await connection.send_command(*command)
            try:
                reply = await connection.read_response(disconnect_on_error=False)
            except ResponseError as error:
                reply = error
            if _early(reply, bool(unsettled)):
                unsettled.append(command)
            elif isinstance(reply, ResponseError):
                log.warning("replayed order refused by %s: %s", self.shown, reply)
        self._unsettled = unsettled
        self._renew()

    async def _settle(self) -> None:
        """Send again what was waiting for an admission that another writer replays."""
        waiting = self._unsettled
        expired = not self.settling
        unsettled: list[Command] = []
        for command in waiting:
            reply = await self._reply(command)
            if not expired and _early(reply, bool(unsettled)):
                unsettled.append(command)
            elif isinstance(reply, ResponseError) or _early(reply):
                log.error("an order from before the restart of %s is lost: %s", self.shown, reply)
        if self._unsettled is waiting:  # else the server was restarted meanwhile, and replies are outdated
            self._unsettled = unsettled
            if waiting and not unsettled:
                self._renew()

    def _renew(self) -> None:
        """This server may forget what it was told just now."""
        now = time.monotonic()
        self._ring = deque((now, command) for _, command in self._ring)

    async def _reply(self, command: Command) -> Any:
        try:
            return await self.client.execute_command(*command)
        except NoScriptError:
            raise
        except ResponseError as error:
            return error

    @property
    def settling(self) -> bool:
        """Whether a restart is so recent that other writers may still be replaying."""
        return time.monotonic() - self._restarted < SETTLE_S

    async def call(self, send: Callable[[Any], Awaitable[T]]) -> T:
        """Send until it is answered.

        Raises StreamFailed at the deadline or at a refusal, KeyError and ValueError as scripts say.
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        limit = self.deadline_s if self._run_id else min(self._first_s, self.deadline_s)
        deadline = time.monotonic() + limit
        delay = 0.02
        while True:
            last: Exception | None = None
            try:
                async with asyncio.timeout(max(0.05, deadline - time.monotonic())):
                    if self._unsettled:
                        async with self._ordering:
                            await self._settle()
                    answer = await send(self.client)
            except (ResponseError, RedisConnectionError, RedisTimeoutError, OSError) as error:
                last = error  # OSError: TimeoutError too
            # Before anything else: the client swallows one in twenty-five at a blocking read.
            if task.cancelling() > cancelled:
                raise asyncio.CancelledError
            if last is None:
                return answer
            await self._weigh(last)
            if time.monotonic() + delay > deadline:
                raise StreamFailed(
                    f"queue server {self.shown} gave no answer for {limit:g} s: "
                    f"{str(last) or type(last).__name__}"
                ) from last
            await asyncio.sleep(delay * random.uniform(0.7, 1.3))
            delay = min(2 * delay, 1.0)

    async def _weigh(self, error: Exception) -> None:
        """Return if the command may be sent again, raise otherwise."""
        if isinstance(error, AuthenticationError | AuthorizationError):
            raise StreamFailed(f"queue server {self.shown} refused the login: {error}") from error
        if not isinstance(error, ResponseError):
            return
        code, _, text = str(error).partition(" ")
        code = error.status_code or code
        if isinstance(error, NoScriptError) or code == "NOGROUP":
            self._run_id = self._run_id and "emptied"  # someone emptied the server: meet it anew
            await self.client.connection_pool.disconnect()
        elif code == "UNKNOWN":
            if not self.settling:
                raise KeyError(text) from error
        elif code == "INVALID":
            if not self._unsettled:  # else it may only lack what was ordered before it
                raise ValueError(text) from error
        elif code not in _TRANSIENT:
            raise StreamFailed(f"queue server {self.shown} refused an order: {error}") from error

    async def order(self, *command: Any) -> Any:
        """An idempotent write: sent until acknowledged, then remembered for a replay."""
        reply = await self.call(lambda client: client.execute_command(*command))
        now = time.monotonic()
        self._ring.append((now, command))
        while not self._unsettled and self._ring[0][0] < now - self._replay_s:
            self._ring.popleft()
        return reply


def _early(reply: Any, others: bool = False) -> bool:
    """Whether a replayed order speaks of a group or attempt that is not (yet) known.

    With ``others``, earlier orders wait for theirs: then it may also lack those.
    """
    if isinstance(reply, ResponseError):
        return str(reply).startswith(("UNKNOWN", "INVALID") if others else "UNKNOWN")
    return isinstance(reply, list) and len(reply) == 2 and bool(reply[1])
