"""Calls to samples, samples to packed rows, rows to ranks. Pure numpy.

Two conventions hold in every array here. A mask entry belongs to the *predicted* token: it is
True exactly where the policy sampled ``ids[t]``, whatever the value of that id (an end token
counts, even where it doubles as the padding id). And every loss weight already carries the
global normaliser, so that the loss of a step is the plain sum of ``weight * surrogate`` over all
tokens of all rows of all ranks: neither micro-batches nor world size can change it.

Shapes: ``T`` tokens of a sample, ``R`` rows of a rank, ``L`` tokens of a row.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cluster.errors import LearnerLost
from cluster.pipeline import order
from cluster.types import Call, Group, Trajectory, floats, full_ids, ids

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Mode = Literal["call", "segment"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
NOT_SAMPLED = -1  # version of a token that no policy sampled


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trainable row: equal-length arrays over its tokens.

    ``behaviour`` holds the processed log-probs of the policy that sampled (0 where mask is
    False), ``versions`` the weights that sampled (-1 there), ``turns`` the turn index of the
    call that brought the token. ``temperature`` is one number: a row of mixed temperatures is
    refused.
    """

    trajectory: str
    group: str
    ids: Ints
    mask: Bools
    behaviour: Floats
    versions: Ints
    turns: NDArray[np.int16]
    temperature: float

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name)) for name in ("ids", "mask", "behaviour", "versions", "turns")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"sample of {self.trajectory}: array lengths differ: {lengths}")
        if len(self.ids) == 0:
            raise ValueError(f"sample of {self.trajectory} has no token")
        if self.mask[0]:
            raise ValueError(f"sample of {self.trajectory}: its first token has no context to train on")
        if not self.temperature > 0:
            raise ValueError(
                f"sample of {self.trajectory}: temperature {self.temperature} cannot be trained; "
                "sample training groups at a temperature above 0"
            )

    @property
    def trained(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.mask.sum())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RankBatch:
    """What one learner rank trains in one step: arrays ``[R, L]``, cheap to pickle.

    ``segments`` numbers the samples of a row from 1 (0 is padding); ``positions`` restart in
    each; ``sample`` is the index in the step's sample list (-1 is padding). Every rank of a step
    has the same ``R``, so all run the same micro-batches.
    """

    rank: int
    ids: Ints
    positions: Ints
    segments: Ints
    mask: Bools
    behaviour: Floats
    versions: Ints
    advantage: Floats
    weight: Floats
    temperature: Floats
    sample: Ints
    micro_rows: int
    global_tokens: int  # trained tokens of all ranks
    splits: tuple[int, ...] = ()  # ends of the micro-batches in rows; (): every ``micro_rows``

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    def micro_batches(self) -> list[slice]:
        """Row slices, one per forward and backward pass; as many on every rank."""
        if self.splits:
            return [slice(a, b) for a, b in zip((0, *self.splits), self.splits, strict=False)]
        return [slice(i, min(i + self.micro_rows, self.rows)) for i in range(0, self.rows, self.micro_rows)]

    def check(self, rank: int, version: int, step: int) -> None:
        """Raise LearnerLost unless a rank at ``version`` may train this batch as ``step``."""
        if version != step - 1:
            raise LearnerLost(
                f"rank {rank} is at version {version} and cannot make step {step}; "
                f"it can make step {version + 1}"
            )
        newest = int(self.versions.max(initial=NOT_SAMPLED))
        if newest > version:
            raise LearnerLost(f"token version {newest} is newer than the learner's, {version}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """All ranks' batches of one step, and how well they are filled."""

    ranks: tuple[RankBatch, ...]
    tokens: int  # real tokens, prompts included
    trained_tokens: int
    samples: int
    fill: float  # real tokens / (ranks * R * row_tokens)


def compile_group(group: Group, mode: Mode = "segment") -> list[Sample]:
    """Compile every member of a group to samples, member by member, in order.

    ``call`` gives a row per call; ``segment`` a row per context segment: a call that keeps the
    whole history extends the row, one that keeps less starts a new row in which the kept ids are
    context only. Rows without a sampled token are left out. Ids are those that were sampled or
    sent: nothing is tokenised here.

    Raises ValueError when arrays disagree in length, a call has no context, temperatures mix
    inside a row, or version spans do not cover the output exactly.
    """
    return [sample for member in group.members for sample in compile_trajectory(member, group.id, mode)]


def compile_trajectory(member: Trajectory, group: str, mode: Mode = "segment") -> list[Sample]:
    """Compile one trajectory: see ``compile_group``."""
    if mode not in ("call", "segment"):
        raise ValueError(f"mode {mode!r} is unknown (valid: call, segment)")
    calls = [(turn.turn, call) for turn in member.turns for call in turn.calls]
    rows = full_ids([call for _, call in calls])
    samples: list[Sample] = []
    row: _Row | None = None
    for (turn, call), full in zip(calls, rows, strict=True):
        if row is None or mode == "call" or call.keep < len(row.ids):
            if row is not None:
                samples.append(row.seal(member.id, group))
            row = _Row(full[: call.keep], turn, call.temperature)
        row.extend(member.id, turn, call)
        assert np.array_equal(row.ids, full), f"{member.id} call {call.call}: ids are not append-only"
    if row is not None:
        samples.append(row.seal(member.id, group))
    return [sample for sample in samples if sample.mask.any()]


class _Row:
    """A sample under construction."""

    def __init__(self, kept: Ints, turn: int, temperature: float) -> None:
        size = len(kept)
        self.ids = kept
        self.mask = np.zeros(size, bool)
        self.behaviour = np.zeros(size, np.float32)
        self.versions = np.full(size, NOT_SAMPLED, np.int32)
        self.turns = np.full(size, turn, np.int16)
        self.temperature = temperature

    def extend(self, trajectory: str, turn: int, call: Call) -> None:
        added, output, logprobs = ids(call.added), ids(call.output), floats(call.logprobs)
        where = f"{trajectory} call {call.call}"
        if len(logprobs) != len(output):
            raise ValueError(f"{where}: {len(output)} output ids but {len(logprobs)} log-probs")
        if len(self.ids) + len(added) == 0:
            raise ValueError(f"{where}: the prompt is empty, so its first token has no context")
        if call.temperature != self.temperature:
            raise ValueError(
                f"{where}: temperature {call.temperature} in a row sampled at {self.temperature}"
            )
        versions = np.full(len(output), NOT_SAMPLED, np.int32)
        reached = 0
        for span in call.versions:
            if span.start != reached or span.end > len(output) or span.version < 0:
                raise ValueError(f"{where}: version spans {call.versions} do not cover {len(output)} ids")
            versions[span.start : span.end] = span.version
            reached = span.end
        if reached != len(output):
            raise ValueError(f"{where}: version spans {call.versions} do not cover {len(output)} ids")
        blank, sampled = len(added), len(output)
        self.ids = np.concatenate([self.ids, added, output])
        self.mask = np.concatenate([self.mask, np.zeros(blank, bool), np.ones(sampled, bool)])
        self.behaviour = np.concatenate([self.behaviour, np.zeros(blank, np.float32), logprobs])
        self.versions = np.concatenate([self.versions, np.full(blank, NOT_SAMPLED, np.int32), versions])
        self.turns = np.concatenate([self.turns, np.full(blank + sampled, turn, np.int16)])

    def seal(self, trajectory: str, group: str) -> Sample:
        return Sample(
            trajectory=trajectory,
            group=group,
            ids=np.ascontiguousarray(self.ids, np.int32),
            mask=self.mask,
            behaviour=self.behaviour.astype(np.float32),
            versions=self.versions,
            turns=self.turns,
            temperature=self.temperature,
        )


def loss_weights(samples: Sequence[Sample], reduction: Reduction, constant: float = 1.0) -> list[Floats]:
    """Weight per token ``[T]`` of each sample, normalised over the whole step; 0 outside the mask.

    With ``n`` trajectories that have a trained token: ``token_mean`` gives every token
    ``1 / tokens``; ``sequence_mean`` gives a token ``1 / (n * tokens of its trajectory)``;
    ``constant`` gives ``1 / (n * constant)`` (Dr. GRPO, arXiv:2503.20783, with ``constant`` the
    longest response). A sequence is a trajectory, however many rows it was compiled to.
    Raises ValueError for a constant that is not positive.
    """
    if reduction not in ("token_mean", "sequence_mean", "constant"):
        raise ValueError(f"reduction {reduction!r} is unknown (valid: token_mean, sequence_mean, constant)")
    if not constant > 0:
        raise ValueError(f"constant = {constant}: must be positive")
    per_trajectory: dict[str, int] = {}
    for sample in samples:
        per_trajectory[sample.trajectory] = per_trajectory.get(sample.trajectory, 0) + sample.trained
    total = sum(per_trajectory.values())
    sequences = sum(count > 0 for count in per_trajectory.values())
    weights: list[Floats] = []
    for sample in samples:
        own = per_trajectory[sample.trajectory]
        divisor = {
            "token_mean": float(total),
            "sequence_mean": float(sequences * own),
            "constant": sequences * constant,
        }[reduction]
        value = 1.0 / divisor if own else 0.0
        weights.append(np.where(sample.mask, np.float32(value), np.float32(0)))
    return weights


def pack(
    samples: Sequence[Sample],
    coefficients: Sequence[Floats],
    row_tokens: int,
    ranks: int,
    micro_rows: int,
    reduction: Reduction = "token_mean",
    constant: float = 1.0,
    scoring: str = "",
) -> BatchPlan:
    """Pack samples into rows of at most ``row_tokens`` tokens and share the rows among ranks.

    ``coefficients`` are advantages per token ``[T]``, one array per sample. Rows are filled
    first-fit by decreasing length and dealt to the rank with the least work; both are
    deterministic in the order of ``samples``. With ``scoring`` (decoupled or colocated) the rows are dealt to
    micro-batches as ``cluster.pipeline.order`` says. A rank with fewer rows gets padding rows of weight
    zero. Raises ValueError for a sample longer than ``row_tokens`` or arrays that do not align.
    """
    if len(coefficients) != len(samples):
        raise ValueError(f"{len(samples)} samples but {len(coefficients)} coefficient arrays")
    for sample, values in zip(samples, coefficients, strict=True):
        if len(sample.ids) > row_tokens:
            raise ValueError(
                f"sample of {sample.trajectory} has {len(sample.ids)} tokens, but learner.row_tokens is "
                f"{row_tokens}; raise it to at least {len(sample.ids)}"
            )
        if len(values) != len(sample.ids):
            raise ValueError(
                f"sample of {sample.trajectory} has {len(sample.ids)} tokens, {len(values)} coefficients"
            )
    lengths = [len(sample.ids) for sample in samples]
    filled = _fill(lengths, row_tokens, ranks)
    splits: tuple[int, ...] = ()
    if scoring and filled:
        shares, splits = _deal_ordered(filled, lengths, ranks, row_tokens, micro_rows, scoring)
    else:
        shares = _deal(filled, lengths, ranks)
    rows = max(1, *(len(share) for share in shares))
    width = max([sum(lengths[i] for i in row) for share in shares for row in share], default=1)
    weights = loss_weights(samples, reduction, constant)
    trained = sum(sample.trained for sample in samples)
    batches = tuple(
        RankBatch(
            rank=rank,
            micro_rows=micro_rows,
            global_tokens=trained,
            splits=splits,
            **_arrays(share, rows, width, samples, coefficients, weights),
        )
        for rank, share in enumerate(shares)
    )
    tokens = sum(lengths)
    return BatchPlan(batches, tokens, trained, len(samples), tokens / (ranks * rows * row_tokens))


def _fill(lengths: Sequence[int], row_tokens: int, ranks: int) -> list[list[int]]:
    """First-fit decreasing. Rows are kept short enough that every rank can have one."""
    if not lengths:
        return []
    limit = min(row_tokens, max(max(lengths), math.ceil(sum(lengths) / ranks)))
    rows: list[list[int]] = []
    space: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row, free in enumerate(space):
            if free >= lengths[index]:
                rows[row].append(index)
                space[row] -= lengths[index]
                break
        else:
            rows.append([index])
            space.append(limit - lengths[index])
    return rows


def _deal(rows: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Longest row first, to the rank with the fewest tokens among those with a row to spare."""
    quota = math.ceil(len(rows) / ranks)
    size = [sum(lengths[i] for i in row) for row in rows]
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in sorted(range(len(rows)), key=lambda r: (-size[r], r)):
        rank = min((r for r in range(ranks) if len(shares[r]) < quota), key=lambda r: (load[r], r))
        shares[rank].append(rows[row])
        load[rank] += size[row]
    return shares


def _deal_ordered(
    rows: list[list[int]], lengths: Sequence[int], ranks: int, row_tokens: int, micro_rows: int, scoring: str
) -> tuple[list[list[list[int]]], tuple[int, ...]]:
    """Rows per rank, micro-batch after micro-batch (equally many on every rank), and where each ends."""
    sizes = [sum(lengths[i] for i in row) for row in rows]
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    splits = []
    for micro in order(sizes, row_tokens * micro_rows, scoring, ranks, micro_rows):
        deep = max(len(part) for part in micro)
        for rank, part in enumerate(micro):
            shares[rank] += [rows[row] for row in part] + [[]] * (deep - len(part))
        splits.append(len(shares[0]))
    return shares, tuple(splits)


def _arrays(
    share: list[list[int]],
    rows: int,
    width: int,
    samples: Sequence[Sample],
    coefficients: Sequence[Floats],
    weights: Sequence[Floats],
) -> dict[str, Any]:
    """The ``[R, L]`` arrays of one rank."""
    shape = (rows, width)
    out: dict[str, Any] = {
        "ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segments": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool),
        "behaviour": np.zeros(shape, np.float32),
        "versions": np.full(shape, NOT_SAMPLED, np.int32),
        "advantage": np.zeros(shape, np.float32),
        "weight": np.zeros(shape, np.float32),
        "temperature": np.ones(shape, np.float32),
        "sample": np.full(shape, -1, np.int32),
    }
    for row, members in enumerate(share):
        start = 0
        for number, index in enumerate(members, start=1):
            sample = samples[index]
            end = start + len(sample.ids)
            at = (row, slice(start, end))
            out["ids"][at] = sample.ids
            out["positions"][at] = np.arange(len(sample.ids))
            out["segments"][at] = number
            out["mask"][at] = sample.mask
            out["behaviour"][at] = np.where(sample.mask, sample.behaviour, 0)
            out["versions"][at] = np.where(sample.mask, sample.versions, NOT_SAMPLED)
            out["advantage"][at] = np.where(sample.mask, coefficients[index], 0)
            out["weight"][at] = weights[index]
            out["temperature"][at] = sample.temperature
            out["sample"][at] = index
            start = end
    return out
