"""Protocols between the layers. Implementations live elsewhere; ``deploy`` joins them.

Every order to the queue is idempotent: repeating it changes nothing, so writers may re-send
after a lost reply or a restarted server. States only move forward.
"""

from collections.abc import Sequence
from typing import Protocol

from cluster.types import (
    Completion,
    End,
    Group,
    Ledger,
    Order,
    Request,
    Segment,
    StepRecord,
    Weights,
)


class Queue(Protocol):
    """The readiness queue: durable facts, moved only by atomic state changes.

    A trajectory is *pending* from ``admit`` until it is trained, dropped, abandoned or
    failed; those four are final. A group is open, then ready, claimed and closed.
    """

    async def admit(self, order: Order) -> bool:
        """Enter a group and its members (pending). False if the group was known already."""

    async def orders(self) -> list[Order]:
        """Every open group's latest order (for a restarted controller)."""

    async def reorder(self, order: Order) -> bool:
        """Start attempt ``order.attempt`` of an open group. False if it is not newer or not open.

        Members that are still pending lose their earlier turns; members already failed stay so.
        """

    async def append(self, segments: Sequence[Segment]) -> int:
        """Store segments, a field per (attempt, turn); returns how many were new.

        Duplicates, older attempts and members that are no longer pending are ignored.
        """

    async def news(self, after: str, count: int, wait_s: float) -> tuple[str, list[Segment | End]]:
        """Up to ``count`` segments and ends recorded after the place ``after`` ("": the beginning), in order.

        Waits at most ``wait_s`` for the first. Returns the place reached, to go on from. Only writers that
        were made with ``notices`` are heard; segments of members that are not pending any more, and
        records of earlier attempts, are left out. A reader that falls far behind, or whose server was
        restarted, may miss some: what must not be missed is read with ``load``.
        """

    async def end(self, ends: Sequence[End]) -> int:
        """Record ends. failed/abandoned ends move the ledger at once. Returns how many were new."""

    async def ready(self, group: str, attempt: int, min_members: int) -> bool:
        """Mark an open group ready, if each member has ended and enough are valid.

        With fewer than ``min_members`` valid ends, the rest is dropped(too_few_members) and
        the group closed; returns whether the group became ready (or already was).
        Raises ValueError when a member has not ended.
        """

    async def claim(self, consumer: str, count: int, wait_s: float) -> list[str]:
        """Take up to ``count`` ready group ids, oldest first, waiting at most ``wait_s``."""

    async def reclaim(self, consumer: str) -> list[str]:
        """Take over every claimed, unacknowledged group of dead consumers, oldest first."""

    async def load(self, groups: Sequence[str]) -> list[Group]:
        """Read groups whole, in the order given. Raises KeyError for one that is open or has no payload."""

    async def close(self, groups: Sequence[str], reason: str) -> int:
        """Drop the pending members of groups: dropped(reason); acknowledge. Returns members moved."""

    async def abandon(self, group: str, reason: str) -> int:
        """Pending members of an open group become abandoned(reason). Returns members moved."""

    async def plan(self, record: StepRecord) -> None:
        """Write the step log entry before the update."""

    async def commit(self, record: StepRecord) -> bool:
        """One atomic move: its trajectories trained, groups acknowledged and closed, version = step.

        False if that step was committed already.
        """

    async def steps(self, after: int) -> list[StepRecord]:
        """Step log entries with ``step > after``, in order."""

    async def release(self, upto: int) -> int:
        """A checkpoint covers steps <= ``upto``: delete their payloads. Returns groups deleted."""

    async def rewind(self, step: int) -> None:
        """Resume from checkpoint ``step``: later entries stay in the log, to be executed again."""

    async def ledger(self) -> Ledger:
        """The counters, as moved by the state changes."""

    async def audit(self) -> Ledger:
        """The same counts, found by visiting every trajectory's own state."""

    async def groups(self) -> dict[str, int]:
        """Group counts by state: open, ready, claimed, trained, lost (closed without training).

        Each from its own key; ``admitted groups`` is their sum.
        """

    async def depth(self) -> tuple[int, float]:
        """(ready and unclaimed groups, age of the oldest in seconds)."""

    async def get(self, key: str) -> bytes | None:
        """Read one small durable fact (cursor, epoch, acknowledged version ...)."""

    async def put(self, key: str, value: bytes) -> None:
        """Write one small durable fact."""

    async def aclose(self) -> None:
        """Let go of connections."""


class Generator(Protocol):
    """What an env worker needs from a generator. Token ids in, token ids out."""

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """Queue requests of a caller. A malformed one is answered by ``collect`` with its error."""

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        """Completions for a caller since its last collect; waits at most ``wait_s`` for the first.

        ``elsewhere``: most tokens free at another generator now; mobile requests that wait may be sent there.
        """

    async def release(self, caller: str, sessions: Sequence[str]) -> None:
        """These tasks of a caller have ended: their places are free, what they still ask is dropped.

        Unknown ones are ignored.
        """


class WeightSink(Protocol):
    """What the controller needs from a generator: load these weights, tell the version."""

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Load, verify the checksum, return the version now live. Raises WeightsFailed."""


class Policy(Protocol):
    """What a rollout needs: one call. Tests use a scripted one; the router is the real one."""

    async def generate(self, request: Request) -> Completion:
        """Answer one request; raises EngineFailed after its retries, BadRequest at once."""
