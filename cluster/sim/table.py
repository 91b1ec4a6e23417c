"""The generators as askers see them: where a task's next turn is asked for.

As in actors/router.py: the generator that holds the task's prefix, else the one where its group is unless
that is clearly busier, else the least busy (or, admitting by task, the one with most room).
"""

from cluster.affinity import GROUP_SLACK, place
from cluster.sim.tasks import Generator, Task

REPORT_EVERY_S = 1.0  # room, to the routers
AWAY = 1 << 60  # load of a generator that is not in the table


class Table:
    """Generators by rank. ``rooms``: their ledgers tell what they could promise. ``loose``: a task does not
    stick to the generator that holds its prefix if that is clearly busier."""

    def __init__(self, rooms: bool, loose: bool) -> None:
        self.generators: dict[int, Generator] = {}
        self.loads: list[int] = []  # open requests by rank
        self.rooms: list[int] = []  # tokens that its ledger could promise, by rank, as last reported
        self.loose = loose
        self._by_room = rooms
        self._reported_at = 0.0

    def enter(self, generator: Generator) -> None:
        """It may be asked from now on."""
        index, admission = generator.index, generator.admission
        self.generators[index] = generator
        if index >= len(self.loads):
            more = index + 1 - len(self.loads)
            self.loads += [AWAY] * more
            self.rooms += [-AWAY] * more
        self.loads[index] = 0
        self.rooms[index] = admission.figures().free if admission is not None else 0

    def leave(self, index: int) -> Generator:
        """It is asked no more."""
        self.loads[index], self.rooms[index] = AWAY, -AWAY
        return self.generators.pop(index)

    def crowded(self, generator: Generator) -> bool:
        """Clearly busier than the least busy one."""
        return self.loads[generator.index] > min(self.loads) + GROUP_SLACK

    def choose(self, now: float, task: Task, need: int) -> Generator | None:
        """Whom to ask for a turn that may need so many tokens; None if there is nobody."""
        last, loads = task.last, self.loads
        if last is not None and last.alive and not (self.loose and self.crowded(last)):
            return last
        if not self.generators:
            return None
        rooms = None
        if self._by_room:
            self._refresh(now)
            rooms = self.rooms
        home = task.group.home
        at = place(loads, rooms, need, home.index if home is not None and home.alive else -1)
        task.group.home = generator = self.generators[at]
        return generator

    def elsewhere(self, now: float, generator: Generator, need: int) -> Generator | None:
        """The generator with most room besides this one, if that is enough."""
        self._refresh(now)
        rooms = self.rooms
        own, rooms[generator.index] = rooms[generator.index], -AWAY
        room = max(rooms)
        at = rooms.index(room)
        rooms[generator.index] = own
        return self.generators[at] if room >= need else None

    def _refresh(self, now: float) -> None:
        """Rooms as routers know them: at most a second old."""
        if now < self._reported_at + REPORT_EVERY_S:
            return
        self._reported_at = now
        for index, generator in self.generators.items():
            assert generator.admission is not None
            self.rooms[index] = generator.admission.figures().free
