"""The driver's side of elastic ranks, over fakes: nodes that come and go, actors made and ended, deaths."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from cluster import codec
from cluster.config import Config, build
from cluster.errors import ConfigError
from cluster.messages import RankRow, Wanted
from cluster.processes import REPLACED
from cluster.roles import member_name
from deploy import nodes as keeping
from deploy import supervise
from deploy.nodes import Keeper
from deploy.placement import Node, Seat
from deploy.supervise import ComponentFailed, Supervisor
from tests.stubborn import stay


def config(elastic: bool = False) -> Config:
    return build({
        "env": {"name": "coin"}, "model": {"path": "/nowhere"}, "elastic": {"enabled": elastic},
        "generator": {"replicas": 2},
    })  # fmt: skip


class FakeSeats:
    """A cluster of nodes with so many slots each."""

    gpus = False

    def __init__(self, slots: dict[str, int], seats: dict[int | str, str]) -> None:
        self.slots = slots
        self.seats: dict[int | str, Seat] = {name: Seat(name, node) for name, node in seats.items()}
        self.refusing: set[str] = set()

    def nodes(self, now_free: bool = False) -> list[Node]:
        used = [seat.node for seat in self.seats.values()] if now_free else []
        return [Node(name, slots - used.count(name)) for name, slots in self.slots.items()]

    def ranks(self) -> dict[int, str]:
        return {name: seat.node for name, seat in self.seats.items() if isinstance(name, int)}

    def reserve(self, seats: Sequence[Seat], deadline_s: float) -> list[str]:
        self.seats |= {seat.name: seat for seat in seats if seat.node not in self.refusing}
        return sorted({seat.node for seat in seats} & self.refusing)

    def give_up(self, names: Sequence[int | str]) -> None:
        for name in names:
            del self.seats[name]


class FakeMember:
    """An actor that answers once it may."""

    def __init__(self) -> None:
        self.ready = self
        self.may_answer = asyncio.Event()

    async def remote(self) -> bool:
        await self.may_answer.wait()
        return True


class FakeActors:
    """Names that exist, and what was done to them."""

    def __init__(self, seats: FakeSeats, settings: Config, names: Sequence[str]) -> None:
        self.seats = seats
        self.settings = settings
        self.handles: dict[str, Any] = {name: object() for name in names}
        self.log: list[str] = []
        self.may_end = asyncio.Event()

    def rank(self, name: str) -> int:
        role = name.partition("-")[0]
        for rank in self.seats.ranks():
            if member_name(role, rank, self.settings) == name:
                return rank
        raise ValueError(name)

    def members(self, rank: int) -> list[str]:
        names = [member_name(role, rank, self.settings) for role in ("generator", "learner", "scorer")]
        return [name for name in names if name in self.handles]

    async def make_again(self, name: str) -> Any:
        self.log.append(f"make {name}")
        self.handles[name] = FakeMember()
        return self.handles[name]

    async def end(self, name: str, supervisor: Any) -> None:
        del self.handles[name]
        await self.may_end.wait()
        self.log.append(f"end {name}")

    def drop(self, name: str, supervisor: Any) -> None:
        del self.handles[name]
        self.log.append(f"drop {name}")


class FakeSupervisor:
    def __init__(self) -> None:
        self.watched: list[str] = []

    def watch(self, name: str, handle: Any, late: bool) -> None:
        assert late, "a member that fails must not end the job"
        self.watched.append(name)


START = ["controller", "feeder", "generator-0", "generator-1", "learner-0", "worker-0"]


class Rig:
    """A keeper over fakes: ranks 0 and 1 and the worker at home, rank 2 on node b."""

    def __init__(self, elastic: bool = False, usable: Callable[[Node], bool] = lambda node: True) -> None:
        settings = config(elastic)
        self.seats = FakeSeats({"home": 3, "b": 1}, {0: "home", 1: "home", 2: "b", "worker-0": "home"})
        self.actors = FakeActors(self.seats, settings, START)
        self.supervisor = FakeSupervisor()
        self.told: list[tuple[str, Any]] = []
        self.events: list[str] = []
        self.keeper = Keeper(
            settings, self.actors, self.supervisor, self.ask,  # type: ignore[arg-type]
            lambda event, fields: self.events.append(event), usable,
        )  # fmt: skip
        self.keeper._known = set(self.seats.slots)

    async def ask(self, method: str, *arguments: Any, deadline_s: float = 90.0) -> Any:
        if method != "have":
            self.told.append((method, *arguments))
        else:
            self.have = arguments

    async def round(self, *actors: str, workers: int = 1, ranks: int = 3) -> list[str]:
        """One round with these actors wanted (default: those of the start); what was done to actors."""
        named = actors or tuple(name for name in START if name[-1].isdigit() and "worker" not in name)
        self.actors.log.clear()
        await self.keeper.once(Wanted(epoch=1, actors=named, workers=workers, ranks=ranks))
        await asyncio.sleep(0)
        return list(self.actors.log)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plenty, whatever the machine has just now."""
    monkeypatch.setattr(keeping, "MEMORY_FLOOR", 0.0)


