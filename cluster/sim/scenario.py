"""What goes into a simulation and what comes out: plain records, shared by world, sweeps and views."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from msgspec.structs import replace

from cluster.config import AdmissionConfig, Config, ElasticConfig
from cluster.sim.profile import Profile


class Turn(NamedTuple):
    """One turn of a planned episode. Its prompt is what was kept of the context so far, and ``added``.

    A rewritten history (the last five screenshots, say) ends a training row and breaks the cached prefix.
    """

    added: int  # prompt tokens that are new since the last turn (the first turn's: the whole prompt)
    output: int  # tokens sampled
    env_s: float  # what the environment takes after it; 0 after the last turn
    tool: str  # kind of that environment call
    kept: int = -1  # >= 0: history was rewritten, this many tokens of the context so far remain; -1: all


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
    gated: bool = False  # no micro-batch is trained before the batch is whole, as the live learner does it
    drain: bool = False  # admit only what ``steps`` can train, as a live run does, and let it run out
    release: bool = False  # engines drop an ended task's cache (timed twins do; vLLM lets it age out)
    max_new_tokens: int = 0  # what a turn may sample; 0: as much as any turn has so far
    trace: bool = True  # keep every wait and queue length for the picture
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    elastic: ElasticConfig = field(default_factory=lambda: ElasticConfig(enabled=True))

    @classmethod
    def from_config(cls, config: Config, profile: Profile, workload: "Workload") -> "Scenario":
        """The simulation that predicts a live job of timed twins: the same limits, slots and machines.

        ``profile`` and ``workload`` are the ones that the recipe names (``twin.profile``, and
        ``env.params.workload`` of the environment ``load``). Times are the profile's: at
        ``twin.speed`` 4 the live job takes a quarter of them. Everything counts from the first step.
        """
        scorers, learner = config.scorer.replicas, config.learner
        micro = learner.row_tokens * learner.micro_rows
        scored = config.objective.kl_coef > 0
        passes = profile.scorer.passes if scored else 0
        fitted = replace(
            profile,
            learner=replace(profile.learner, micro_tokens=micro),
            scorer=replace(profile.scorer, passes=passes),
        )
        policy = PolicyConfig(
            name=config.run.name,
            rollout="stream",
            admission=config.admission.policy,
            scoring=config.scorer.mode if scored else "full_batch",
            roles="elastic" if config.elastic.enabled else "static",
            max_lag=config.run.max_lag,
            kv_on_sync=config.generator.kv_on_sync,
        )
        return cls(
            workload=workload,
            profile=fitted,
            policy=policy,
            split=Split(config.generator.replicas, learner.ranks, scorers),
            steps=config.run.steps,
            groups_per_step=config.run.groups_per_step,
            min_groups_per_step=config.run.min_groups_per_step,
            group_size=config.run.group_size,
            env_slots=config.env.workers * config.env.slots,
            seed=int(config.env.params.get("seed", config.run.seed)),
            warmup_steps=0,
            gated=True,
            drain=True,
            release=True,
            max_new_tokens=config.harness.max_new_tokens,
            admission=config.admission,
            elastic=config.elastic,
        )


def check(scenario: Scenario) -> None:
    """Raises ValueError naming what is wrong with a scenario."""
    policy, split = scenario.policy, scenario.split
    for name, value in (
        ("split.generators", split.generators), ("split.learners", split.learners), ("steps", scenario.steps),
        ("groups_per_step", scenario.groups_per_step), ("group_size", scenario.group_size),
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    if policy.scoring == "decoupled" and scenario.profile.scorer.passes and not split.scorers:
        raise ValueError("scoring = 'decoupled' needs split.scorers >= 1 (or scorer.passes = 0)")
    if 0 < scenario.env_slots < scenario.group_size:
        raise ValueError(f"env_slots = {scenario.env_slots}: a group has {scenario.group_size} members")
    if policy.rollout == "one_step_off" and policy.max_lag < 1:
        raise ValueError("rollout = 'one_step_off' trains data that is one version old: max_lag must be >= 1")
    if policy.rollout != "stream" and (policy.roles != "static" or scenario.min_groups_per_step):
        raise ValueError(f"rollout = {policy.rollout!r} works with static roles and whole batches only")


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
