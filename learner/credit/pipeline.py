"""Credit in its plain form: baseline -> scale -> spread -> mask, for whole groups. Pure numpy."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import CreditConfig
from cluster.types import EndKind, Group, Trajectory
from learner.batch import Mode, Sample, compile_trajectory
from learner.credit.group import advantages, is_constant
from learner.credit.spread import spread


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GroupCredit:
    """One group, compiled and credited: ``coefficients[i]`` ``[T]`` belongs to ``samples[i]``."""

    samples: tuple[Sample, ...]
    coefficients: tuple[NDArray[np.float32], ...]
    rewards: tuple[float, ...]  # of the members that count
    advantages: tuple[float, ...]
    constant: bool
    unscored: int  # members left out because they carry no finite reward


def credit_group(group: Group, config: CreditConfig, mode: Mode = "segment") -> GroupCredit:
    """Compile a group and give each of its trained tokens its coefficient.

    The reward is the end record's ``outcome``. A member without a finite outcome is left out of
    baseline and batch alike and counted in ``unscored``. Members may be of any number.
    """
    members = [member for member in group.members if has_score(member)]
    rewards = [float(member.end.outcome or 0.0) for member in members]
    values = advantages(rewards, config) if rewards else np.empty(0, np.float32)
    samples: list[Sample] = []
    coefficients: list[NDArray[np.float32]] = []
    for member, value in zip(members, values, strict=True):
        rows = compile_trajectory(member, group.id, mode)
        samples += rows
        coefficients += spread(float(value), [row.mask for row in rows], config.spread)
    return GroupCredit(
        samples=tuple(samples),
        coefficients=tuple(coefficients),
        rewards=tuple(rewards),
        advantages=tuple(float(value) for value in values),
        constant=bool(rewards) and is_constant(rewards, config.constant_tolerance),
        unscored=len(group.members) - len(members),
    )


def has_score(member: Trajectory) -> bool:
    """Only a finished or truncated trajectory with a finite outcome enters a baseline."""
    end = member.end
    scored = end.kind in (EndKind.FINISHED, EndKind.TRUNCATED) and end.outcome is not None
    return scored and math.isfinite(end.outcome or 0.0)


def credit_metrics(groups: Sequence[GroupCredit]) -> dict[str, float]:
    """Metrics of a batch. Means are over episodes, not over rows.

    ``signal_effect_size`` is the mean absolute advantage: how strongly rewards move the loss.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    values = [abs(value) for group in groups for value in group.advantages]
    scored = [group for group in groups if group.rewards]
    return {
        "reward_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
        "signal_effect_size": math.fsum(values) / len(values) if values else 0.0,
        "group_zero_std_fraction": (sum(group.constant for group in scored) / len(scored) if scored else 0.0),
        "members_unscored": float(sum(group.unscored for group in groups)),
        "episodes": float(len(rewards)),
    }