async def test_nothing_to_do_costs_nothing() -> None:
    rig = Rig()
    assert await rig.round() == [] and rig.told == [] and rig.events == []
    assert rig.have == (sorted(START), 0), "two of the driver's node's three slots are ranks, one a worker"


async def test_a_lost_nodes_rank_is_given_up_and_comes_back_with_a_node() -> None:
    rig = Rig()
    del rig.seats.slots["b"]
    assert await rig.round() == ["drop generator-1"]
    assert rig.told == [("ranks_lost", [2])]
    assert set(rig.seats.seats) == {0, 1, "worker-0"}
    assert await rig.round("generator-0", "learner-0") == []
    rig.seats.slots["c"] = 4
    assert await rig.round("generator-0", "learner-0") == []
    assert codec.decode(rig.told[1][1], list[RankRow]) == [RankRow(2, "spare", "c")]
    assert rig.told[1][0] == "ranks_joined" and len(rig.told) == 2, "no more than the job should have"
    assert await rig.round() == ["make generator-1"]
    assert rig.supervisor.watched == ["generator-1"]


async def test_a_lost_rank_is_replaced_on_free_slots_of_another_node() -> None:
    rig = Rig()
    rig.seats.slots |= {"c": 1}
    rig.keeper._known.add("c")
    del rig.seats.slots["b"]
    await rig.round("generator-0", "learner-0")
    assert [name for name, *_ in rig.told] == ["ranks_lost", "ranks_joined"]
    assert rig.seats.seats[2].node == "c"


async def test_an_elastic_job_takes_in_all_of_a_node_once() -> None:
    rig = Rig(elastic=True)
    rig.seats.slots["c"] = 3
    await rig.round()
    assert sorted(rig.seats.ranks()) == [0, 1, 2, 3, 4, 5]
    rig.seats.slots["c"] = 5  # somebody else's slots have become free: not a new node
    await rig.round(ranks=6)
    assert len(rig.told) == 1


async def test_a_node_that_cannot_be_used_or_refuses_is_left_alone() -> None:
    rig = Rig(usable=lambda node: node.id != "c")
    rig.seats.slots["c"] = 3
    await rig.round(ranks=4)
    assert rig.told == []
    rig.seats.slots["d"] = 1
    rig.seats.refusing.add("d")
    await rig.round(ranks=4)
    assert rig.told == [] and rig.events == ["seats_refused"]
    rig.seats.refusing.clear()
    await rig.round(ranks=4)
    assert rig.told == [], "it is not asked again at once"


async def test_a_member_is_made_when_wanted_and_stays_when_idle() -> None:
    rig = Rig()
    assert await rig.round("generator-0", "learner-0", "learner-2") == ["make learner-2"]
    assert "generator-1" in rig.actors.handles, "idle and resident"
    assert await rig.round() == []


async def test_a_learner_is_told_when_it_answers_a_generator_when_it_exists() -> None:
    rig = Rig()
    await rig.round("generator-0", "learner-0", "learner-2", "generator-2")
    assert "learner-2" not in rig.have[0]
    rig.actors.handles["learner-2"].may_answer.set()
    await settle()
    await rig.round("generator-0", "learner-0", "learner-2")
    assert "learner-2" in rig.have[0] and "generator-2" in rig.have[0]


