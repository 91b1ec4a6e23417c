"""Scorer ranks of a simulation: segments are scored as turns end, as learner/streaming.py has them scored.

A group *enters* when a turn of it ends and the scorers have room for its prefixes; from then on only its new
tokens are run. One that finds no room waits outside, and is run as whole rows once it is ready. All ranks
work on one request at a time: what waits of groups that are ready goes first, then segments in their order,
up to a micro-batch for each rank. Ranks that come or go, and a pause, void the request under way: it is
made again.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapreplace
from math import ceil

from cluster.sim.scenario import Scenario
from cluster.sim.tasks import Group

After = Callable[[float, Callable[[float, int], None], int], None]


def makespan(rows: list[int], ranks: int) -> int:
    """Tokens of the most loaded rank: longest first, each row to the least loaded one."""
    if len(rows) <= ranks:
        return max(rows, default=0)
    loads = [0] * ranks
    for row in sorted(rows, reverse=True):
        heapreplace(loads, loads[0] + row)
    return max(loads)


class Scorers:
    """``tells(now, cause)`` says what the ranks do (empty: they work); ``scored(now, group)`` hands a ready
    group on when all of it is scored."""

    def __init__(
        self,
        scenario: Scenario,
        ranks: int,
        after: After,
        tells: Callable[[float, str], None],
        scored: Callable[[float, Group], None],
    ) -> None:
        profile = scenario.profile
        self.ranks = ranks
        self.running = False  # decoupled scoring, with ranks to do it
        self.passes = profile.scorer.passes
        self.busy_s = 0.0  # rank-seconds scoring, on ranks of their own
        self._room = profile.generator.kv_tokens  # of prefixes on one rank: it has a generator's memory
        self._limit = profile.learner.micro_tokens
        self._after = after
        self._tells = tells
        self._scored = scored
        self._first: deque[Group] = deque()  # ready ones
        self._later: deque[Group] = deque()
        self._now: list[tuple[Group, int]] = []  # under way: so many tokens of each
        self._generation = 0
        self._inside: dict[int, Group] = {}  # by number
        self._longest = 0  # prefixes of the largest group so far: what one that enters may come to
        self._token_s = profile.scorer.passes / profile.scorer.forward_tok_s if profile.scorer.passes else 0.0

    @property
    def idle(self) -> bool:
        """Nothing is being scored."""
        return not self._now

    def seconds(self, tokens: int) -> float:
        """Of one rank, for so many tokens."""
        return tokens * self._token_s

    def start(self, now: float, ready: list[Group]) -> None:
        """Score from now on; ``ready`` groups, in their order, that have no scores are run first."""
        if not self.ranks or not self.passes:
            return
        self.running = True
        for group in ready:
            self.ready(now, group)
        self._serve(now)

    def pause(self) -> None:
        """Learners score: what waits is left, and prefixes are forgotten."""
        self.running = False
        self._void()
        self._inside.clear()
        self._first.clear()
        self._later.clear()

    def resize(self, now: float, ranks: int) -> None:
        """Ranks came or went."""
        self.ranks = ranks
        self._first.extendleft(reversed(self._void()))
        if not ranks:
            self.pause()
        self._serve(now)

    def turned(self, now: float, group: Group, tokens: int) -> None:
        """A turn of the group has ended: so many new tokens."""
        waited = group.waiting
        group.unscored += tokens
        group.waiting += tokens
        if not self.running:
            return
        if group.number not in self._inside:
            if self._longest * (len(self._inside) + 1) > self._room * self.ranks:
                return
            self._inside[group.number] = group
            waited = 0
        if not waited:
            self._later.append(group)
        if not self._now:
            self._serve(now)

    def ready(self, now: float, group: Group) -> None:
        """No turn of the group will follow."""
        self._longest = max(self._longest, group.train_tokens)
        if not self.running or group.scored:
            return
        if not group.unscored:
            self._end(now, group)
        elif group.waiting:
            self._first.append(group)
            self._serve(now)

    def forget(self, group: Group) -> None:
        """It was dropped: what waits of it is passed over."""
        group.scored = True
        self._inside.pop(group.number, None)

    def _serve(self, now: float) -> None:
        if self._now or not self.ranks:
            return
        rows: list[int] = []
        tokens = 0
        for queue in (self._first, self._later):
            while queue and tokens < self._limit * self.ranks:
                group = queue.popleft()
                if group.scored or not group.waiting:
                    continue
                if group.number in self._inside:  # its trajectories lie on several ranks
                    parts = min(group.members, self.ranks)
                    more = [ceil(group.waiting / parts)] * parts
                else:
                    more = group.rows
                rows += more
                tokens += sum(more)
                self._now.append((group, group.waiting))
                group.waiting = 0
        if not self._now:
            self._tells(now, "data")
            return
        self._tells(now, "")
        self.busy_s += self.seconds(tokens)
        self._after(now + self.seconds(makespan(rows, self.ranks)), self._served, self._generation)

    def _served(self, now: float, generation: int) -> None:
        if generation != self._generation:
            return
        pieces, self._now = self._now, []
        for group, tokens in pieces:
            group.unscored -= tokens
            if not group.left and not group.unscored and not group.scored:
                self._end(now, group)
        self._serve(now)

    def _end(self, now: float, group: Group) -> None:
        group.scored = True
        self._inside.pop(group.number, None)
        self._scored(now, group)

    def _void(self) -> list[Group]:
        """What is under way will not be answered: it waits again. Its groups."""
        self._generation += 1
        pieces, self._now = self._now, []
        for group, tokens in pieces:
            group.waiting += tokens
        return [group for group, _ in pieces]
