"""What a job may do with its ranks: limits, prior switch costs, targets that an operator may set. Pure."""

from collections.abc import Mapping
from typing import Literal

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.ranks import Bounds
from cluster.roles import ROLES, SPARE, RoleMap
from cluster.sections import ElasticConfig
from cluster.sim.profile import SwitchProfile

ScoringMode = Literal["decoupled", "colocated", "auto"]


def move_costs(times: SwitchProfile, scores: bool) -> dict[str, float]:
    """Seconds of each kind of move of a job that has scorers or not."""
    costs = {"generator>learner": times.generator_learner, "learner>generator": times.learner_generator}
    if scores:
        costs |= {"generator>scorer": times.generator_scorer, "scorer>generator": times.scorer_generator}
    return costs


def switch_costs(config: Config, times: SwitchProfile, speed: float = 1.0) -> dict[str, float]:
    """Prior seconds of each kind of move that this job can make; ``speed`` is that of a timed twin."""
    costs = move_costs(times, config.scorer.replicas > 0)
    return {kind: seconds / speed for kind, seconds in costs.items()}


def elastic_bounds(elastic: ElasticConfig, steps: int, scoring: ScoringMode, scores: bool) -> Bounds:
    """Limits and thresholds of ``[elastic]`` for a run of so many steps; ``scores``: with scorers.

    Somebody must score unless the learners can.
    """
    scorers = int(scores and scoring == "decoupled")
    return Bounds(
        floors={"generator": elastic.min_generators, "learner": elastic.min_learners, "scorer": scorers},
        ceilings={"learner": elastic.max_learners},
        dead_band=elastic.dead_band,
        agree_steps=elastic.agree_steps,
        horizon_steps=elastic.horizon_steps,
        steps=steps,
        scoring=scoring,
    )


def bounds(config: Config) -> Bounds:
    """Those of a recipe."""
    return elastic_bounds(config.elastic, config.run.steps, config.scorer.mode, config.scorer.replicas > 0)


def restoring(config: Config, counts: Mapping[str, int]) -> dict[str, int]:
    """The target of a job that moves nothing by itself: ranks that came back fill the recipe's split."""
    recipe = {"learner": config.learner.ranks, "generator": config.generator.replicas,
              "scorer": config.scorer.replicas}  # fmt: skip
    return {role: max(count, counts[role]) for role, count in recipe.items()}


def refilling(counts: Mapping[str, int], floors: Mapping[str, int]) -> tuple[str, str] | None:
    """(source, target) of the move without which a job with nobody in a needed role stands still.

    Spares go first, then scorers, then the other needed role, each above its floor.
    """
    for target, other in (("generator", "learner"), ("learner", "generator")):
        able = [role for role in (SPARE, "scorer", other) if counts[role] > floors.get(role, 0)]
        if counts[target] == 0 and able:
            return able[0], target
    return None


def check_target(
    config: Config, roles: RoleMap, target: Mapping[str, int], env_workers: int | None, free: int
) -> int:
    """Ranks that the cluster has to add for ``target`` (wished counts by role).

    Raises ConfigError naming what forbids it: a floor, a ceiling, or how many ranks are ``free``.
    """
    floors, counts = bounds(config).floors, roles.counts()
    for role, count in target.items():
        if count < floors.get(role, 0):
            raise ConfigError(f"{role}s = {count}: at least {floors[role]} must stay")
    if target.get("scorer", 0) and not config.scorer.replicas:
        raise ConfigError(f"scorers = {target['scorer']}: this job scores nothing (objective.kl_coef = 0)")
    most = config.elastic.max_learners
    if most and target.get("learner", 0) > most:
        raise ConfigError(f"learners = {target['learner']}: elastic.max_learners is {most}")
    if env_workers is not None and env_workers < 1:
        raise ConfigError(f"env_workers = {env_workers}: at least 1 must stay")
    kept = sum(min(counts[role], floors.get(role, 0)) for role in ROLES if role not in target)
    owned = sum(counts.values())
    more = max(0, sum(target.values()) + kept - owned) if target else 0
    if more > free:
        asked = ", ".join(f"{role}s = {count}" for role, count in target.items())
        raise ConfigError(
            f"{asked} needs {more} more ranks than the {owned} of this job, and the cluster has {free} free"
        )
    return more
