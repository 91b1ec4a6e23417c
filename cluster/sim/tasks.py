"""What lives in a simulated rollout: groups, tasks, generators, and the events of the world's queue."""

from collections.abc import Callable
from math import inf
from typing import Any

from cluster.admission import Admission
from cluster.sim.scenario import Turn
from cluster.sim.service import GeneratorModel

Event = tuple[float, int, Callable[[float, Any], None], Any]
"""(time, order of entry, handler, its argument)."""


class Group:
    """Trajectories that are trained together."""

    __slots__ = (
        "admitted_at", "evaluation", "home", "kind", "left", "members", "name", "number", "oldest",
        "ready_at", "rows", "sampled", "scored", "train_tokens", "unscored", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, members: int, now: float, evaluation: bool) -> None:
        self.number = number
        self.name = f"e{number}" if evaluation else f"g{number}"
        self.members = members
        self.left = members
        self.evaluation = evaluation
        self.admitted_at = now
        self.ready_at = 0.0
        self.oldest = 1 << 60  # version of its oldest token
        self.sampled = 0  # tokens
        self.rows: list[int] = []  # training rows, in tokens
        self.train_tokens = 0
        self.scored = False
        self.unscored = 0  # new tokens of its turns without scores
        self.waiting = 0  # of which nobody is running
        self.home: Generator | None = None
        self.kind = ""


class Task:
    """One trajectory."""

    __slots__ = (
        "asked", "began", "context", "done_version", "first", "gen", "group", "kept", "last", "moved",
        "name", "prompt", "row", "turn", "turns",
    )  # fmt: skip

    def __init__(self, name: str, group: Group, turns: tuple[Turn, ...]) -> None:
        self.name = name
        self.group = group
        self.turns = turns
        self.turn = 0
        self.asked = turns[0]  # the turn that it last asked for
        self.began = 0.0  # when it first asked for that turn, wherever
        self.moved = -1  # turn in which it was last sent elsewhere: once a turn is enough
        self.kept = 0  # tokens of the context so far with which the prompt of that turn begins
        self.prompt = 0  # tokens of that prompt
        self.context = 0
        self.row = 0  # tokens of the training row under way
        self.first = turns[0].added  # tokens of the prompt that all members share
        self.gen: Generator | None = None  # where it asks or is served now
        self.last: Generator | None = None  # where its last turn was served
        self.done_version = -1


class Generator:
    """A generator rank: its model, its admission, and when the world looks at it next."""

    __slots__ = (
        "admission", "alive", "index", "model", "next_report", "queued", "tasks", "timer", "wake", "watched",
    )  # fmt: skip

    def __init__(self, index: int, model: GeneratorModel, admission: Admission | None) -> None:
        self.index = index
        self.model = model
        self.admission = admission
        self.alive = True
        self.wake = inf
        self.timer = inf
        self.next_report = 0.0
        self.watched = False
        self.tasks: dict[str, Task] = {}  # asking or active here
        self.queued: dict[str, float] = {}  # of which without a turn yet, and since when
