"""Independent members: the plain group. Each plays the same task by itself, all at once.

A topology is an async programme ``(scope) -> members``: it decides which trajectories of the order
are played, when and from where; the scope plays them. Others may fork, wait for each other or
judge between turns; what they return is the same list.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from actors.rollout import Member
from cluster.types import Order


class Scope(Protocol):
    """What a topology may do with a group."""

    @property
    def order(self) -> Order:
        """The group to be played."""

    async def play(self, trajectory: str) -> Member:
        """Play one member to its end; waits for a free slot. Only cancellation is raised."""


@dataclass(frozen=True, slots=True)
class Iid:
    """All members at once; no member sees another."""

    async def __call__(self, scope: Scope) -> list[Member]:
        """Members in the order's order. A cancellation reaches every member before it is raised."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scope.play(trajectory)) for trajectory in scope.order.members]
        return [task.result() for task in tasks]
