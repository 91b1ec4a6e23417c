"""Every record survives the wire, and another msgpack reader sees the same values."""

import inspect
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import types
from cluster.codec import WIRE_VERSION, clean, decode, encode
from cluster.types import (
    Call,
    Completion,
    ContextOp,
    End,
    EndKind,
    Group,
    Ledger,
    Order,
    Purpose,
    Record,
    Request,
    Sampling,
    Segment,
    Span,
    StepRecord,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    Weights,
    floats,
    full_ids,
    ids,
    pack_floats,
    pack_ids,
)


def call(index: int = 0, keep: int = 0, added: Any = (5, 6), output: Any = (7, 8), **more: Any) -> Call:
    count = len(output)
    fields = {
        "logprobs": pack_floats([-0.5] * count),
        "versions": (VersionSpan(version=3, start=0, end=count),),
        "stop": StopReason.STOP,
        "temperature": 0.7,
    }
    return Call(call=index, keep=keep, added=pack_ids(added), output=pack_ids(output), **{**fields, **more})


TASK = Task(id="train-17", env="frozenlake", seed=17, data={"map": ["SF", "FG"], "slip": 0.25, "n": [1, 2]})
TURN = Turn(
    turn=1,
    calls=(call(spans=(Span(start=0, end=1, label="think"),), op=ContextOp.EVICT, party="judge"),),
    actions=("up", "left"),
    observation="ice ❄ 𝄞 \x00 \u202eabc",
    rewards={"success": 1.0, "format": float("inf")},
    valid=False,
    state_key="s3",
    snapshot="snap-9",
    env_s=0.25,
    cost=1.5,
)
END = End(
    trajectory="g7.0",
    group="g7",
    attempt=1,
    kind=EndKind.TRUNCATED,
    turns=1,
    reason="turns",
    outcome=0.5,
)
TRAJECTORY = Trajectory(id="g7.0", group="g7", attempt=1, turns=(TURN,), end=END)

EXAMPLES: tuple[Record, ...] = (
    Sampling(max_tokens=4, stop_ids=(2, 9), temperature=0.0, seed=2**40),
    VersionSpan(version=3, start=0, end=2),
    Span(start=1, end=2, label="action"),
    call(),
    TURN,
    Segment(trajectory="g7.0", group="g7", attempt=1, turn=TURN),
    END,
    TASK,
    Order(group="g7", task=TASK, members=("g7.0", "g7.1"), purpose=Purpose.EVAL, suite="held-out", epoch=4),
    TRAJECTORY,
    Group(id="g7", task=TASK, size=2, members=(TRAJECTORY,)),
    StepRecord(step=4, groups=("g7",), trajectories=("g7.0",), lags=(1,), committed=True),
    Ledger(admitted=9, pending=1, trained=4, dropped={"stale": 2}, abandoned={"quit": 1}, failed={"env": 1}),
    Weights(version=4, location="/dev/shm/w4", checksum="ab12", nbytes=2**33),
    Request(id="g7.0/1/0", prompt=pack_ids([1, 2]), sampling=Sampling(max_tokens=4), session="g7.0"),
    Completion(id="g7.0/1/0", output=pack_ids([3]), logprobs=pack_floats([-0.1]), error="", retryable=True),
)


def test_examples_cover_every_record() -> None:
    found = {
        kind
        for _, kind in inspect.getmembers(types, inspect.isclass)
        if issubclass(kind, Record) and kind is not Record
    }
    assert {type(example) for example in EXAMPLES} == found


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_round_trip(record: Record) -> None:
    assert decode(encode(record), type(record)) == record


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_another_reader_sees_the_same(record: Record) -> None:
    raw = encode(record)
    assert raw[0] == WIRE_VERSION
    theirs = msgpack.unpackb(raw[1:], strict_map_key=False)
    ours = msgspec.to_builtins(record, builtin_types=(bytes,), str_keys=False)
    assert theirs == as_lists(ours)


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(inner) for inner in value]
    return value


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_records_are_immutable(record: Record) -> None:
    name = msgspec.structs.fields(record)[0].name
    with pytest.raises(AttributeError):
        setattr(record, name, getattr(record, name))


