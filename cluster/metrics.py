"""Names of metrics, where they go, and the sums behind them.

The names are part of the interface: dashboards, alerts and tests rely on them, so a name that is not
in ``METRICS`` is refused. A record maps names to numbers; a metric with tags may map to a dictionary
instead, one level per tag in the order declared::

    {"reward": 0.4, "wait_rwt_s": {"weights": 0.1, "capacity": 2.0}, "lag_hist": {"0": 6, "1": 2}}

Counters are given as increments since the previous record, gauges as they stand.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from cluster.errors import nearest

Kind = Literal["gauge", "counter", "histogram"]
Interval = tuple[float, float]


class Metric(NamedTuple):
    """One row of the table; ``boundaries`` are those of a histogram's buckets, in its unit."""

    name: str
    unit: str
    kind: Kind
    tags: tuple[str, ...]
    help: str
    boundaries: tuple[float, ...] = ()


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # Throughput
        Metric("goodput_tok_s", "tok/s", "gauge", (), "tokens of applied steps per second, all ranks"),
        Metric("goodput_fraction", "1", "gauge", (), "tokens trained / tokens sampled, since the start"),
        Metric("sampled_tok_s", "tok/s", "gauge", (), "tokens sampled per second, all generators"),
        Metric("row_tokens", "tok", "counter", (), "tokens of the packed rows, masked ones included"),
        Metric("row_tok_s", "tok/s", "gauge", (), "tokens of trained rows per second, prompts included"),
        Metric("trained_tokens", "tok", "counter", (), "tokens that entered an applied step"),
        Metric("step_s", "s", "histogram", (), "optimizer step, from batch to update", _SECONDS),
        Metric("overlap_fraction", "1", "gauge", (), "share of learner busy time with a generator busy too"),
        # Ledger
        Metric("ledger", "trajectories", "gauge", ("state", "reason"), "trajectories by ledger state"),
        # Staleness
        Metric("lag_mean", "versions", "gauge", (), "mean lag of the groups in the batch"),
        Metric("lag_max", "versions", "gauge", (), "largest lag in the batch; never above run.max_lag"),
        Metric("lag_hist", "groups", "counter", ("lag",), "groups trained, by lag"),
        Metric("mixed_versions", "trajectories", "counter", (), "trained trajectories of several versions"),
        Metric("version", "versions", "gauge", (), "optimizer steps applied to the policy"),
        # Waits and the queue
        Metric("wait_rwt_s", "s", "counter", ("cause",), "time generators waited"),
        Metric("wait_twt_s", "s", "counter", ("cause",), "time learners waited"),
        Metric("ready_ras", "micro-batches", "gauge", (), "micro-batches ready when the step started"),
        Metric("ready_tprm_s", "s", "gauge", (), "mean arrival gap of the micro-batches that came later"),
        Metric("ready_head_age_s", "s", "gauge", (), "age of the oldest ready group"),
        Metric("ready_depth", "groups", "gauge", (), "groups ready and unclaimed"),
        Metric("running_groups", "groups", "gauge", (), "groups rolling out"),
        # Generators
        Metric("kv_hit", "1", "gauge", ("kind",), "share of prompt tokens found in prefix cache"),
        Metric("weights_load_s", "s", "histogram", ("generator",), "loading weights into engine", _SECONDS),
        Metric("prompt_tokens", "tok", "counter", (), "prompt tokens asked of generators"),
        Metric("cached_tokens", "tok", "counter", (), "of those, found in the prefix cache"),
        Metric("tasks", "tasks", "gauge", ("state",), "tasks at generators: resident, parked, queued"),
        Metric("admission_events", "tasks", "counter", ("event",), "tasks parked, resumed, moved elsewhere"),
        # Ranks
        Metric("scorer_busy_s", "s", "counter", (), "rank-seconds spent scoring, wherever it ran"),
        Metric("scored_ahead", "1", "gauge", (), "share of trained tokens scored before their group's claim"),
        Metric("ranks", "ranks", "gauge", ("role",), "ranks by role"),
        Metric("restarts", "1", "counter", ("role",), "actors started again after a failure"),
        Metric("switch_seconds", "s", "histogram", ("kind",), "moving a rank between roles", _SECONDS),
        Metric("switch_predicted_s", "s", "gauge", (), "time per step that the last move should save"),
        Metric("switch_realised_s", "s", "gauge", (), "time per step that the last move did save"),
        # Learning
        Metric("reward", "1", "gauge", ("name",), "mean over the batch's trajectories"),
        Metric("reward_std", "1", "gauge", (), "standard deviation over the batch's trajectories"),
        Metric("success", "1", "gauge", (), "share of the batch's trajectories that solved their task"),
        Metric("turns_mean", "turns", "gauge", (), "mean turns per trajectory of the batch"),
        Metric("truncated_fraction", "1", "gauge", (), "share of the batch's trajectories that met a limit"),
        Metric("group_zero_std_fraction", "1", "gauge", (), "share of groups with constant reward"),
        Metric("loss", "1", "gauge", (), "objective, as minimised"),
        Metric("grad_norm", "1", "gauge", (), "gradient norm before clipping"),
        Metric("entropy", "nat", "gauge", (), "mean entropy of the trained tokens"),
        Metric("clip_fraction", "1", "gauge", (), "share of tokens whose ratio was clipped"),
        Metric("ratio_mean", "1", "gauge", (), "mean importance ratio of the trained tokens"),
        Metric("kl", "nat", "gauge", (), "divergence from the reference"),
        Metric("lr", "1", "gauge", (), "learning rate"),
        Metric("skipped", "steps", "counter", (), "updates skipped: nothing to train, or not finite"),
        Metric("mismatch_kl", "nat", "gauge", (), "learner against generator, k3, at equal version"),
        Metric("mismatch_max_log_ratio", "nat", "gauge", (), "largest |log ratio| of the same tokens"),
        Metric("lag0_max_log_ratio", "nat", "gauge", (), "the same, of tokens sampled at lag 0"),
        Metric("lag0_tokens", "tok", "counter", (), "tokens trained whose whole context is at lag 0"),
        Metric("signal_effect_size", "1", "gauge", ("name",), "how much a signal moved the advantages"),
        Metric("eval_success", "1", "gauge", ("suite",), "share of evaluation tasks solved"),
        # Environments
        Metric("env_step_s", "s", "histogram", (), "one environment step", _SECONDS),
        Metric("env_failures", "1", "counter", ("boundary",), "trajectories failed, by boundary"),
    )
}


class MetricSink(Protocol):
    """Takes records. Unknown names raise ValueError; ``close`` may be called twice."""

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Take what was measured for optimizer step ``step``."""

    def close(self) -> None:
        """Let go of what the sink holds."""


class Sample(NamedTuple):
    """One number of one time series."""

    metric: Metric
    tags: dict[str, str]
    value: float


def samples(values: Mapping[str, Any]) -> Iterator[Sample]:
    """Unfold a record; a tag that has no level of its own is "". Raises ValueError on unknown names."""
    for name, value in values.items():
        metric = METRICS.get(name)
        if metric is None:
            raise ValueError(f"unknown metric {name!r}{nearest(name, METRICS)}")
        for path, number in _leaves(value):
            if len(path) > len(metric.tags):
                raise ValueError(f"metric {name!r} has tags {metric.tags}, got {path}")
            padded = path + ("",) * (len(metric.tags) - len(path))
            yield Sample(metric, dict(zip(metric.tags, padded, strict=True)), number)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif value is not None:
        yield path, float(value)


class JsonlSink:
    """One JSON object per line: ``t`` (seconds since the epoch), ``step``, then the record as given.

    Each line is a single ``write`` to a file opened for appending, so lines of several writers do not
    mix and a crash tears at most the last one. Numbers that are not finite become null.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a torn line of a crashed writer
            os.write(self._file, b"\n")

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line. Raises ValueError for unknown names, OSError when the disk refuses."""
        for _ in samples(values):  # names and shapes are checked before anything is written
            pass
        line = json.dumps({"t": round(self._clock(), 3), "step": int(step), **_plain(values)}) + "\n"
        raw = line.encode()
        written = os.write(self._file, raw)
        if written != len(raw):
            raise OSError(f"only {written} of {len(raw)} bytes of a metrics line were written")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _plain(value: Any) -> Any:
    """Plain JSON values: numpy scalars become numbers, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if value is None or isinstance(value, (bool, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class FanOut:
    """Hands each record to several sinks, in order."""

    def __init__(self, sinks: Iterable[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """See ``MetricSink``."""
        for sink in self._sinks:
            sink.record(step, values)

    def close(self) -> None:
        """See ``MetricSink``."""
        for sink in self._sinks:
            sink.close()


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, one per step in order of step.

    Lines of the same step are merged and later ones win, because a resumed run executes some steps
    again. A torn line (the end of a crashed run) is left out.
    """
    merged: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            merged.setdefault(entry["step"], {}).update(entry)
    return [merged[step] for step in sorted(merged)]


class Rate:
    """Amount per second over the last ``window_s`` seconds (less at the start)."""

    def __init__(self, window_s: float, start: float) -> None:
        self._window_s = window_s
        self._start = start
        self._events: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """Count ``amount`` at time ``now`` (seconds, never decreasing)."""
        self._events.append((now, amount))
        self._sum += amount

    def value(self, now: float) -> float:
        """The rate at ``now``."""
        while self._events and self._events[0][0] <= now - self._window_s:
            self._sum -= self._events.popleft()[1]
        elapsed = min(self._window_s, now - self._start)
        return self._sum / elapsed if elapsed > 0 and self._events else 0.0


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint sorted intervals that cover the same time; empty and reversed ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_seconds(intervals: Iterable[Interval]) -> float:
    """Time covered by at least one interval."""
    return sum(end - start for start, end in union(intervals))


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Time covered by both sides, as disjoint sorted intervals."""
    left, right = union(first), union(second)
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlap_fraction(learner: Iterable[Interval], generator: Iterable[Interval]) -> float:
    """Share of the learner's busy time during which at least one generator was busy, 0 to 1.

    0 for synchronous training and when the learner was never busy.
    """
    learner = list(learner)
    busy = busy_seconds(learner)
    return busy_seconds(intersection(learner, generator)) / busy if busy > 0 else 0.0
