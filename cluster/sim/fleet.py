"""The ranks of a simulation: who holds which role, and what each one waits for. Used by world.py."""

from cluster.messages import RankRow
from cluster.sim.scenario import Result

GENERATOR, SCORER, LEARNER, SPARE = "generator", "scorer", "learner", "spare"
BUSY = ""


class Rank:
    """One rank. ``cause`` is what it waits for since ``since``; empty while it works."""

    __slots__ = ("cause", "index", "lent", "lost", "role", "serving", "since")

    def __init__(self, index: int, role: str) -> None:
        self.index = index
        self.role = role
        self.lost = False
        self.serving = True  # False while it switches, and while it is lost
        self.lent = False  # a learner that generates for a while
        self.cause = BUSY
        self.since = 0.0


class Fleet:
    """Roles by rank and rank-seconds by (role, cause); cause "" is work."""

    def __init__(self, generators: int, learners: int, scorers: int, result: Result, trace: bool) -> None:
        roles = [LEARNER] * learners + [GENERATOR] * generators + [SCORER] * scorers
        self.ranks = [Rank(index, role) for index, role in enumerate(roles)]
        self.seconds: dict[tuple[str, str], float] = {}
        self._result = result
        self._trace = trace
        for rank in self.ranks:
            result.roles.append((0.0, rank.index, rank.role))

    def of(self, role: str) -> list[Rank]:
        """Live ranks with a role, lent ones under the one that they were lent from."""
        return [rank for rank in self.ranks if rank.role == role and not rank.lost]

    def counts(self) -> dict[str, int]:
        """Live ranks by role."""
        counts = {GENERATOR: 0, SCORER: 0, LEARNER: 0, SPARE: 0}
        for rank in self.ranks:
            if not rank.lost:
                counts[rank.role] += 1
        return counts

    def rows(self) -> list[RankRow]:
        """As the rank machine's helpers want them."""
        return [RankRow(rank.index, rank.role, "", rank.lost) for rank in self.ranks]

    def set(self, rank: Rank, now: float, cause: str) -> None:
        """From now on the rank waits for ``cause``, or works (``BUSY``)."""
        if rank.cause == cause:
            return
        self.close(rank, now)
        rank.cause = cause

    def set_all(self, ranks: list[Rank], now: float, cause: str) -> None:
        """The same for several."""
        for rank in ranks:
            self.set(rank, now, cause)

    def close(self, rank: Rank, now: float) -> None:
        """Book what the rank has done since it last changed."""
        spent = now - rank.since
        if spent > 0.0:
            if not rank.lost:
                role = GENERATOR if rank.lent else rank.role
                key = (role, rank.cause)
                self.seconds[key] = self.seconds.get(key, 0.0) + spent
            if rank.cause and self._trace:
                cause = "lost" if rank.lost else rank.cause
                self._result.waits.append((rank.since, now, rank.index, cause))
        rank.since = now

    def book(self, now: float) -> dict[tuple[str, str], float]:
        """Rank-seconds by (role, cause) up to ``now``."""
        for rank in self.ranks:
            self.close(rank, now)
        return dict(self.seconds)

    def change(self, rank: Rank, now: float, role: str, lent: bool = False) -> None:
        """The rank holds another role from now on (``lent``: it serves ``role`` but keeps its own)."""
        self.close(rank, now)
        if lent:
            rank.lent = role == GENERATOR
        else:
            rank.role, rank.lent = role, False
        self._result.roles.append((now, rank.index, role))

    def lose(self, rank: Rank, now: float) -> None:
        """Its machine is gone."""
        self.close(rank, now)
        rank.lost, rank.lent, rank.serving = True, False, False
        rank.cause = "lost"
        self._result.roles.append((now, rank.index, "lost"))
