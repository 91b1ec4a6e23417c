"""A controller that ends between two journal entries, one of another driver, and its actor's process."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import test_role_changes as changes
from test_fleet import Fakes
from test_role_changes import Job, config, running
from test_role_recovery import ledger, moved

from cluster import elastic
from cluster.errors import StreamFailed
from cluster.memory import MemoryQueue
from cluster.messages import Move, Moved
from deploy import remote

PRIOR_S = 30.0
SCORING_JOB = {"scorers": 2, "learners": 1, "generators": 1, "scorer": {"mode": "auto"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background looks often; moves are expected to take long."""
    monkeypatch.setattr(elastic, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(changes, "COSTS", dict.fromkeys(changes.COSTS, PRIOR_S))


async def die_in(
    job: Job, call: Callable[[], Awaitable[Any]], phase: str, roles: Callable[[Job], bool] = lambda job: True
) -> None:
    """``call`` in a controller that dies before it writes its ledger in ``phase`` with these ``roles``."""
    put, dead = job.queue.put, asyncio.Event()

    async def dying(name: str, raw: bytes) -> None:
        if dead.is_set() or (name == "ranks" and job.controller.elastic.map.phase == phase and roles(job)):
            dead.set()
            await asyncio.Event().wait()
        await put(name, raw)

    job.queue.put = dying  # type: ignore[method-assign]
    calling = asyncio.ensure_future(call())
    await dead.wait()
    await job.kill()
    calling.cancel()
    job.queue.put = put  # type: ignore[method-assign]


async def report(job: Job, move: Move) -> None:
    await job.controller.moved(Moved(move=move.id, ok=True))


async def restart(job: Job, session: str = "") -> None:
    await job.kill()
    await job.start(session)


async def made(job: Job, **target: int) -> Move:
    """A move towards ``target`` that the loop has yet to make."""
    await job.controller.scale(**target)
    move = (await job.until_move()).move
    assert move is not None
    return move


async def until(job: Job, event: str) -> dict[str, Any]:
    while not (found := [fields for name, fields in job.events if name == event]):
        await asyncio.sleep(0.01)
    return found[-1]


def cost(job: Job, kind: str) -> float:
    return job.controller.elastic.machine.switches.cost(kind)


# -- between two entries --------------------------------------------------------------------


async def test_a_generator_that_joins_is_awaited_whenever_the_controller_died() -> None:
    async with running(config(elastic={"prepare_timeout_s": 2.0})) as job:
        await job.table("generator-0", "generator-1")
        job.fakes.missing.add(job.controller.elastic.name("generator", 1))
        move = await made(job, generators=3)
        await die_in(job, lambda: report(job, move), "settled")
        await job.start()
        assert await ledger(job) == [("learner>generator", "begun", None)]
        assert (await until(job, "move_undone"))["move"] == move.id
        assert job.counts() == {"generator": 2, "learner": 1, "spare": 1}


async def test_a_move_that_was_made_is_done_after_a_restart_and_teaches_no_cost() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        move = await made(job, learners=3)
        await die_in(job, lambda: report(job, move), "settled")
        await job.start()
        assert await ledger(job) == [("generator>learner", "done", None)]
        done = await until(job, "move_done")
        assert (done["move"], done["seconds"]) == (move.id, None)
        assert cost(job, "generator>learner") == PRIOR_S
        assert (await made(job, learners=2)).source == "learner", "another move may begin"


async def test_a_move_that_was_committed_and_no_more_is_in_the_ledger() -> None:
    async with running(config(**SCORING_JOB)) as job:
        await job.table("generator-0")
        await die_in(job, lambda: made(job, scorers=1), "committed")
        move = (await job.journal()).move
        assert move is not None
        name = job.controller.elastic.name("generator", move.rank)
        job.fakes.missing.add(name)
        await job.start()
        assert await ledger(job) == [("scorer>generator", "begun", None)], "it is not healthy yet"
        await restart(job)
        job.fakes.missing.clear()
        await until(job, "move_done")
        assert await ledger(job) == [("scorer>generator", "done", None)]
        assert cost(job, "scorer>generator") == PRIOR_S


async def test_a_resize_that_a_restart_fell_into_teaches_no_cost() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        move = await made(job, learners=3)
        await restart(job)
        await job.controller.moved(Moved(move=move.id, ok=True))
        assert await ledger(job) == [("generator>learner", "done", None)]
        assert cost(job, "generator>learner") == PRIOR_S


async def test_a_generator_that_was_given_up_is_not_done_after_a_restart() -> None:
    async with running(config(elastic={"prepare_timeout_s": 0.2})) as job:
        await job.table("generator-0", "generator-1")
        job.fakes.missing.add(job.controller.elastic.name("generator", 1))
        move = await made(job, generators=3)
        await die_in(job, lambda: report(job, move), "settled", lambda job: job.counts().get("spare", 0) > 0)
        await job.start()
        assert await ledger(job) == [("learner>generator", "undone", None)]


async def test_a_kind_that_failed_backs_off_though_the_controller_was_restarted() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        job.step = 100
        await job.barrier()
        move = await made(job, learners=3)
        await restart(job)
        await job.controller.moved(Moved(move=move.id, ok=False, error="out of memory"))
        await restart(job)
        await job.table("generator-0", "generator-1")
        assert [(await job.barrier()).move for _ in range(4)] == [None] * 4


async def test_one_that_joins_is_cleared_though_the_controller_was_restarted_meanwhile() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        await moved(job, learners=3)
        port = job.fakes.ports["generator-1"]
        while not port.cleared:
            await asyncio.sleep(0.01)
        job.fakes.missing.add("generator-1")
        await moved(job, generators=2, learners=2)
        before = len(port.cleared)
        await restart(job)
        job.fakes.missing.clear()
        await job.table("generator-0", "generator-1")
        assert len(port.cleared) == before + 1
        assert not job.fakes.ports["generator-0"].cleared, "what is being played there goes on"


# -- another driver -------------------------------------------------------------------------


async def test_another_driver_does_not_go_on_with_the_last_ones_joining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hours later the recipe's actors are started again: the time between is no switch."""
    async with running(config(learners=1, generators=2)) as job:
        await job.table("generator-0", "generator-1")
        await moved(job, learners=2)
        job.fakes.missing.add("generator-1")
        await moved(job, generators=2)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 5 * 3600)
        job.fakes.missing.clear()
        await restart(job, "another driver")
        await job.table("generator-0", "generator-1")
        states = {kind: state for kind, state, _ in await ledger(job)}
        assert states == {"generator>learner": "done", "learner>generator": "undone"}
        assert cost(job, "learner>generator") == PRIOR_S


