"""Learner state between two groups of ranks: what travels when the world is resized. No torch.

The ranks of the old world gather every tensor on the CPU of its first rank; it is handed on in parts by
object reference, so the processes it came from may end; the ranks of the new world each take their own
shard of every part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

PART_BYTES = 256 * 2**20
"""A part ends with the tensor that reaches this size: few objects, and one at a time in memory."""


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of the old world says after the gathering.

    ``parts`` and ``nbytes`` are those that it holds (the first rank all, the others none); ``random`` is
    its own random state.
    """

    version: int
    skipped: int
    random: bytes
    parts: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class State:
    """The whole state, by reference: full tensors by name (see ``learner.reshard``).

    Random state goes by position: rank ``i`` of the new world goes on where rank ``i`` of the old one
    was; a rank beyond the old world starts a stream of its own.
    """

    version: int
    skipped: int
    random: tuple[bytes, ...]
    parts: Sequence[Any]
    nbytes: int


@dataclass(frozen=True)
class Resized:
    """How a resize ended. If not ``ok``, the old world was formed again.

    ``parts``: seconds by name (gather or save, regroup, reshard or load, total).
    """

    ok: bool
    parts: dict[str, float]
    error: str = ""
