"""What a connection to the queue server keeps, and in which order, through restarts and cancellations."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from cluster.link import Command, Link

REPLAY_S = 3.0


class Server:
    """One group: another writer admits it, then it is ended, then made ready; ``other`` always works."""

    def __init__(self) -> None:
        self.run = 0
        self.before: Callable[[Command], None] = lambda _: None
        self.restart()

    def restart(self) -> None:
        """Another incarnation, which knows nothing."""
        self.run += 1
        self.admitted = False
        self.done: list[str] = []

    def answer(self, command: Command) -> Any:
        name = command[0]
        if name == "INFO":
            return b"run_id:%d\r\n" % self.run
        if name in ("SCRIPT", "XGROUP"):
            return b"OK"
        self.before(command)
        if name != "other" and not self.admitted:
            raise ResponseError("UNKNOWN group a attempt 0 was never ordered")
        if name == "ready" and "end" not in self.done:
            raise ResponseError("INVALID member of group a has not ended")
        self.done.append(name)
        return 1

    async def execute_command(self, *command: Any) -> Any:
        """As a client."""
        await asyncio.sleep(0)
        return self.answer(command)


class Connection:
    """A new connection, as the client hands it to ``Link``."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def on_connect(self) -> None:
        """Nothing to say."""

    async def disconnect(self, nowait: bool = False) -> None:
        """Nothing to close."""

    async def send_command(self, *command: Any) -> None:
        self.sent = command

    async def read_response(self, disconnect_on_error: bool = True) -> Any:
        await asyncio.sleep(0)
        return self.server.answer(self.sent)


class Clock:
    """Stands in for the module ``time``."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("cluster.link.time", clock)
    return clock


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def link(server: Server) -> Link:
    made = Link("redis://127.0.0.1:1/0", "{test:run}:", REPLAY_S, 5.0, 5.0)
    made.client = SimpleNamespace(execute_command=server.execute_command)
    await made._on_connect(Connection(server))
    server.admitted = True
    return made


async def meet_again(link: Link, server: Server) -> None:
    server.restart()
    await link._on_connect(Connection(server))


async def test_what_waits_for_an_admission_outlives_a_second_restart(
    clock: Clock, server: Server, link: Link
) -> None:
    await link.order("end")
    await meet_again(link, server)
    clock.now += REPLAY_S + 1
    await link.order("other")
    await meet_again(link, server)
    server.admitted = True
    await link.order("ready")
    assert server.done == ["other", "end", "ready"]


async def test_what_was_replayed_is_replayed_after_a_second_restart(
    clock: Clock, server: Server, link: Link
) -> None:
    await link.order("other")
    clock.now += REPLAY_S + 1
    await meet_again(link, server)
    await link.order("other")
    await meet_again(link, server)
    assert server.done == ["other", "other"]


async def test_what_was_settled_is_replayed_after_a_second_restart_until_it_is_old(
    clock: Clock, server: Server, link: Link
) -> None:
    await link.order("end")
    await meet_again(link, server)
    clock.now += REPLAY_S + 1
    server.admitted = True
    await link.order("other")
    assert server.done == ["end", "other"]
    server.before = lambda _: setattr(server, "admitted", True)
    await meet_again(link, server)
    assert server.done == ["end", "other"]
    clock.now += REPLAY_S + 1
    await link.order("other")
    await meet_again(link, server)
    assert server.done == ["other"]


async def test_a_restart_while_one_settles_leaves_what_the_new_server_lacks(
    clock: Clock, server: Server, link: Link
) -> None:
    await link.order("end")
    await link.order("end", "again")
    await meet_again(link, server)
    server.admitted = True

    async def execute(*command: Any) -> Any:
        reply = await server.execute_command(*command)
        if server.run == 2 and command == ("end", "again"):
            await meet_again(link, server)
        return reply

    link.client.execute_command = execute
    await link.order("other")
    server.admitted = True
    await link.order("ready")
    assert server.done == ["other", "end", "end", "ready"]


async def test_a_settling_that_fails_keeps_what_a_newer_replay_left(server: Server, link: Link) -> None:
    await link.order("end")
    await meet_again(link, server)
    link._ring.append((0.0, ("end", "again")))

    async def execute(*command: Any) -> Any:
        link.client.execute_command = server.execute_command
        await meet_again(link, server)
        raise RedisConnectionError("closed")

    link.client.execute_command = execute
    await link.order("other")
    assert link._unsettled == [("end",), ("end", "again")]


async def test_no_order_overtakes_what_is_being_settled(server: Server, link: Link) -> None:
    await link.order("end")
    await meet_again(link, server)
    server.admitted = True
    settling, goes_on = asyncio.Event(), asyncio.Event()

    async def execute(*command: Any) -> Any:
        if command == ("end",):
            settling.set()
            await goes_on.wait()
        return server.answer(command)

    link.client.execute_command = execute
    first = asyncio.create_task(link.order("other"))
    await asyncio.wait_for(settling.wait(), 5.0)
    second = asyncio.create_task(link.order("ready"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert server.done == []
    goes_on.set()
    await asyncio.wait_for(asyncio.gather(first, second), 5.0)
    assert server.done[0] == "end" and sorted(server.done[1:]) == ["other", "ready"]


def admit_at(server: Server, name: str) -> None:
    """The other writer replays the admission just before the next ``name``."""

    def admit(command: Command) -> None:
        server.admitted = server.admitted or command[0] == name

    server.before = admit


async def test_a_replayed_order_that_lacks_one_that_waits_is_not_lost(server: Server, link: Link) -> None:
    await link.order("end")
    await link.order("ready")
    admit_at(server, "ready")
    await meet_again(link, server)
    assert server.done == []
    await link.order("other")
    assert server.done == ["end", "ready", "other"]


async def test_a_settled_order_that_lacks_one_that_waits_is_not_lost(server: Server, link: Link) -> None:
    await link.order("end")
    await link.order("ready")
    await meet_again(link, server)
    admit_at(server, "ready")
    await link.order("other")
    await link.order("other")
    assert server.done == ["other", "end", "ready", "other"]


async def test_an_order_that_lacks_one_that_waits_is_not_refused(server: Server, link: Link) -> None:
    await link.order("end")
    await meet_again(link, server)
    admit_at(server, "ready")
    await link.order("ready")
    assert server.done == ["end", "ready"]


async def test_what_nobody_admits_in_time_is_reported(
    clock: Clock, server: Server, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    await link.order("end")
    await meet_again(link, server)
    clock.now += 11.0
    await link.order("other")
    assert "is lost: UNKNOWN group a attempt 0" in caplog.text
    with pytest.raises(KeyError):
        await link.order("ready")


@pytest.mark.parametrize(
    "reply",
    [
        ResponseError("UNKNOWN group a attempt 0 was never ordered"),
        ResponseError("INVALID member of group a has not ended"),
        ResponseError("OOM no memory"),
        AuthenticationError("wrong password"),
        RedisConnectionError("closed"),
        None,
    ],
)
async def test_a_cancellation_that_the_client_swallows_ends_the_call_whatever_the_reply(
    link: Link, reply: Exception | None
) -> None:
    sending = asyncio.Event()

    async def send(_: Any) -> None:
        sending.set()
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:  # as ``wait_for`` may do in the client
            if reply is not None:
                raise reply from None

    call = asyncio.create_task(link.call(send))
    await sending.wait()
    call.cancel()
    await asyncio.wait({call}, timeout=5.0)
    assert call.cancelled()
