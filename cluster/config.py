"""The configuration tree: one frozen structure, read from TOML plus ``section.key=value``.

Its sections are in ``cluster/sections.py``. Imports nothing heavy. Unknown keys are refused with the
nearest valid one; contradictions are refused by name; what can be derived is a property and cannot be set.
"""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from cluster.errors import ConfigError, nearest
from cluster.keys import check_tree
from cluster.sections import AdmissionConfig as AdmissionConfig
from cluster.sections import ClusterConfig as ClusterConfig
from cluster.sections import CreditConfig as CreditConfig
from cluster.sections import ElasticConfig as ElasticConfig
from cluster.sections import EnvConfig as EnvConfig
from cluster.sections import EvalConfig as EvalConfig
from cluster.sections import GeneratorConfig as GeneratorConfig
from cluster.sections import HarnessConfig as HarnessConfig
from cluster.sections import LearnerConfig as LearnerConfig
from cluster.sections import ModelConfig as ModelConfig
from cluster.sections import ObjectiveConfig as ObjectiveConfig
from cluster.sections import QueueConfig as QueueConfig
from cluster.sections import RewardConfig as RewardConfig
from cluster.sections import RunConfig as RunConfig
from cluster.sections import ScorerConfig as ScorerConfig
from cluster.sections import Section as Section
from cluster.sections import TwinConfig as TwinConfig

STORE_MB = 75
"""Ray's smallest object store."""


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

    @property
    def streams_scores(self) -> bool:
        """Scorers on ranks of their own may score segments before their group is ready."""
        scorer = self.scorer
        return self.objective.kl_coef > 0 and scorer.mode != "colocated" and scorer.kv_cache_gb > 0


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
    check_tree(tree, Config)
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
    _validate_sizes(config)
    _validate_scoring(config)
    _validate_tide(config)
    _validate_uses(config)


def _validate_sizes(config: Config) -> None:
    """Counts, and what has to fit into what."""
    run, learner = config.run, config.learner
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
        ("env.output_limit", config.env.output_limit),
        ("env.max_attempts", config.env.max_attempts),
        ("generator.replicas", config.generator.replicas),
        ("generator.max_num_seqs", config.generator.max_num_seqs),
        ("generator.block_size", config.generator.block_size),
        ("generator.threads", config.generator.threads),
        ("learner.ranks", learner.ranks),
        ("learner.threads", learner.threads),
        ("learner.micro_rows", learner.micro_rows),
        ("scorer.threads", config.scorer.threads),
        ("harness.max_new_tokens", config.harness.max_new_tokens),
        ("eval.tasks", config.eval.tasks),
    ):
        _require(value >= 1, name, value, "must be at least 1")
    for name, seconds in (
        ("run.deadline_s", run.deadline_s),
        ("env.start_timeout_s", config.env.start_timeout_s),
        ("env.step_timeout_s", config.env.step_timeout_s),
        ("generator.request_timeout_s", config.generator.request_timeout_s),
        ("generator.start_timeout_s", config.generator.start_timeout_s),
        ("learner.step_timeout_s", learner.step_timeout_s),
        ("learner.start_timeout_s", learner.start_timeout_s),
        ("scorer.timeout_s", config.scorer.timeout_s),
        ("elastic.prepare_timeout_s", config.elastic.prepare_timeout_s),
        ("generator.kv_cache_gb", config.generator.kv_cache_gb),
    ):
        _require(seconds > 0, name, seconds, "must be positive")
    _require(bool(config.eval.modes), "eval.modes", config.eval.modes, "name at least one")
    store = config.cluster.object_store_mb
    _require(store >= STORE_MB, "cluster.object_store_mb", store, f"Ray takes no less than {STORE_MB}")
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


def _validate_scoring(config: Config) -> None:
    """Who scores, if anybody has to."""
    objective, replicas = config.objective, config.scorer.replicas
    _require(replicas >= 0, "scorer.replicas", replicas, "must be 0 or more")
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
    _require(
        config.scorer.kv_cache_gb >= 0,
        "scorer.kv_cache_gb",
        config.scorer.kv_cache_gb,
        "must be 0 (score whole groups) or more",
    )
    if objective.kl_coef == 0 and config.scorer.replicas > 0:
        raise ConfigError("scorer.replicas > 0 does nothing while objective.kl_coef is 0: remove one")


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
    pause = admission.pause_env_after_s
    _require(pause >= 0, "admission.pause_env_after_s", pause, "must not be negative")
    _require(
        elastic.max_learners == 0 or elastic.max_learners >= elastic.min_learners,
        "elastic.max_learners",
        elastic.max_learners,
        f"must be 0 (no bound) or at least elastic.min_learners ({elastic.min_learners})",
    )
    _require(elastic.dead_band >= 0, "elastic.dead_band", elastic.dead_band, "must not be negative")
    _require(config.twin.speed > 0, "twin.speed", config.twin.speed, "must be positive")


def _validate_uses(config: Config) -> None:
    """Keys that are set must be used."""
    objective = config.objective
    if objective.reduction != "constant" and objective.constant != 1.0:
        raise ConfigError('objective.constant is unused unless objective.reduction = "constant"')
    if bool(config.model.path) == bool(config.model.maker):
        raise ConfigError("model needs exactly one of model.path (a folder) and model.maker")
    if config.env.folder and ":" not in config.env.name:
        raise ConfigError("env.folder is unused unless env.name is module:Class")
    if config.model.warm_params and not config.model.warm_start:
        raise ConfigError("model.warm_params is unused while model.warm_start is false")
    unknown = set(config.env.latency) - {"mean_s", "sigma"}
    if unknown:
        key = sorted(unknown)[0]
        raise ConfigError(f"env.latency.{key} is unknown{nearest(key, ['mean_s', 'sigma'])}")


def _require(ok: bool, name: str, value: object, why: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: {why}")


def _readable(message: str) -> str:
    text, _, path = message.partition(" - at `$")
    return f"{path.rstrip('`').lstrip('.') or 'recipe'}: {text}" if path else text