@pytest.mark.parametrize("raw", [b"", bytes([WIRE_VERSION + 1]) + encode(TASK)[1:], encode(TASK)[1:]])
def test_foreign_wire_version_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="wire version"):
        decode(raw, Task)


@pytest.mark.parametrize("raw", [encode(TASK)[:-1], encode(TASK) + b"\x00", bytes([WIRE_VERSION]) + b"\xc1"])
def test_damaged_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a Task"):
        decode(raw, Task)


def test_another_record_is_refused() -> None:
    with pytest.raises(ValueError, match="not a End"):
        decode(encode(TASK), End)


ANY_TEXT = st.text(st.characters(codec=None), max_size=30)  # lone surrogates included


@given(ANY_TEXT)
def test_cleaned_text_always_fits(text: str) -> None:
    turn = Turn(turn=0, calls=(), observation=clean(text))
    assert decode(encode(turn), Turn) == turn
    assert len(clean(text)) == len(text)


def test_clean_replaces_lone_surrogates_alone() -> None:
    assert clean("a\ud83db") == "a\ufffdb"
    assert clean("\udc00\ud83d") == "\ufffd\ufffd"
    assert clean("plain 😀 \x00") == "plain 😀 \x00"
    with pytest.raises(UnicodeEncodeError):
        encode(Turn(turn=0, calls=(), observation="a\ud83d"))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_ids_are_exact(values: list[int]) -> None:
    assert ids(pack_ids(values)).tolist() == values
    assert len(pack_ids(values)) == 4 * len(values)


@given(st.lists(st.floats(width=32), max_size=20))
def test_floats_are_exact_to_the_bit(values: list[float]) -> None:
    packed = pack_floats(values)
    assert floats(packed).tobytes() == np.asarray(values, dtype="<f4").tobytes()


def test_ids_beyond_int32_are_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_full_ids_rebuild_every_prompt() -> None:
    calls = [
        call(0, keep=0, added=(1, 2), output=(3,)),
        call(1, keep=3, added=(4,), output=(5, 6)),  # appended to
        call(2, keep=2, added=(9,), output=(7,)),  # everything after id 2 evicted
    ]
    assert [row.tolist() for row in full_ids(calls)] == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 9, 7]]


def test_full_ids_refuse_what_was_never_there() -> None:
    with pytest.raises(ValueError, match="call 1 keeps 4 of 3 ids"):
        full_ids([call(0, added=(1, 2), output=(3,)), call(1, keep=4)])


def test_versions_span_all_calls() -> None:
    spans = (VersionSpan(version=5, start=0, end=1), VersionSpan(version=6, start=1, end=2))
    turns = (TURN, Turn(turn=2, calls=(call(versions=spans),)))
    trajectory = Trajectory(id="g7.0", group="g7", attempt=0, turns=turns, end=END)
    assert trajectory.versions == (3, 6)
    late = Trajectory(id="g7.1", group="g7", attempt=0, turns=turns[1:], end=END)
    assert Group(id="g7", task=TASK, size=2, members=(late, trajectory)).oldest == 3
    with pytest.raises(ValueError, match="no sampled token"):
        _ = Trajectory(id="g7.2", group="g7", attempt=0, turns=(), end=END).versions


def test_ledger_balance() -> None:
    ended = {"dropped": {"stale": 2}, "abandoned": {"quit": 1}, "failed": {"env": 1}}
    ledger = Ledger(admitted=9, pending=1, trained=4, **ended)
    assert ledger.balanced
    assert not msgspec.structs.replace(ledger, trained=5).balanced
    assert not msgspec.structs.replace(ledger, failed={"env": 1, "engine": 1}).balanced