async def test_idle_members_are_ended_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MEMORY_FLOOR", 1.1)
    rig = Rig()
    rig.actors.may_end.set()
    assert await rig.round("generator-0", "learner-0") == ["end generator-1"]


async def test_workers_come_and_go_and_one_that_ends_is_not_made_twice() -> None:
    rig = Rig()
    rig.seats.slots["home"] = 4
    assert await rig.round(workers=3) == ["make worker-1", "make worker-2"]
    assert rig.seats.seats["worker-1"].node == "home" and "worker-2" not in rig.seats.seats
    assert rig.events == ["actor_made", "no_free_core", "actor_made"]
    assert await rig.round(workers=1) == []
    assert await rig.round(workers=2) == [], "worker-1 is still being ended"
    rig.actors.may_end.set()
    await settle()
    assert rig.actors.log == ["end worker-1", "end worker-2"]
    assert await rig.round(workers=2) == ["make worker-1"]
    assert "worker-1" in rig.seats.seats


async def test_a_lost_worker_is_made_elsewhere() -> None:
    rig = Rig()
    rig.seats.seats["worker-0"] = Seat("worker-0", "b")
    del rig.seats.slots["b"]
    done = await rig.round("generator-0", "learner-0", ranks=2)
    assert done == ["drop generator-1", "drop worker-0", "make worker-0"]
    assert rig.seats.seats["worker-0"].node == "home"


# -- supervision ------------------------------------------------------------------------------------------


