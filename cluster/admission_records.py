"""What admission keeps of a task: limits, states, estimates of growth, counts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

PREFILL_TOK_S = 8000.0  # of a rank, if nobody knows better
_MEMORY = 32  # turns over which mean growth is taken

QUEUED, BACK, ACTIVE, WAITING, PARKED, GONE = range(6)  # BACK: asks, and still has its place


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds one generator. ``prefill_tok_s`` prices the recomputation of a context."""

    capacity_tokens: int
    headroom: float = 0.05  # share of the capacity never promised
    max_tasks: int = 0  # resident at once; 0: no bound
    diversity: float = 1.0  # largest share of the resident training tasks of one kind while another waits
    prefill_tok_s: float = PREFILL_TOK_S
    context: Literal["protect_long", "protect_short"] = "protect_long"
    policy: Literal["task", "request", "aimd"] = "task"
    forget_s: float = 3600.0  # a task not heard of for so long, while not in a turn, has left unseen

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1 and self.policy == "task":
            raise ValueError(f"capacity_tokens = {self.capacity_tokens}: a token budget needs at least 1")
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(f"headroom = {self.headroom}: must lie in [0, 1)")
        if not 0.0 < self.diversity <= 1.0:
            raise ValueError(f"diversity = {self.diversity}: must lie in (0, 1]")
        if self.max_tasks < 0:
            raise ValueError(f"max_tasks = {self.max_tasks}: must be 0 (any number) or more")
        if self.prefill_tok_s <= 0.0:
            raise ValueError(f"prefill_tok_s = {self.prefill_tok_s}: must be positive")


class Figures(NamedTuple):
    """Counts as of now; token counts are of the ledger, not of the engine."""

    capacity: int
    budget: int  # what may be promised
    promised: int
    free: int  # budget less promised, not below 0
    resident: int  # active, waiting, or asking with a place
    active: int
    waiting: int
    parked: int  # without a place, in their environments
    queued: int  # asking, with or without a place
    starts: int  # totals since the beginning
    parks: int
    resumes: int  # starts of tasks that had been parked
    cap: float  # "aimd": concurrent requests; else the share of the budget that pressure leaves


class Growth:
    """Mean tokens that a turn adds: sampled (``out``), and by the environment's answer (``obs``)."""

    __slots__ = ("n_obs", "n_out", "obs", "out")

    def __init__(self) -> None:
        self.n_out = self.n_obs = 0
        self.out = self.obs = 0.0


class Group:
    __slots__ = ("done", "growth", "members", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0.0
        self.growth = Growth()
        self.members: dict[str, Task] = {}


class Task:
    __slots__ = (
        "alike", "asked", "base", "evaluation", "expired", "group", "growth", "held", "kind", "name",
        "parked", "salt", "since", "stamp", "state", "timed", "tokens", "tool", "until",
    )  # fmt: skip

    def __init__(self, name: str, group: Group, kind: str, evaluation: bool, alike: Growth) -> None:
        self.name = name
        self.alike = alike  # what tasks of its kind grow
        self.group = group
        self.kind = kind
        self.evaluation = evaluation
        self.state = GONE
        self.tokens = 0  # context as last known
        self.growth = 0  # what this turn may add at most
        self.held = 0  # promised
        self.asked = 0.0
        self.base = 0.0  # priority without the term of age
        self.parked = False  # since its last turn
        self.expired = False  # its hold has run out
        self.salt = 0  # of the weights whose prefix it has
        self.since = 0.0  # end of its last turn
        self.until = 0.0  # end of its hold
        self.timed = False  # it waits for its environment since then, and for nothing else
        self.tool = ""
        self.stamp = 0  # entries in queues under another stamp are void


def sampled(task: Task, tokens: int) -> None:
    """A turn of the task has sampled so many: its group and its kind learn of it."""
    for growth in (task.group.growth, task.alike):
        if growth.n_out < _MEMORY:
            growth.n_out += 1
        growth.out += (tokens - growth.out) / growth.n_out


def observed(task: Task, tokens: int) -> None:
    """Its environment's answer has added so many."""
    for growth in (task.group.growth, task.alike):
        if growth.n_obs < _MEMORY:
            growth.n_obs += 1
        growth.obs += (tokens - growth.obs) / growth.n_obs


def expected_out(task: Task) -> float:
    """Tokens that its turn is expected to sample."""
    growth = task.group.growth
    if not growth.n_out:
        growth = task.alike
        if not growth.n_out:
            return task.growth
    return growth.out if growth.out < task.growth else task.growth


def expected_obs(task: Task) -> float:
    """Tokens that its environment's answer is expected to add."""
    growth = task.group.growth
    return growth.obs if growth.n_obs else task.alike.obs
