"""The vocabulary: frozen records that cross process boundaries.

Token ids are ``int32`` and log-probs ``float32``, kept as raw little-endian bytes so that
the wire format is compact and exact; ``ids()`` and ``floats()`` view them as numpy arrays.
A *task* is one problem; a *group* the trajectories that share it and one baseline; a
*trajectory* one episode (the unit of the ledger); a *turn* one decision; a *call* one model
invocation; a *segment* the part of a trajectory streamed when a turn ends.
"""

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of wire records: immutable, keyword-only, defaults left off the wire."""


def pack_ids(values: Any) -> bytes:
    """``pack_ids([5, 6])`` -> 8 bytes, int32 little-endian."""
    return np.asarray(values, dtype="<i4").tobytes()


def pack_floats(values: Any) -> bytes:
    """``pack_floats([0.5])`` -> 4 bytes, float32 little-endian."""
    return np.asarray(values, dtype="<f4").tobytes()


def ids(raw: bytes) -> NDArray[np.int32]:
    """View packed token ids [T]."""
    return np.frombuffer(raw, dtype="<i4")


def floats(raw: bytes) -> NDArray[np.float32]:
    """View packed floats [T]."""
    return np.frombuffer(raw, dtype="<f4")


class StopReason(StrEnum):
    """Why a call ended."""

    STOP = "stop"  # a stop id was sampled (it is the last output id)
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the engine gave up on the request


class EndKind(StrEnum):
    """How a trajectory ended. Only ``FINISHED`` and ``TRUNCATED`` may carry a reward."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    ABANDONED = "abandoned"
    FAILED = "failed"


class TrajectoryState(StrEnum):
    """Ledger state. Exactly one at every instant; it only ever moves down this list."""

    PENDING = "pending"
    TRAINED = "trained"
    DROPPED = "dropped"
    ABANDONED = "abandoned"
    FAILED = "failed"


