"""What a user should hear about a run's rewards while there is time to stop it: records in, lines out."""

from collections.abc import Mapping
from typing import Any

CONSTANT_STEPS = 5
"""Batches in a row without a difference within any group: chance no longer explains it."""


class Advice:
    """Feed it every step's record once or more often; each warning is given once."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._unpaid = {name for name, weight in weights.items() if weight}
        self._step = 0
        self._constant = 0
        self._first = True

    def look(self, record: Mapping[str, Any]) -> list[str]:
        """New warnings, if any."""
        step, rewards = int(record.get("step") or 0), record.get("reward")
        if step <= self._step or not isinstance(rewards, Mapping):
            return []
        if step != self._step + 1:  # steps that nobody showed us lie between
            self._constant = 0
        self._step = step
        return [*self._weights(rewards), *self._spread(record, rewards)]

    def _weights(self, rewards: Mapping[str, float]) -> list[str]:
        if not self._first:
            return []
        self._first = False
        paid = sorted(set(rewards) - {"outcome"})
        unpaid = sorted(self._unpaid - set(rewards))
        said = f"they pay: {', '.join(paid)}" if paid else "they pay nothing"
        where = "warning: reward.weights"
        return [f"{where}.{name}: no trajectory of a batch pays it; {said}" for name in unpaid]

    def _spread(self, record: Mapping[str, Any], rewards: Mapping[str, float]) -> list[str]:
        constant = record.get("group_zero_std_fraction") == 1.0
        self._constant = self._constant + 1 if constant else 0
        if self._constant != CONSTANT_STEPS:
            return []
        return [
            f"warning: nothing to learn from: in {CONSTANT_STEPS} batches in a row every group's members had "
            f"the same reward (mean {rewards.get('outcome', 0.0):.3g}): look at tasks and reward.weights"
        ]
