"""Pure parts that every implementation of ``cluster.ports.Queue`` shares.

Checks of what callers hand in, bytes of records, and the way back from stored fields to records.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cluster import codec
from cluster.types import End, EndKind, Group, Ledger, Order, Purpose, Segment, StepRecord, Trajectory

RESERVED_FACT = "version"  # written by commit and rewind, in decimal
GROUP_STATES = ("open", "ready", "claimed", "trained", "lost")
VALID = (EndKind.FINISHED, EndKind.TRUNCATED)
NOTICES = 16384
"""Notices of appended records that a queue keeps: under 1 MB. A reader that is further behind misses some."""


def check_order(order: Order) -> None:
    """Refuse an order that the ledger could not count. Raises ValueError naming the field."""
    where = f"order of group {order.group!r}"
    if order.purpose is not Purpose.TRAIN:
        raise ValueError(f"{where}: purpose {order.purpose.value!r} is outside the ledger (valid: 'train')")
    if not order.members or len(set(order.members)) != len(order.members):
        raise ValueError(f"{where}: members {order.members!r} must be distinct and at least one")
    if order.attempt < 0:
        raise ValueError(f"{where}: attempt {order.attempt} must be 0 or more")


def check_step(record: StepRecord) -> None:
    """Refuse a step that names something twice. Raises ValueError naming the field."""
    if record.step < 1:
        raise ValueError(f"step {record.step} must be 1 or more: it is the version after the step")
    for name, values in (("groups", record.groups), ("trajectories", record.trajectories)):
        if len(set(values)) != len(values):
            twice = sorted({value for value in values if values.count(value) > 1})
            raise ValueError(f"step {record.step} names {name} twice: {', '.join(twice[:5])}")


def check_replanned(record: StepRecord, committed: StepRecord) -> None:
    """A committed step may be planned again only as it was. Raises ValueError otherwise."""
    if (record.groups, record.trajectories) != (committed.groups, committed.trajectories):
        raise ValueError(f"step {record.step} is committed with other groups: execute it as logged")


def check_fact(key: str) -> None:
    """Raises ValueError for a fact that only the queue itself writes."""
    if key == RESERVED_FACT:
        raise ValueError(f"fact {key!r} is written by commit and rewind only")


def encode_clean(record: Any) -> bytes:
    """``codec.encode``, with lone surrogates anywhere in the record replaced if need be."""
    try:
        return codec.encode(record)
    except UnicodeEncodeError:
        return codec.encode(_scrub(msgspec.to_builtins(record, builtin_types=(bytes,))))


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return codec.clean(value)
    if isinstance(value, dict):
        return {_scrub(key): _scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(item) for item in value]
    return value


def encode_all(records: Iterable[Segment | End]) -> tuple[list[tuple[Segment | End, bytes]], list[str]]:
    """Bytes of each record that can be written, and one line for each that cannot."""
    good: list[tuple[Segment | End, bytes]] = []
    bad: list[str] = []
    for record in records:
        try:
            good.append((record, encode_clean(record)))
        except (TypeError, ValueError, OverflowError) as error:
            bad.append(f"{type(record).__name__.lower()} of trajectory {record.trajectory!r}: {error}")
    return good, bad


def field_of(record: Segment | End) -> str:
    """The field of the trajectory's hash that holds this record; its identity."""
    if isinstance(record, Segment):
        return f"turn:{record.attempt}:{record.turn.turn}"
    return f"end:{record.attempt}"


def final_state(record: Segment | End) -> tuple[str, str]:
    """(state, reason) to which this record moves the ledger at once; ("", "") for most."""
    if isinstance(record, Segment) or record.kind in VALID:
        return "", ""
    return record.kind.value, codec.clean(record.reason)


def told(field: str, state: str, raw: bytes | None, where: str) -> Segment | End | None:
    """The record behind a notice; None if nobody needs to hear of it any more.

    A segment counts while its trajectory is pending, an end also when it was what ended that.
    """
    if raw is None or (state != "pending" and not field.startswith("end:")):
        return None
    record: Segment | End = decode_named(raw, End if field.startswith("end:") else Segment, where)
    return record


def decode_named(raw: bytes, kind: type[Any], name: str) -> Any:
    """``codec.decode``; the ValueError names where the bytes lay."""
    try:
        return codec.decode(raw, kind)
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from error


def build_group(
    order: Order, attempt: int, members: Mapping[str, Mapping[str, bytes]], where: str = "trajectory:"
) -> Group:
    """Join stored fields to a ``Group``: members that ended validly, in the order's order.

    ``members`` maps each id to its fields (``state``, ``end:<attempt>``, ``turn:<attempt>:<n>``).
    Raises KeyError when the payload of a member that counts is gone, ValueError when it is damaged.
    """
    found = []
    for name, fields in members.items():
        state = fields.get("state", b"").decode()
        if state not in ("pending", "trained"):
            continue
        raw = fields.get(f"end:{attempt}")
        if raw is None:
            if state == "trained":
                raise KeyError(f"group {order.group}: the end of trajectory {name} is gone")
            continue
        end: End = decode_named(raw, End, f"{where}{name} end:{attempt}")
        turns = []
        for field, value in fields.items():
            if field.startswith(f"turn:{attempt}:"):
                segment: Segment = decode_named(value, Segment, f"{where}{name} {field}")
                turns.append(segment.turn)
        if len(turns) < end.turns:
            raise KeyError(f"group {order.group}: trajectory {name} has {len(turns)} of {end.turns} turns")
        turns.sort(key=lambda turn: turn.turn)
        found.append(
            Trajectory(id=name, group=order.group, attempt=attempt, turns=tuple(turns), end=end)
        )
    return Group(id=order.group, task=order.task, size=len(members), members=tuple(found))


def build_ledger(counts: Mapping[str, int]) -> Ledger:
    """``{"admitted": 3, "dropped:lag": 1 ...}`` as a ``Ledger``; zero counts are left out."""
    by_reason: dict[str, dict[str, int]] = {"dropped": {}, "abandoned": {}, "failed": {}}
    for name, count in counts.items():
        state, colon, reason = name.partition(":")
        if colon and count and state in by_reason:
            by_reason[state][reason] = count
    return Ledger(
        admitted=counts.get("admitted", 0),
        pending=counts.get("pending", 0),
        trained=counts.get("trained", 0),
        **by_reason,
    )