# -- the actor's process --------------------------------------------------------------------


class Connection:
    """One connection to the queue of all; it can be cut."""

    def __init__(self, queue: MemoryQueue) -> None:
        self.queue = queue
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            raise StreamFailed("gave no answer")
        return getattr(self.queue, name)

    async def aclose(self) -> None:
        self.cut = True


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """What the controllers of an actor were given, one each; their surroundings are fakes."""
    queue, fakes, given = MemoryQueue(), Fakes(), []

    def connect(*_: Any, **__: Any) -> Connection:
        given.append(Connection(queue))
        return given[-1]

    def leave(code: int) -> None:
        raise Left(code)

    class Tasks:
        task = None

    monkeypatch.setattr(remote, "RedisQueue", connect)
    monkeypatch.setattr(remote, "generator_port", fakes)
    monkeypatch.setattr(remote, "RaySink", lambda *_: None)
    monkeypatch.setattr(remote, "build_tasks", lambda *_: Tasks())
    monkeypatch.setattr(os, "_exit", leave)
    return given


TREE = {"env": {"name": "coin"}, "model": {"path": "/nowhere"}, "generator": {"replicas": 2}}


async def test_a_run_that_fails_ends_the_process_so_that_nobody_asks_the_controller_that_ended(
    connections: list[Connection], tmp_path: Path
) -> None:
    actor = remote.ControllerActor(TREE, "", str(tmp_path))
    run = asyncio.create_task(actor.run())
    first = await actor._live()
    connections[0].cut = True
    first.fleet.notify()
    with pytest.raises(Left):
        await asyncio.wait_for(run, 10.0)


async def test_a_run_that_was_stopped_still_answers_whoever_closes_the_job(
    connections: list[Connection], tmp_path: Path
) -> None:
    actor = remote.ControllerActor(TREE, "", str(tmp_path))
    run = asyncio.create_task(actor.run())
    controller = await actor._live()
    await actor.stop()
    await asyncio.wait_for(run, 10.0)
    assert await asyncio.wait_for(actor._live(), 1.0) is controller


async def test_a_controller_that_cannot_start_says_why(
    connections: list[Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: Any, session: str) -> None:
        raise StreamFailed("no queue")

    monkeypatch.setattr(remote.Controller, "start", start)
    with pytest.raises(StreamFailed, match="no queue"):
        await remote.ControllerActor(TREE, "", str(tmp_path)).run()
