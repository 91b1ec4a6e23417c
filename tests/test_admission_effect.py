"""What admission by task buys over admission by request, on a small model of one rank.

The model: prompts are computed one at a time at a fixed rate, tokens are sampled at a fixed pace, and what is
not used by running requests is a least-recently-used prefix cache.
"""

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest

from cluster.admission import Admission, Limits

CAPACITY = 120_000
PREFILL_TOK_S = 8000.0
TOKEN_S = 0.02


@dataclass
class Episode:
    """One member: (tokens added before the turn, tokens sampled, seconds of the environment after it)."""

    name: str
    group: str
    turns: list[tuple[int, int, float]]
    at: int = 0
    tokens: int = 0


@dataclass
class Rank:
    """Events of one rank under a policy; ``run`` plays ``groups`` with ``live`` of them at a time."""

    policy: str
    groups: list[list[Episode]]
    live: int
    told: bool = True  # the machine hears how full groups are
    now: float = 0.0
    events: list[tuple[float, int, str, Episode]] = field(default_factory=list)
    serial: int = 0
    queue: deque[Episode] = field(default_factory=deque)
    used: int = 0
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    prefill_free: float = 0.0
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def run(self) -> tuple[float, float]:
        """(prefix hit rate, mean seconds from a group's begin to its end)."""
        self.machine = Admission(
            Limits(capacity_tokens=CAPACITY, prefill_tok_s=PREFILL_TOK_S, policy=self.policy)  # type: ignore[arg-type]
        )
        pending = deque(self.groups)
        left = {group[0].group: len(group) for group in self.groups}
        began: dict[str, float] = {}
        spans: list[float] = []
        live = 0
        while pending or live:
            while pending and live < self.live:
                live += 1
                for episode in pending.popleft():
                    began[episode.group] = self.now
                    self.ask(episode)
            self.decide()
            due = self.machine.next_decision(self.now)
            if due is not None and (not self.events or due < self.events[0][0]):
                self.now = due
                continue
            self.now, _, what, episode = heappop(self.events)
            if what == "returns":
                self.ask(episode)
                continue
            self.finish(episode)
            if episode.at == len(episode.turns):
                self.machine.ended(episode.name, self.now)
                left[episode.group] -= 1
                if self.told:
                    done = 1 - left[episode.group] / 8
                    self.machine.group_progress(episode.group, done, self.now)
                if left[episode.group] == 0:
                    live -= 1
                    spans.append(self.now - began[episode.group])
        return self.hit_tokens / self.prompt_tokens, sum(spans) / len(spans)

    def push(self, after: float, what: str, episode: Episode) -> None:
        self.serial += 1
        heappush(self.events, (self.now + after, self.serial, what, episode))

    def ask(self, episode: Episode) -> None:
        added, out, _ = episode.turns[episode.at]
        episode.tokens += added
        self.machine.ask(
            episode.name, group=episode.group, tokens=episode.tokens, growth=max(out, 512), now=self.now
        )

    def decide(self) -> None:
        by_name = {e.name: e for group in self.groups for e in group}
        self.queue.extend(by_name[name] for name in self.machine.decide(self.now).start)
        while self.queue:
            episode = self.queue[0]
            need = episode.tokens + episode.turns[episode.at][1]
            if self.used + need > CAPACITY and self.used:
                return
            self.queue.popleft()
            hit = min(self.cache.pop(episode.name, 0), episode.tokens - 1)
            self.used += need
            while self.used + sum(self.cache.values()) > CAPACITY and self.cache:
                name, tokens = next(iter(self.cache.items()))
                excess = self.used + sum(self.cache.values()) - CAPACITY
                if tokens > excess:
                    self.cache[name] = tokens - excess
                else:
                    del self.cache[name]
            self.prompt_tokens += episode.tokens
            self.hit_tokens += hit
            self.prefill_free = max(self.now, self.prefill_free) + (episode.tokens - hit) / PREFILL_TOK_S
            out = episode.turns[episode.at][1]
            self.push(self.prefill_free - self.now + out * TOKEN_S, "sampled", episode)

    def finish(self, episode: Episode) -> None:
        _, out, env_s = episode.turns[episode.at]
        self.used -= episode.tokens + out
        episode.tokens += out
        self.cache[episode.name] = episode.tokens
        episode.at += 1
        self.machine.turn_ended(episode.name, episode.tokens, self.now, "tool")
        if episode.at < len(episode.turns):
            self.push(env_s, "returns", episode)


def workload(seed: int, groups: int, mean_turns: float, sigma: float) -> list[list[Episode]]:
    """Groups of 8 with lognormal turn counts (``sigma``), environment waits and outputs."""
    rng = random.Random(seed)

    def episode(group: int, member: int) -> Episode:
        turns = max(1, min(60, round(rng.lognormvariate(0.0, sigma) * mean_turns)))
        return Episode(
            f"g{group}.{member}",
            f"g{group}",
            [
                (
                    1200 if turn == 0 else rng.randint(100, 500),
                    min(512, 20 + int(rng.lognormvariate(4.0, 0.7))),
                    rng.lognormvariate(0.7, 1.0),
                )
                for turn in range(turns)
            ],
        )

    return [[episode(group, member) for member in range(8)] for group in range(groups)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prefixes_are_hit_when_the_footprint_is_twice_the_memory(seed: int) -> None:
    # 8 groups of 8 with about 4k tokens each at a time: 250k tokens in 120k of memory
    by_request, _ = Rank("request", workload(seed, 24, 14, 0.4), live=8).run()
    by_task, _ = Rank("task", workload(seed, 24, 14, 0.4), live=8).run()
    assert by_task >= 1.3 * by_request


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_groups_end_sooner_under_heavy_tailed_turns(seed: int) -> None:
    _, by_request = Rank("request", workload(seed, 24, 10, 1.0), live=8).run()
    _, by_task = Rank("task", workload(seed, 24, 10, 1.0), live=8).run()
    assert by_task < by_request


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_full_groups_first_costs_no_time_over_first_come_first_served(seed: int, sigma: float) -> None:
    # With heavy tails what a nearly full group lacks is long: the order hardly changes the mean.
    _, fifo = Rank("task", workload(seed, 24, 10, sigma), live=8, told=False).run()
    _, by_group = Rank("task", workload(seed, 24, 10, sigma), live=8).run()
    assert by_group <= 1.05 * fifo