class GroupState(StrEnum):
    """Life of a group: OPEN (rolling out) -> READY -> CLAIMED -> CLOSED."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    CLOSED = "closed"


class ContextOp(StrEnum):
    """What produced the prompt of a call from the previous one."""

    APPEND = "append"
    EVICT = "evict"
    COMPRESS = "compress"
    BACKTRACK = "backtrack"
    INJECT = "inject"


class Purpose(StrEnum):
    """Which population a group belongs to; evaluation is outside capacity and ledger."""

    TRAIN = "train"
    EVAL = "eval"


class Sampling(Record, frozen=True):
    """How to sample: ``Sampling(temperature=1.0, max_tokens=4, stop_ids=(2,))``; 0 is greedy."""

    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    seed: int | None = None


class VersionSpan(Record, frozen=True, array_like=True):
    """Output tokens ``[start, end)`` were sampled by weights ``version``."""

    version: int
    start: int
    end: int


class Span(Record, frozen=True, array_like=True):
    """Output tokens ``[start, end)`` carry an open label (think, action, answer ...)."""

    start: int
    end: int
    label: str


class Call(Record, frozen=True):
    """One model invocation.

    The prompt is stored as a delta: the first ``keep`` ids of the previous call's
    prompt + output (0 for the first call), then ``added``. An append-only history has
    ``keep`` equal to that whole length, so storage is linear in new tokens and
    the exact prompt can always be rebuilt (``full_ids``).
    """

    call: int
    keep: int
    added: bytes  # int32
    output: bytes  # int32
    logprobs: bytes  # float32, one per output id: processed log-probs of the behaviour policy
    versions: tuple[VersionSpan, ...]
    stop: StopReason
    temperature: float
    op: ContextOp = ContextOp.APPEND
    party: str = "agent"
    policy: str = "policy"
    spans: tuple[Span, ...] = ()
    generator: str = ""
    cached_tokens: int = 0
    t_submit: float = 0.0  # seconds since the epoch, caller's clock
    t_start: float = 0.0  # first scheduled, engine's clock
    t_end: float = 0.0


class Turn(Record, frozen=True):
    """One decision: its calls, parsed actions, and the observation that came back."""

    turn: int
    calls: tuple[Call, ...]
    actions: tuple[str, ...] = ()
    observation: str = ""
    rewards: dict[str, float] = {}
    valid: bool = True
    changed: bool = True
    state_key: str | None = None
    snapshot: str | None = None
    env_s: float = 0.0
    cost: float = 0.0


class Segment(Record, frozen=True):
    """What is streamed when a turn ends; identity is (trajectory, attempt, turn)."""

    trajectory: str
    group: str
    attempt: int
    turn: Turn


class End(Record, frozen=True):
    """One end record per attempt of a trajectory.

    ``End(trajectory="g7.0", group="g7", attempt=0, kind=EndKind.FINISHED, turns=6, outcome=1.0)``.
    ``reason`` is the limit (truncated), the cause (abandoned) or the boundary (failed).
    """

    trajectory: str
    group: str
    attempt: int
    kind: EndKind
    turns: int
    reason: str = ""
    detail: str = ""
    outcome: float | None = None
    rewards: dict[str, float] = {}


class Task(Record, frozen=True):
    """One problem instance. ``Task(id="train-17", env="frozenlake", data={...}, seed=17)``."""

    id: str
    env: str
    seed: int
    data: dict[str, Any] = {}


class Order(Record, frozen=True):
    """The controller's word to an env worker: roll out this group.

    ``members`` are trajectory ids; ``attempt`` grows when a lost worker's group is ordered
    again. ``version`` is the lowest acknowledged version at admission.
    """

    group: str
    task: Task
    members: tuple[str, ...]
    attempt: int = 0
    purpose: Purpose = Purpose.TRAIN
    temperature: float = 1.0
    version: int = 0
    seed: int = 0
    epoch: int = 0
    suite: str = ""  # evaluation only


class Trajectory(Record, frozen=True):
    """A whole episode as read back from the queue: turns in order and the end record."""

    id: str
    group: str
    attempt: int
    turns: tuple[Turn, ...]
    end: End

    @property
    def versions(self) -> tuple[int, int]:
        """(oldest, newest) version over all sampled tokens; raises ValueError if none."""
        found = [s.version for t in self.turns for c in t.calls for s in c.versions]
        if not found:
            raise ValueError(f"trajectory {self.id} has no sampled token")
        return min(found), max(found)


class Group(Record, frozen=True):
    """A finished group: the valid members (finished or truncated) of one task."""

    id: str
    task: Task
    size: int  # members admitted, valid or not
    members: tuple[Trajectory, ...]

    @property
    def oldest(self) -> int:
        """Oldest version of any token in the group."""
        return min(m.versions[0] for m in self.members)


class StepRecord(Record, frozen=True):
    """Step log entry, written before the update: re-executed when an older checkpoint resumes."""

    step: int  # version after this step
    groups: tuple[str, ...]  # in batch order
    trajectories: tuple[str, ...]  # trained ids, in batch order
    lags: tuple[int, ...]  # one per group
    committed: bool = False


class Ledger(Record, frozen=True):
    """Counts of trajectories; every field is counted from its own key."""

    admitted: int = 0
    pending: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    abandoned: dict[str, int] = {}
    failed: dict[str, int] = {}

    @property
    def balanced(self) -> bool:
        """The conservation law (DESIGN: contract 1)."""
        ended = sum(self.dropped.values()) + sum(self.abandoned.values())
        return self.admitted == self.pending + self.trained + ended + sum(self.failed.values())


class Weights(Record, frozen=True):
    """Handle of published weights: where they lie and how to check them."""

    version: int
    location: str
    checksum: str
    nbytes: int
    policy: str = "policy"


class Request(Record, frozen=True):
    """One generation request. ``id`` is unique per attempt of a call."""

    id: str
    prompt: bytes  # int32
    sampling: Sampling
    session: str = ""  # trajectory id: keeps prefix affinity
    priority: int = 0
    group: str = ""
    group_done: float = 0.0  # share of the group's members that have ended
    evaluation: bool = False
    kind: str = ""  # of task, for diversity: the environment's name
    tool: str = ""  # what the environment was doing before this turn, for its latency quantiles
    waited_s: float = 0.0  # for a place, under earlier names of the same request
    mobile: bool = False  # it may be sent to another generator rather than wait
    fresh: int = 0  # ids of the prompt that training rows gain by it


class Completion(Record, frozen=True):
    """The answer to a ``Request``; ``error`` is set instead of tokens when it failed."""

    id: str
    output: bytes = b""
    logprobs: bytes = b""
    versions: tuple[VersionSpan, ...] = ()
    stop: StopReason = StopReason.ABORT
    cached_tokens: int = 0
    t_start: float = 0.0
    t_end: float = 0.0
    generator: str = ""
    error: str = ""
    retryable: bool = False


def full_ids(calls: list[Call]) -> list[NDArray[np.int32]]:
    """Rebuild the exact ids (prompt + output) of each call of one trajectory, in order.

    Raises ValueError if a call keeps more ids than its predecessor had.
    """
    rows: list[NDArray[np.int32]] = []
    previous = np.empty(0, dtype=np.int32)
    for call in calls:
        if call.keep > len(previous):
            raise ValueError(f"call {call.call} keeps {call.keep} of {len(previous)} ids")
        previous = np.concatenate([previous[: call.keep], ids(call.added), ids(call.output)])
        rows.append(previous)
    return rows
