"""What a scorer is asked of segments, and which contexts it keeps between them. No torch.

A scorer is asked for the sampled tokens of whole contexts and runs forward only what it does not hold: a
context that extends the newest one of its trajectory costs its new tokens, one that was cut (evicted,
compressed, backtracked) the tokens after the cut. Nothing is lost when a scorer forgets: the prefix is
computed again.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.types import Call, ids

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
P = TypeVar("P")


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Ids [T]; the places of those to score in ``targets`` [S], ascending; their ``temperature`` [S]."""

    ids: Ints
    targets: Ints
    temperature: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """The contexts of one trajectory's new segments, in order."""

    trajectory: str
    contexts: tuple[Context, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Scores: ``values[i]`` are those of ask ``i``'s targets, context after context.

    ``tokens[i]`` is what was run forward for it, ``busy`` (start, end) in seconds since the epoch, ``room``
    how many tokens of contexts the scorer can keep.
    """

    values: tuple[Floats, ...]
    tokens: tuple[int, ...]
    busy: tuple[float, float] = (0.0, 0.0)
    room: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Unfolded:
    """Calls as contexts; ``reached`` are the ids after the last, ``rows`` what their rows add to a batch."""

    contexts: tuple[Context, ...]
    reached: Ints
    rows: int


def unfold(base: Ints, calls: Iterable[Call]) -> Unfolded:
    """The contexts of ``calls`` after the ids ``base`` of the call before them.

    As in ``learner.batch``: a call that keeps the whole history extends the context, another begins a new
    one. Raises ValueError for a call that keeps more than there is, or has no context.
    """
    contexts: list[Context] = []
    reached, targets, temperature, rows = base, [], [], 0  # type: Ints, list[Ints], list[Floats], int

    def close() -> None:
        if targets:
            contexts.append(Context(reached, np.concatenate(targets), np.concatenate(temperature)))
            targets.clear()
            temperature.clear()

    for call in calls:
        if call.keep > len(reached):
            raise ValueError(f"call {call.call} keeps {call.keep} of {len(reached)} ids")
        added, output = ids(call.added), ids(call.output)
        if call.keep < len(reached):
            close()
            rows += call.keep
        reached = np.concatenate([reached[: call.keep], added, output])
        rows += len(added) + len(output)
        start = len(reached) - len(output)
        if not len(output):
            continue
        if start == 0:
            raise ValueError(f"call {call.call}: the prompt is empty, so its first token has no context")
        targets.append(np.arange(start, len(reached), dtype=np.int32))
        temperature.append(np.full(len(output), call.temperature, np.float32))
    close()
    return Unfolded(tuple(contexts), reached, rows)


@dataclass(slots=True)
class _Kept(Generic[P]):
    ids: Ints
    payload: P
    size: int


class KeptContexts(Generic[P]):
    """The newest context of each trajectory, with a payload: least recently used ones go first.

    ``room`` bounds the sum of sizes in tokens. A context larger than that is not kept.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.used = 0
        self._kept: OrderedDict[str, _Kept[P]] = OrderedDict()

    def take(self, trajectory: str, context: Context) -> tuple[int, P | None]:
        """(tokens that need not be run forward, payload) for a context; the trajectory is not kept after it.

        The token before the first target is always run: its output is what scores the target.
        """
        kept = self._kept.pop(trajectory, None)
        if kept is None:
            return 0, None
        self.used -= kept.size
        most = min(len(kept.ids), int(context.targets[0]) - 1)
        differ = np.flatnonzero(kept.ids[:most] != context.ids[:most])
        return (int(differ[0]) if len(differ) else most), kept.payload

    def keep(self, trajectory: str, ids: Ints, payload: P, size: int) -> None:
        """Hold this context; others leave if need be."""
        before = self._kept.pop(trajectory, None)
        if before is not None:
            self.used -= before.size
        if size > self.room:
            return  # it would only drive out the others
        self._kept[trajectory] = _Kept(ids, payload, size)
        self.used += size
        while self.used > self.room:
            _, gone = self._kept.popitem(last=False)
            self.used -= gone.size

    def drop(self, trajectories: Iterable[str]) -> None:
        """These are not needed any more."""
        for trajectory in trajectories:
            gone = self._kept.pop(trajectory, None)
            self.used -= gone.size if gone is not None else 0
