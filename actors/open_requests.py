"""What a gate has been asked and has not answered, and whose tasks it plays. Bookkeeping only."""

from collections import Counter
from collections.abc import Iterable

from cluster.types import Request


class Open:
    """A request that has not been answered."""

    __slots__ = ("caller", "deadline", "entered", "request", "since", "task")

    def __init__(self, caller: str, request: Request, since: float, deadline: float) -> None:
        self.caller = caller
        self.request = request
        self.since = since
        self.deadline = deadline  # of the wait for a place
        self.entered = False  # the engine has it, or is about to
        self.task = request.session or f"{caller}/{request.id}"


class OpenRequests:
    """Open requests by name and by task, and the sessions that each caller plays."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Open] = {}
        self._by_task: dict[str, list[Open]] = {}
        self._homes: dict[str, set[str]] = {}  # caller -> its sessions
        self._inside: Counter[str] = Counter()  # requests that the engine has, by caller

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, entry: Open) -> bool:
        return self._by_name.get((entry.caller, entry.request.id)) is entry

    def get(self, caller: str, name: str) -> Open | None:
        """An open request by name."""
        return self._by_name.get((caller, name))

    def all(self) -> list[Open]:
        """Every open request, the oldest first."""
        return list(self._by_name.values())

    def waiting(self) -> list[Open]:
        """Those that have not entered."""
        return [entry for entry in self._by_name.values() if not entry.entered]

    def of_task(self, task: str) -> list[Open]:
        """Those of a task."""
        return list(self._by_task.get(task, ()))

    def inside(self, caller: str | None = None) -> int:
        """How many the engine has, of one caller or of all."""
        return self._inside.total() if caller is None else self._inside[caller]

    def add(self, entry: Open) -> None:
        """A new one."""
        self._by_name[entry.caller, entry.request.id] = entry
        self._by_task.setdefault(entry.task, []).append(entry)

    def enter(self, entry: Open) -> None:
        """The engine gets it."""
        entry.entered = True
        self._inside[entry.caller] += 1

    def remove(self, entry: Open) -> bool:
        """It is open no more; True if it was the last of its task."""
        del self._by_name[entry.caller, entry.request.id]
        if entry.entered:
            self._inside[entry.caller] -= 1
            if not self._inside[entry.caller]:
                del self._inside[entry.caller]
        others = self._by_task[entry.task]
        others.remove(entry)
        if not others:
            del self._by_task[entry.task]
        return not others

    # -- sessions ---------------------------------------------------------------------------

    def play(self, caller: str, session: str) -> None:
        """A caller plays a session from now on."""
        self._homes.setdefault(caller, set()).add(session)

    def leave(self, caller: str, sessions: Iterable[str]) -> list[str]:
        """A caller plays these no more; returns those that no other caller plays (a later attempt)."""
        gone = list(sessions)
        home = self._homes.get(caller)
        if home is not None:
            home.difference_update(gone)
            if not home:
                del self._homes[caller]
        return [name for name in gone if not any(name in other for other in self._homes.values())]

    def sessions(self, caller: str) -> set[str]:
        """What a caller plays."""
        return set(self._homes.get(caller, ()))

    def callers(self) -> list[str]:
        """Who plays anything."""
        return list(self._homes)
