"""What the training loop needs from outside: the controller, and where batches and records go."""

from collections.abc import Sequence
from typing import Any, Protocol

from cluster.messages import Barrier, Moved, Published, Roles
from cluster.types import Group, StepRecord
from learner.form import Formed


class ControllerPort(Protocol):
    """What the loop tells and asks the controller."""

    async def publish(self, published: Published) -> None:
        """New weights exist."""

    async def closed(self, groups: list[str]) -> None:
        """These groups ended without training."""

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """Hand over the step's record; get the rollout side's facts of the step."""

    async def barrier(self, facts: dict[str, Any]) -> Barrier:
        """The step is committed: what may change before its weights are published.

        ``facts`` are those of ``learner.pace.StepFacts.told``. Asking again for the same step gives
        the same answer.
        """

    async def moved(self, moved: Moved) -> None:
        """The barrier's move was made, or was not."""

    async def roles(self) -> Roles:
        """Who does what now; no ranks: as configured."""


class Effects(Protocol):
    """Where batches and records go; Ray and files live behind it."""

    def share(self, formed: Formed) -> Sequence[Any]:
        """Each rank's batch, by reference."""

    def checkpoint(self) -> tuple[str, int]:
        """Newest valid checkpoint folder and its step; ("", 0) for the initial weights."""

    def covered(self) -> int:
        """Step up to which payloads may be released: the oldest kept valid checkpoint's."""

    def recorded(self, record: StepRecord, groups: Sequence[Group], metrics: dict[str, Any]) -> None:
        """Keep what a replay needs, if the run is recorded."""

    def measured(self, step: int, metrics: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write the step's metrics."""

    def trace(self, event: str, fields: dict[str, Any]) -> None:
        """One line of the event trace."""
