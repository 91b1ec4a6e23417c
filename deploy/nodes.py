"""Keeps the running job as the controller wants it: actors, ranks, and the nodes below them.

::

    every POLL_S:  controller.wanted() -+-> nodes gone: their ranks are told lost, their actors dropped
                                        +-> ranks short, or a node joined: reserve seats, tell them joined
                                        +-> actors missing: make;  not wanted any more: keep idle or end
                                        +-> controller.have(names, free slots)

Nothing is decided here about roles: the controller says which actors there should be and how many
ranks, this says which there are. The pure parts are ``short_of``, ``numbers`` and ``difference``.

An actor whose rank has another role now stays resident and idle on a CPU, so that the way back is short;
it is ended when memory runs short, and always on CUDA, where it would hold its device's memory.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import psutil
from ray.exceptions import RayError

from cluster import codec
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.messages import RankRow, Wanted
from cluster.roles import SPARE
from deploy.actors import Actors, worker_names
from deploy.placement import Node, Seat, Seats, plan
from deploy.supervise import ComponentFailed, Supervisor

POLL_S = 0.5
ASK_S = 5.0
TELL_EVERY_S = 5.0
"""``have`` is repeated this often: a controller that was restarted has forgotten it."""
GRANT_S = 10.0
"""A node that does not grant seats within this is asked again after ``REFUSED_S``."""
REFUSED_S = 30.0
MEMORY_FLOOR = 0.2

Ask = Callable[..., Awaitable[Any]]
Event = Callable[[str, dict[str, Any]], None]


def short_of(wanted: int, living: int, joined_slots: int, elastic: bool) -> int:
    """Ranks to reserve: what is missing, and with elastic roles all that a new node brings."""
    return max(wanted - living, joined_slots if elastic else 0, 0)


def numbers(count: int, living: Collection[int]) -> list[int]:
    """Numbers for new ranks: the lowest that no living rank has (a lost rank's is used again)."""
    return [n for n in range(len(living) + count) if n not in living][:count]


def difference(
    wanted: Collection[str], have: Collection[str], residents: bool
) -> tuple[list[str], list[str]]:
    """(to make, to end): the controller and the feeder always stay, idle members if ``residents``."""
    members = ("generator-", "learner-", "scorer-")
    ending = ("worker-",) if residents else (*members, "worker-")
    there = {name for name in have if name.startswith((*members, "worker-"))}
    surplus = {name for name in there if name.startswith(ending)}
    return sorted(set(wanted) - there), sorted(surplus - set(wanted))


def keep_residents(gpus: bool, available: float) -> bool:
    """Whether idle members stay; ``available`` is the share of the machine's memory that is free."""
    return not gpus and available >= MEMORY_FLOOR


class Keeper:
    """One task of the driver; the only one that changes ``actors`` while the job runs."""

    def __init__(
        self,
        config: Config,
        actors: Actors,
        supervisor: Supervisor,
        ask: Ask,
        event: Event,
        usable: Callable[[Node], bool] = lambda node: True,
    ) -> None:
        """``ask`` calls a method of the controller; ``usable`` says whether ranks may lie on a node."""
        assert actors.seats is not None
        self.config = config
        self.actors = actors
        self.seats: Seats = actors.seats
        self.supervisor = supervisor
        self.ask = ask
        self.event = event
        self.usable = usable
        self._known: set[str] = set()
        self._refused: dict[str, float] = {}  # node -> when it may be asked again
        self._told: tuple[list[str], float] = ([], 0.0)
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}  # learners and scorers that have not answered yet

    async def run(self) -> None:
        """Until cancelled. Raises ComponentFailed when an actor cannot be made."""
        self._known = {node.id for node in await asyncio.to_thread(self.seats.nodes)}
        await self._surely("located", self.seats.ranks())
        try:
            while True:
                try:
                    wanted = codec.decode(await self._ask("wanted"), Wanted)
                except ComponentFailed:  # no answer: its own supervision deals with that
                    await asyncio.sleep(POLL_S)
                    continue
                await self.once(wanted)
                await asyncio.sleep(POLL_S)
        finally:
            for task in (*self._ending.values(), *self._starting.values()):
                task.cancel()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self.ask(method, *arguments, deadline_s=ASK_S)

    async def once(self, wanted: Wanted) -> None:
        """One round."""
        nodes = await asyncio.to_thread(self.seats.nodes)
        await self._lose({node.id for node in nodes})
        await self._gain(wanted, nodes)
        await self._staff(wanted)
        await self._tell_have()

    # -- nodes and ranks ----------------------------------------------------------------

    async def _lose(self, alive: set[str]) -> None:
        """Nodes that are gone take their seats with them."""
        gone = {name: seat.node for name, seat in self.seats.seats.items() if seat.node not in alive}
        self._known &= alive
        if not gone:
            return
        ranks = sorted(name for name in gone if isinstance(name, int))
        names = [m for rank in ranks for m in self.actors.members(rank)]
        names += [name for name in gone if isinstance(name, str) and name in self.actors.handles]
        for name in names:
            self.actors.drop(name, self.supervisor)
        self.seats.give_up(list(gone))
        self.event("node_lost", {"nodes": sorted(set(gone.values())), "ranks": ranks, "actors": names})
        if ranks:
            await self._surely("ranks_lost", ranks)

    async def _gain(self, wanted: Wanted, nodes: Sequence[Node]) -> None:
        """Reserve the ranks that the job is short of, where there is room."""
        joined = {node.id for node in nodes if self.usable(node)} - self._known
        living = self.seats.ranks()
        if not joined and wanted.ranks <= len(living):
            return
        now = time.monotonic()
        free = await asyncio.to_thread(self.seats.nodes, True)
        room = [n for n in free if self.usable(n) and self._refused.get(n.id, 0.0) <= now]
        brought = sum(node.slots for node in room if node.id in joined)
        self._known |= {node.id for node in room if node.slots > 0}
        short = short_of(wanted.ranks, len(living), brought, self.config.elastic.enabled)
        count = min(short, sum(node.slots for node in room))
        if count <= 0:
            return
        seats = plan(numbers(count, living), [], room, self.seats.gpus)
        await self._reserve(seats)
        ranks = [seat.name for seat in seats if seat.name in self.seats.seats]
        if ranks:
            self.event("ranks_reserved", {"ranks": ranks, "nodes": sorted({s.node for s in seats})})
            rows = [RankRow(seat.name, SPARE, seat.node) for seat in seats if isinstance(seat.name, int)]
            await self._surely("ranks_joined", codec.encode([row for row in rows if row.rank in ranks]))

    async def _reserve(self, seats: Sequence[Seat]) -> None:
        for node in await asyncio.to_thread(self.seats.reserve, seats, GRANT_S):
            self._refused[node] = time.monotonic() + REFUSED_S
            self.event("seats_refused", {"node": node})

    async def _surely(self, method: str, *arguments: Any) -> None:
        """What the controller must learn, however long it takes to come back."""
        await self.ask(method, *arguments)

    # -- actors -------------------------------------------------------------------------

    async def _staff(self, wanted: Wanted) -> None:
        names = {*wanted.actors, *worker_names(wanted.workers)}
        memory = psutil.virtual_memory()
        residents = keep_residents(self.seats.gpus, memory.available / memory.total)
        missing, surplus = difference(names, set(self.actors.handles), residents)
        for name in missing:
            if name in self._ending:
                continue  # wanted again while it is being ended: made anew when it is gone
            if name.startswith("worker-"):
                await self._seat_worker(name)
            elif not self._has_seat(name):
                continue  # its rank was lost meanwhile
            self.event("actor_made", {"actor": name})
            handle = await self.actors.make_again(name)
            self.supervisor.watch(name, handle, late=True)
            if name.startswith(("learner-", "scorer-")):
                self._starting[name] = asyncio.create_task(self._start(name, handle), name=f"start {name}")
        for name in surplus:
            if name not in self._ending:
                self.event("actor_ended", {"actor": name})
                self._ending[name] = asyncio.create_task(self._end(name), name=f"end {name}")

    def _has_seat(self, name: str) -> bool:
        try:
            self.actors.rank(name)
        except ValueError:
            return False
        return True

    async def _seat_worker(self, name: str) -> None:
        """A core for a new worker where one is free; without one it shares the driver's node."""
        if name in self.seats.seats:
            return
        free = [n for n in await asyncio.to_thread(self.seats.nodes, True) if self.usable(n)]
        try:
            seats = plan([], [name], free, self.seats.gpus)
        except ConfigError:
            self.event("no_free_core", {"actor": name})
            return
        await self._reserve(seats)

    async def _end(self, name: str) -> None:
        try:
            await self.actors.end(name, self.supervisor)
            if name.startswith("worker-"):
                self.seats.give_up([name])
        finally:
            self._ending.pop(name, None)

    async def _start(self, name: str, handle: Any) -> None:
        """Wait until it can take up its role (``have`` tells it from then on), or is no more."""
        while name in self.actors.handles and self.actors.handles[name] is handle:
            try:
                async with asyncio.timeout(ASK_S):
                    if await handle.ready.remote():
                        break
            except (RayError, TimeoutError):  # its supervision deals with that
                pass
            await asyncio.sleep(POLL_S)
        if self._starting.get(name) is asyncio.current_task():
            del self._starting[name]

    async def _tell_have(self) -> None:
        names, now = sorted(set(self.actors.handles) - set(self._starting)), time.monotonic()
        told, when = self._told
        if names == told and now - when < TELL_EVERY_S:
            return
        room = [node for node in await asyncio.to_thread(self.seats.nodes, True) if self.usable(node)]
        try:
            await self._ask("have", names, sum(node.slots for node in room))
            self._told = (names, now)
        except ComponentFailed:
            return
