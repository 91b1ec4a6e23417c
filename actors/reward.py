"""Rewards of a whole group, from the named components that its environments gave.

An episode's value of a component is its sum over turns; the outcome is the weighted sum of those
values. Both are one number per episode, so a mean over ``End.rewards`` is a mean over episodes.
A failed or abandoned member never gets a reward: a failure is not a score.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from actors.rollout import Member
from cluster.types import End, EndKind, Turn

_REWARDED = (EndKind.FINISHED, EndKind.TRUNCATED)


class Reward:
    """``Reward({"success": 1.0})(members)`` -> final ends, in the order of the members."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights) if weights is not None else {"success": 1.0}

    def __call__(self, members: Sequence[Member]) -> list[End]:
        """Ends with outcome and rewards where they may have one.

        A component that is not finite turns its trajectory into failed("env"): an environment
        that answers nonsense has failed.
        """
        return [self._finish(member) for member in members]

    def _finish(self, member: Member) -> End:
        end = member.end
        assert end is not None, f"{member.trajectory} has not ended"
        if end.kind not in _REWARDED:
            return end
        rewards = episode_rewards(member.turns)
        bad = {name: value for name, value in rewards.items() if not math.isfinite(value)}
        if bad:
            return replace(end, kind=EndKind.FAILED, reason="env", detail=f"reward is not finite: {bad}")
        outcome = sum(weight * rewards.get(name, 0.0) for name, weight in self.weights.items())
        return replace(end, outcome=outcome, rewards=rewards)


def episode_rewards(turns: Sequence[Turn]) -> dict[str, float]:
    """Sum of each named component over the turns of an episode."""
    totals: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.rewards.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals
