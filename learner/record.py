"""Recorded steps: what a replay needs to make the same batches and losses.

One file per step, ``step-0000012.msgpack``: the step log entry (arrival order and lag verdicts),
the groups whole (seeds, sampled ids, behaviour log-probs, versions, rewards) and the metrics that
the live run computed.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster import codec
from cluster.types import Group, Record, StepRecord


class RecordedStep(Record, frozen=True):
    """One step of a recorded run."""

    record: StepRecord
    groups: tuple[Group, ...]
    metrics: dict[str, Any]


def write_step(
    folder: Path, record: StepRecord, groups: Sequence[Group], metrics: dict[str, Any]
) -> Path:
    """Write one step atomically; a step that is executed again replaces its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{record.step:07d}.msgpack"
    partial = path.with_suffix(".partial")
    partial.write_bytes(codec.encode(RecordedStep(record=record, groups=tuple(groups), metrics=metrics)))
    os.replace(partial, path)
    return path


def read_steps(folder: Path) -> Iterator[RecordedStep]:
    """Recorded steps in order. Raises FileNotFoundError when the run was not recorded."""
    paths = sorted(folder.glob("step-*.msgpack"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no recorded step; run with run.record=true")
    for path in paths:
        yield codec.decode(path.read_bytes(), RecordedStep)
