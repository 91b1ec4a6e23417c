"""Limits of moves, which rank makes one, and the way to an operator's target. Pure."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.messages import RankRow
from cluster.roles import ROLES


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits and thresholds; the defaults are those of ``ElasticConfig``."""

    floors: Mapping[str, int] = field(default_factory=lambda: {"generator": 1, "learner": 1})
    ceilings: Mapping[str, int] = field(default_factory=dict)  # a role that is absent or 0 has none
    dead_band: float = 0.1  # share of a step
    agree_steps: int = 2
    horizon_steps: int = 10
    tau: float = 1.5  # steps; a head of line older than this is a consumption deficit
    steps: int = 0  # of the whole run; 0: unknown
    scoring: Literal["decoupled", "colocated", "auto"] = "decoupled"  # scorer.mode


def choose_rank(rows: Sequence[RankRow], source: str, target: str, unhealthy: Collection[int] = ()) -> int:
    """Which rank of ``source`` moves: an unhealthy one, one on a node of its new peers, the highest number.

    The highest, because the lowest learner publishes and the lowest generators are the longest known.
    Raises ValueError if no rank holds ``source``.
    """
    peers = {row.node for row in rows if row.role == target and not row.lost}
    able = [row for row in rows if row.role == source and not row.lost]
    if not able:
        raise ValueError(f"no rank is a {source}: {sorted({row.role for row in rows if not row.lost})} exist")
    return max(able, key=lambda row: (row.rank in unhealthy, row.node in peers, row.rank)).rank


def can_give(counts: Mapping[str, int], bounds: Bounds, unhealthy: int) -> bool:
    """The healthy generators keep the floor without those that are not, one of which would go first."""
    return counts["generator"] - unhealthy >= bounds.floors.get("generator", 0)


def toward(
    target: Mapping[str, int], counts: Mapping[str, int], bounds: Bounds, unhealthy: int = 0
) -> tuple[str, str] | None:
    """(source, target role) of one move towards ``target``, or None; roles without a wish give and take.

    To a role that is short goes a spare, or a rank of the role that has most above its wish, or of the
    unnamed role that has most above its floor. If none is short, the role with too many gives to an
    unnamed one, to spare if all are named, and spares go to an unnamed one. ``unhealthy`` generators do not
    count for their floor.
    """
    floors = bounds.floors
    able = [role for role in ROLES if role != "generator" or can_give(counts, bounds, unhealthy)]
    wish = {role: target.get(role, counts[role]) for role in ROLES}
    short = {role: wish[role] - counts[role] for role in ROLES if wish[role] > counts[role]}
    over = {role: counts[role] - wish[role] for role in able if wish[role] < counts[role]}
    if not short:
        room = {role: (bounds.ceilings.get(role, 0) or math.inf) - counts[role] for role in ROLES}
        takers = [role for role in ("generator", "learner") if role not in target and room[role] > 0]
        if over:
            return max(over, key=lambda role: over[role]), (takers or ["spare"])[0]
        return ("spare", takers[0]) if takers and counts.get("spare", 0) > 0 else None
    wanted = max(short, key=lambda role: short[role])
    if counts.get("spare", 0) > 0:
        return "spare", wanted
    if over:
        return max(over, key=lambda role: over[role]), wanted
    free = {role: counts[role] - floors.get(role, 0) for role in able if role not in target}
    giver = max(free, key=lambda role: free[role], default="")
    return (giver, wanted) if giver and free[giver] > 0 else None
