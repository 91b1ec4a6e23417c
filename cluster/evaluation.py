"""Bookkeeping of evaluation suites: a population of its own, outside capacity and ledger."""

import asyncio
import math
from dataclasses import dataclass, field

from cluster.messages import EvalEpisode, EvalSummary
from cluster.types import Order

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95% Wilson score interval of a success rate (Wilson 1927); (0, 1) when n is 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + Z95**2 / (2 * n)
    spread = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    scale = 1 + Z95**2 / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass
class _Suite:
    mode: str
    total: int
    started: float
    episodes: dict[str, EvalEpisode] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ended: float = 0.0


class EvalBook:
    """Which evaluation orders wait, which came back."""

    def __init__(self) -> None:
        self._suites: dict[str, _Suite] = {}
        self._waiting: list[Order] = []
        self._orders: dict[str, Order] = {}

    def known(self, suite: str) -> bool:
        """True once ``begin`` was called for the suite."""
        return suite in self._suites

    def begin(self, suite: str, mode: str, orders: list[Order], now: float) -> None:
        """Queue a suite's orders."""
        if not orders:
            raise ValueError(f"evaluation suite {suite!r} has no task")
        self._suites[suite] = _Suite(mode, len(orders), now)
        self._waiting.extend(orders)
        self._orders.update({order.group: order for order in orders})

    def next(self) -> Order | None:
        """The next order to hand out."""
        while self._waiting:
            order = self._waiting.pop(0)
            if order.group in self._orders:  # else its result came while it waited to be done again
                return order
        return None

    def again(self, group: str) -> None:
        """The worker that had this order is gone."""
        if group in self._orders:
            self._waiting.insert(0, self._orders[group])

    def record(self, episode: EvalEpisode, now: float) -> None:
        """Take a result; a second one for the same task is ignored."""
        suite = self._suites.get(episode.suite)
        if suite is None or episode.group in suite.episodes:
            return
        suite.episodes[episode.group] = episode
        self._orders.pop(episode.group, None)
        if len(suite.episodes) == suite.total:
            suite.ended = now
            suite.done.set()

    def episodes(self, suite: str) -> list[EvalEpisode]:
        """Results of a suite so far, in order of task."""
        found = self._suites[suite].episodes
        return [found[group] for group in sorted(found)]

    def progress(self) -> dict[str, tuple[int, int]]:
        """Unfinished suites: (done, total)."""
        return {
            name: (len(s.episodes), s.total)
            for name, s in self._suites.items()
            if not s.done.is_set()
        }

    async def finished(self, suite: str, deadline_s: float) -> EvalSummary:
        """Wait for a suite. Raises TimeoutError naming how many tasks are missing."""
        book = self._suites[suite]
        try:
            async with asyncio.timeout(deadline_s):
                await book.done.wait()
        except TimeoutError:
            missing = book.total - len(book.episodes)
            raise TimeoutError(
                f"evaluation {suite!r}: {missing} of {book.total} tasks missing after {deadline_s:.0f} s"
            ) from None
        return summarise(suite, book.mode, list(book.episodes.values()), book.ended - book.started)


def summarise(suite: str, mode: str, episodes: list[EvalEpisode], seconds: float) -> EvalSummary:
    """Mean over scored episodes; failures are counted, not scored."""
    scored = [e for e in episodes if not e.error]
    n = len(scored)
    successes = sum(e.success for e in scored)
    low, high = wilson(successes, n)
    names = sorted({name for e in scored for name in e.rewards})
    return EvalSummary(
        suite=suite,
        mode=mode,
        tasks=len(episodes),
        success=successes / n if n else 0.0,
        low=low,
        high=high,
        failed=len(episodes) - n,
        turns_mean=sum(e.turns for e in scored) / n if n else 0.0,
        versions=(
            min((e.versions[0] for e in scored), default=0),
            max((e.versions[1] for e in scored), default=0),
        ),
        seconds=seconds,
        rewards={name: sum(e.rewards.get(name, 0.0) for e in scored) / n for name in names},
    )
