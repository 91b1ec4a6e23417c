"""From groups to what the ranks train: compile, credit, pack. Pure, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import Config
from cluster.types import EndKind, Group
from learner.batch import BatchPlan, Sample, pack
from learner.credit.pipeline import GroupCredit, credit_group, credit_metrics


@dataclass(frozen=True)
class Formed:
    """A step's batch for every rank and the metrics that need no model."""

    plan: BatchPlan
    metrics: dict[str, Any]
    versions_mixed: int  # trajectories whose tokens come from more than one version
    samples: tuple[Sample, ...] = ()


def build(groups: Sequence[Group], config: Config, ranks: int, scoring: str = "") -> Formed:
    """Compile, credit and pack whole groups, in order; the same input gives the same batch.

    ``scoring`` (decoupled, colocated, or "" without a scorer) decides the order of micro-batches, which
    changes sums only by rounding.

    Raises ValueError when a sample is longer than ``learner.row_tokens``.
    """
    credited = [credit_group(group, config.credit) for group in groups]
    samples: list[Sample] = [s for credit in credited for s in credit.samples]
    coefficients = [c for credit in credited for c in credit.coefficients]
    plan = pack(
        samples,
        coefficients,
        row_tokens=config.learner.row_tokens,
        ranks=ranks,
        micro_rows=config.learner.micro_rows,
        reduction=config.objective.reduction,
        constant=config.objective.constant,
        scoring=scoring,
    )
    mixed = sum(m.versions[0] != m.versions[1] for group in groups for m in group.members)
    return Formed(plan, {**_episode_metrics(groups, credited)}, mixed, tuple(samples))


def _episode_metrics(groups: Sequence[Group], credited: Sequence[GroupCredit]) -> dict[str, Any]:
    """Means over episodes (not rows), named as in cluster/metrics.py."""
    members = [m for group in groups for m in group.members]
    n = max(1, len(members))
    names = sorted({name for m in members for name in m.end.rewards})
    rewards = [reward for credit in credited for reward in credit.rewards]
    mean = math.fsum(rewards) / max(1, len(rewards))
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / max(1, len(rewards)))
    credit = credit_metrics(credited)
    return {
        "reward": {
            "outcome": mean,
            **{name: math.fsum(m.end.rewards.get(name, 0.0) for m in members) / n for name in names},
        },
        "reward_std": spread,
        "success": math.fsum(m.end.rewards.get("success", 0.0) for m in members) / n,
        "turns_mean": sum(len(m.turns) for m in members) / n,
        "truncated_fraction": sum(m.end.kind is EndKind.TRUNCATED for m in members) / n,
        "group_zero_std_fraction": credit["group_zero_std_fraction"],
        "signal_effect_size": {"outcome": credit["signal_effect_size"]},
    }
