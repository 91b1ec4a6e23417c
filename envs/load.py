"""Load without content: episodes that follow a simulator workload's plan, for timed twins.

The first observation of a group and every later one have exactly the number of tokens that the plan says
(under the tokenizer of ``deploy/tokens.py``, in which each word is one token), every answer says in
``latency_s`` how long it takes, and the episode ends with the plan's last turn. Nobody plays: a timed twin
of a generator (actors/twin.py) begins each reply with the word of the member that it speaks for, ``m3``,
which is how the environment knows whose plan it follows. The reward is a coin thrown by (seed, group,
member), so that groups are seldom constant.
"""

import hashlib
import random
import re
from functools import lru_cache
from typing import NamedTuple

from cluster.errors import ConfigError, EnvFailed
from cluster.sim.scenario import Plan, Workload
from cluster.sim.workloads import load_workload
from cluster.types import Task
from envs.base import Env, StepResult, TaskSet

EVAL_FROM = 1_000_000_000
"""Group number of the first evaluation task: plans of training groups never reach it."""
GLUE = 2
"""Tokens that the chat template adds to an observation (the speaker's and the player's marks)."""
WORDS = tuple(f"w{n}" for n in range(160))
MEMBERS = tuple(f"m{n}" for n in range(64))
_TRAIN = re.compile(r"g(\d+)\.(\d+)")
_EVAL = re.compile(r".+-(\d+)\.(\d+)")
_TEXT = tuple(random.Random(0).choices(WORDS, k=4096))


class Place(NamedTuple):
    """Whose plan it is."""

    group: int
    member: int


def place_of(trajectory: str) -> Place | None:
    """Group and member that a trajectory's name stands for: ``g0000017.3`` or ``before-greedy-00002.0``."""
    found = _TRAIN.fullmatch(trajectory)
    if found is not None:
        return Place(int(found[1]), int(found[2]))
    found = _EVAL.fullmatch(trajectory)
    return Place(EVAL_FROM + int(found[1]), int(found[2])) if found is not None else None


@lru_cache(maxsize=16)
def workload(name: str) -> Workload:
    """A built-in workload of the simulator, or a TOML file. Raises ConfigError for an unknown one."""
    return load_workload(name)


class Load(Env):
    """One episode; see the module docstring. The task's data says workload, seed and group."""

    capabilities = frozenset({"latency", "pause"})

    def pause(self) -> None:
        """Nothing runs here."""

    def resume(self) -> None:
        """Nothing ran."""

    def start(self, task: Task, seed: int) -> str:
        """The first prompt, which all members share."""
        data = task.data
        self._source = workload(str(data["workload"]))
        self._seed, self._group = int(data["seed"]), int(data["group"])
        self._plan: Plan | None = None
        self._member = 0
        self._turn = 0
        first = self._source.plan(self._seed, self._group, 0)
        self.latency_s = first.start_s
        return text(first.turns[0].added - GLUE, self._group)

    def step(self, actions: list[str]) -> StepResult:
        """The observation that the plan has next; done, with the coin, after the last turn."""
        if self._plan is None:
            self._meet(actions[0] if actions else "")
        assert self._plan is not None
        turns = self._plan.turns
        self.latency_s = turns[self._turn].env_s
        info = {"tool": turns[self._turn].tool}
        self._turn += 1
        if self._turn >= len(turns):
            success = coin(self._seed, self._group, self._member)
            return StepResult("over", rewards={"success": success}, done=True, info=info)
        return StepResult(text(turns[self._turn].added - GLUE, self._group + self._turn), info=info)

    def _meet(self, action: str) -> None:
        """Whose reply is it? Raises EnvFailed when nobody says."""
        word = action.partition(" ")[0]
        if word not in MEMBERS:
            raise EnvFailed(f"a reply to load begins with its member's word, m0 to m63, not {action[:40]!r}")
        self._member = MEMBERS.index(word)
        self._plan = self._source.plan(self._seed, self._group, self._member)


class LoadTasks(TaskSet):
    """Task ``i`` is group ``i`` of the workload; evaluation tasks have groups of their own."""

    def __init__(self, workload: str = "twin", seed: int = 0) -> None:
        self.workload, self.seed = workload, seed
        _check(workload, seed)

    def task(self, split: str, index: int) -> Task:
        """``task("train", 3)`` is the workload's group 3."""
        if split not in self.splits or index < 0:
            raise ValueError(f"no task {index} in split {split!r} (splits: {', '.join(self.splits)})")
        group = index if split == "train" else EVAL_FROM + index
        data = {"workload": self.workload, "seed": self.seed, "group": group}
        return Task(id=f"{split}-{index}", env="load", seed=index, data=data)

    def fingerprint(self) -> str:
        """Names everything that the tasks depend on."""
        return f"load-1/{self.workload}/{self.seed}"


def _check(name: str, seed: int) -> None:
    """A plan as the twins can play it. Raises ConfigError."""
    plan = workload(name).plan(seed, 0, 0)
    if any(turn.kept >= 0 for turn in plan.turns):
        raise ConfigError(f"env.params.workload = {name!r} rewrites its history: the chat harness cannot")


def text(words: int, key: int) -> str:
    """``words`` words (at least one), the same for the same arguments."""
    at = key * 61 % len(_TEXT)
    chosen = _TEXT[at : at + max(1, words)]
    while len(chosen) < words:
        chosen += _TEXT[: words - len(chosen)]
    return " ".join(chosen)


def coin(seed: int, group: int, member: int) -> float:
    """0 or 1 with even odds."""
    raw = hashlib.blake2b(f"{seed}/{group}/{member}".encode(), digest_size=1).digest()
    return float(raw[0] & 1)
