"""What goes into a simulation and what comes out: plain records, shared by world, sweeps and views."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from cluster.sim.profile import Profile


class Turn(NamedTuple):
    """One turn of a planned episode."""

    added: int  # prompt tokens that are new since the last turn (the first turn's: the whole prompt)
    output: int  # tokens sampled
    env_s: float  # what the environment takes after it; 0 after the last turn
    tool: str  # kind of that environment call


class Plan(NamedTuple):
    """One member of a group, decided in advance: the same under every policy (common random numbers)."""

    turns: tuple[Turn, ...]
    start_s: float  # what starting or resetting the environment takes
    kind: str = ""


class Workload(Protocol):
    """A source of episodes; ``plan`` is a pure function of its arguments."""

    name: str

    def plan(self, seed: int, group: int, member: int) -> Plan:
        """Member ``member`` of group ``group``."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A system to simulate: which mechanisms it has."""

    name: str
    rollout: Literal["sync", "one_step_off", "stream"]  # sync: all ranks generate, then all train
    admission: Literal["request", "task", "aimd"]
    scoring: Literal["decoupled", "colocated", "full_batch", "thrash", "auto"]
    # full_batch: colocated, waits for the whole batch; thrash: colocated, swaps per micro-batch
    roles: Literal["static", "elastic", "lending"]
    max_lag: int = 2
    kv_on_sync: Literal["keep", "recompute"] = "keep"


@dataclass(frozen=True)
class Split:
    """Ranks by role at the start. ``scorers`` is 0 when scoring is colocated with training."""

    generators: int
    learners: int
    scorers: int = 0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation."""

    workload: Workload
    profile: Profile
    policy: PolicyConfig
    split: Split
    steps: int = 40
    groups_per_step: int = 16
    min_groups_per_step: int = 0
    group_size: int = 8
    env_slots: int = 0  # trajectories in flight, all generators together; 0: no bound
    seed: int = 0
    faults: tuple["Fault", ...] = ()
    eval_every: int = 0  # steps; 0: never
    eval_tasks: int = 0
    warmup_steps: int = 5  # left out of the figures


class Fault(NamedTuple):
    """A rank's machine goes at ``at_s`` and comes back after ``down_s`` (inf: never)."""

    at_s: float
    rank: int
    down_s: float


class StepFigures(NamedTuple):
    """One optimizer step of a simulation; times in seconds."""

    step: int
    t: float  # when it was committed
    tokens: int  # sampled tokens that it trained
    rwt_s: dict[str, float]  # generator rank-seconds waited since the last step, by cause
    twt_s: dict[str, float]  # trainer rank-seconds (learners and scorers) waited, by cause
    train_s: float  # from the batch's start to the update
    ras: int
    tprm_s: float
    head_age_s: float
    depth: int
    lag_mean: float
    lag_max: int
    roles: dict[str, int]
    scoring: str


@dataclass
class Result:
    """What a simulation found."""

    scenario: Scenario
    steps: list[StepFigures] = field(default_factory=list)
    seconds: float = 0.0  # simulated, warm-up left out
    goodput_tok_s: float = 0.0
    wait_s: float = 0.0  # RWT + TWT per step, mean, in rank-seconds
    kv_hit: float = 0.0  # cached / prompt tokens
    kv_hit_by_kind: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0  # mean per step
    prefilled_tokens: int = 0  # computed, recomputation included
    wasted_tokens: int = 0  # sampled and never trained
    group_latency_s: float = 0.0  # mean from admission to ready
    moves: list[dict[str, float | str]] = field(default_factory=list)  # the switch ledger
    roles: list[tuple[float, int, str]] = field(default_factory=list)  # (t, rank, role) for the Gantt
    waits: list[tuple[float, float, int, str]] = field(default_factory=list)  # (start, end, rank, cause)
    depth: list[tuple[float, int]] = field(default_factory=list)  # ready groups over time
    ledger: dict[str, int] = field(default_factory=dict)
    events: int = 0
    wall_s: float = 0.0