class FakeHandle:
    """An actor whose ``run`` ends as it is told; each call takes the next ending."""

    def __init__(self, *endings: Any) -> None:
        self.endings = list(endings)
        self.runs = 0
        self.run = self
        self.stopping = asyncio.Event()

    def remote(self) -> Awaitable[Any]:
        self.runs += 1
        return self._ended(self.endings.pop(0) if self.endings else None)

    async def _ended(self, ending: Any) -> Any:
        if ending is None:
            await self.stopping.wait()
            return "stopped"
        if isinstance(ending, Exception):
            raise ending
        return ending

    async def stop(self) -> None:
        self.stopping.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """No pauses, and every actor comes back at once; events are collected."""

    async def back(handle: Any) -> bool:
        return True

    monkeypatch.setattr(supervise, "returned", back)
    monkeypatch.setattr(supervise, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(supervise, "REPLACED_PAUSE_S", 0.0)
    return []


def supervisor(events: list[tuple[str, str]], max_restarts: int = 2) -> Supervisor:
    return Supervisor(lambda event, fields: events.append((event, fields["component"])), max_restarts)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_cancellation_that_arrives_with_the_answer_is_not_lost() -> None:
    reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(supervise.answer("controller", lambda: reply, 5.0))
    await asyncio.sleep(0)
    reply.set_result(1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_stopping_names_the_watchers_that_would_not_end(
    quick: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "STOP_S", 0.1)
    leave = asyncio.Event()

    watching = supervisor(quick)
    watching.watch("learner-0", FakeHandle(None))
    watching.adopt("nodes", stay(leave))
    await settle()
    assert await watching.stop() == ["nodes"]
    leave.set()


async def test_a_replaced_process_is_no_death(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    handle = FakeHandle(*[REPLACED] * 9)
    watching.watch("learner-0", handle)
    await settle()
    assert handle.runs == 10 and not quick and not watching.restarts and not watching.failed.done()
    await watching.stop()


async def test_a_late_component_is_tried_for_ever_an_early_one_is_not(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    late = FakeHandle(*[RayActorError()] * 7)
    watching.watch("generator-1", late, late=True)
    await settle()
    assert late.runs == 8 and not watching.failed.done()
    early = FakeHandle(*[RayActorError()] * 7)
    watching.watch("generator-0", early)
    await settle()
    with pytest.raises(ComponentFailed, match="generator-0: died 3 times in a row"):
        watching.failed.result()
    await watching.stop()


async def test_what_is_forgotten_or_told_to_end_is_not_called_again(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    lost, ending = FakeHandle(), FakeHandle()
    watching.watch("generator-1", lost)
    watching.watch("worker-1", ending)
    await settle()
    watching.forget("generator-1")
    assert await watching.retire("worker-1", ending.stop, 5.0)
    lost.stopping.set()
    await settle()
    assert (lost.runs, ending.runs) == (1, 1) and not quick
    watching.watch("worker-1", again := FakeHandle())
    await settle()
    assert again.runs == 1, "the name may be watched anew"
    await watching.stop()


async def test_one_that_does_not_end_in_time_is_reported(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    stuck = FakeHandle()
    watching.watch("worker-1", stuck)
    await settle()

    async def deaf() -> None:
        return None

    assert not await watching.retire("worker-1", deaf, 0.05)
    assert await watching.retire("never-watched", deaf, 0.05)
    await watching.stop()


async def test_a_late_components_config_error_still_ends_the_job(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    error = RayTaskError("run", "traceback", ConfigError("no such profile"))
    watching.watch("generator-1", FakeHandle(error), late=True)
    await settle()
    with pytest.raises(ComponentFailed, match="generator-1: ConfigError: no such profile"):
        watching.failed.result()
    await watching.stop()


class Odd(Exception):
    """Cannot be taken out of a pickle: it needs two arguments and names none to repeat."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


def not_handed_over() -> RayError:
    """What the driver gets when a component raises such an error."""
    error = RayError.from_bytes(RayTaskError("run", "Odd: no luck at sea", Odd("no luck", "sea")).to_bytes())
    assert not isinstance(error, (RayTaskError, RayActorError))
    return error


@pytest.mark.parametrize("error", [not_handed_over(), TaskCancelledError()])
async def test_an_error_that_cannot_be_handed_over_ends_the_job_too(
    quick: list[tuple[str, str]], error: RayError
) -> None:
    watching = supervisor(quick)
    result = watching.run_to_end("feeder", FakeHandle(error))
    await settle()
    assert not result.done()
    with pytest.raises(ComponentFailed, match=f"^feeder: {type(error).__name__}") as failed:
        watching.failed.result()
    assert "\n" not in str(failed.value)
    await watching.stop()


async def test_a_late_components_odd_error_is_one_death_of_many(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    late = FakeHandle(*[not_handed_over()] * 7)
    watching.watch("generator-1", late, late=True)
    await settle()
    assert late.runs == 8 and len(quick) == 7 and not watching.failed.done()
    await watching.stop()


async def test_a_watcher_that_fails_by_itself_ends_the_job(
    quick: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(handle: Any) -> bool:
        raise OSError("no room")

    monkeypatch.setattr(supervise, "returned", broken)
    watching = supervisor(quick)
    watching.watch("worker-0", FakeHandle(RayActorError()))
    await settle()
    with pytest.raises(ComponentFailed, match="worker-0: no room"):
        watching.failed.result()
    await watching.stop()


async def test_who_fails_of_being_told_to_end_does_not_end_the_job(quick: list[tuple[str, str]]) -> None:
    class Starting(FakeHandle):
        async def _ended(self, ending: Any) -> Any:
            await self.stopping.wait()
            raise RayTaskError("run", "traceback", RuntimeError("start failed: closed"))

    watching, starting = supervisor(quick), Starting()
    watching.watch("generator-0", starting)
    await settle()
    assert await watching.retire("generator-0", starting.stop, 5.0)
    await settle()
    assert not watching.failed.done() and not quick
    await watching.stop()


async def test_an_answer_that_is_lost_is_told_with_its_component() -> None:
    async def lost() -> None:
        raise not_handed_over()

    with pytest.raises(ComponentFailed, match="controller: UnserializableException"):
        await supervise.answer("controller", lost, 5.0)


async def test_one_whose_end_cannot_be_told_is_given_up(quick: list[tuple[str, str]]) -> None:
    watching = supervisor(quick)
    watching.watch("worker-1", FakeHandle())
    await settle()

    async def lost() -> None:
        raise TaskCancelledError()

    assert not await watching.retire("worker-1", lost, 5.0)
    await watching.stop()
