"""``report.png``: one picture of a finished (or running) run, from its own files."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.metrics import read_steps
from deploy.report_tide import draw_ranks, draw_savings, draw_switches, draw_tasks
from deploy.style import BLUE, GREEN, GREY, GRID, INK, ORANGE, RED, TITLE, empty, legend, style

# The picture is made without a display; a Figure that is not registered with pyplot needs no backend,
# and the setting keeps a user's configuration from opening one.
matplotlib.use("Agg")

_IN_A_ROW = 3


def write_report(run_folder: str | Path) -> Path:
    """Draw ``metrics.jsonl`` and, if there, ``summary.json``; returns the path of the picture.

    Raises FileNotFoundError without ``metrics.jsonl``, ValueError when it holds no step yet.
    """
    folder = Path(run_folder)
    records = read_steps(folder / "metrics.jsonl")
    steps = [record for record in records if record.get("reward") is not None]
    if not steps:
        raise ValueError(f"{folder / 'metrics.jsonl'} holds no step yet")
    summary_path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(summary_path.read_text()) if summary_path.exists() else {}

    charts = _charts(steps, records, summary)
    rows = math.ceil(len(charts) / _IN_A_ROW)
    size = (13.5, 0.8 + 3.4 * rows)
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    figure.suptitle(_title(folder, steps, summary), fontsize=13, color=INK, x=0.01, ha="left", weight="bold")
    grid = figure.subplots(rows, _IN_A_ROW).flat
    for axes, chart in itertools.zip_longest(grid, charts):
        if chart is None:
            axes.set_visible(False)
        else:
            chart(axes)
    path = folder / "report.png"
    figure.savefig(path)
    return path


def _charts(
    steps: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> list[Callable[[Axes], None]]:
    """What there is to draw: those of every run, then of parked tasks and of moved ranks if there are any."""
    ledger = summary.get("ledger") or steps[-1].get("ledger") or {}
    charts: list[Callable[[Axes], None]] = [
        lambda axes: draw_reward(axes, steps, records),
        lambda axes: draw_throughput(axes, steps),
        lambda axes: draw_lag(axes, steps),
        lambda axes: draw_waits(axes, steps),
        lambda axes: draw_learning(axes, steps),
        lambda axes: draw_ledger(axes, ledger),
    ]
    moves = summary.get("moves") or []
    if moves or len({tuple(sorted((step.get("ranks") or {}).items())) for step in steps}) > 1:
        charts += [
            lambda axes: draw_ranks(axes, steps),
            lambda axes: draw_switches(axes, moves),
            lambda axes: draw_savings(axes, moves),
        ]
    if any(any((step.get("admission_events") or {}).values()) for step in steps):
        charts.append(lambda axes: draw_tasks(axes, steps))
    return charts


def _outcome(reward: Any) -> Any:
    """The outcome of a step's reward record, which may be a number or numbers by name."""
    return reward.get("outcome", math.nan) if isinstance(reward, Mapping) else reward


def draw_reward(axes: Axes, steps: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> None:
    """Reward with a band of one standard deviation, success, and held-out evaluation as points."""
    style(axes, "Reward and success", "optimizer step")
    x = [record["step"] for record in steps]
    # Named rewards lie beside the outcome, which is what is trained; they are no parts of a sum.
    outcomes = [_outcome(record["reward"]) for record in steps]
    reward = _series([{"reward": value} for value in outcomes], "reward")
    deviation = _series(steps, "reward_std")
    smooth = smoothed(reward, window=max(1, len(reward) // 20))
    axes.plot(x, reward, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(x, smooth, color=BLUE, linewidth=2, label="reward (mean of the batch)")
    low = [m - d for m, d in zip(smooth, deviation, strict=True)]
    high = [m + d for m, d in zip(smooth, deviation, strict=True)]
    axes.fill_between(x, low, high, color=BLUE, alpha=0.10, linewidth=0, label="± 1 std")
    success = _series(steps, "success")
    if any(math.isfinite(value) for value in success):
        axes.plot(x, smoothed(success, max(1, len(x) // 20)), color=GREEN, linewidth=1.5, label="success")
    suites: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        results = record.get("eval_success")
        if isinstance(results, Mapping):
            for suite, value in results.items():
                suites.setdefault(str(suite), []).append((record["step"], float(value)))
    for (suite, points), marker in zip(suites.items(), "DosX^v" * len(suites), strict=False):
        axes.plot(
            [step for step, _ in points], [value for _, value in points],
            color=ORANGE, marker=marker, markersize=7, linestyle="--", linewidth=1,
            label=f"held out: {suite}",
        )  # fmt: skip
    axes.legend(frameon=False, fontsize=8, loc="best")


def draw_throughput(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Tokens per second that were trained, beside those sampled."""
    style(axes, "Throughput (tokens per second)", "optimizer step")
    x = [record["step"] for record in steps]
    for name, color, label in (
        ("sampled_tok_s", GREY, "sampled"),
        ("goodput_tok_s", BLUE, "trained within the bound (goodput)"),
    ):
        values = _series(steps, name)
        if any(math.isfinite(value) for value in values):
            axes.plot(x, values, color=color, linewidth=1.5, label=label)
    axes.set_ylim(bottom=0)
    legend(axes)


def draw_lag(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """How many groups were trained at each lag."""
    style(axes, "Lag of trained groups (versions)", "lag")
    counts: Counter[int] = Counter()
    for record in steps:
        for lag, number in (record.get("lag_hist") or {}).items():
            counts[int(lag)] += int(number)
    if not counts:
        empty(axes, "no lag recorded")
        return
    lags = list(range(max(counts) + 1))
    bars = axes.bar(lags, [counts[lag] for lag in lags], color=BLUE, width=0.7)
    axes.bar_label(bars, fontsize=8, color=INK, padding=2)
    axes.set_xticks(lags)
    axes.set_ylabel("groups", fontsize=9, color=INK)


def draw_waits(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Seconds that generators and learners waited, per step, on top of each other."""
    style(axes, "Waiting per step (seconds)", "optimizer step")
    x = [record["step"] for record in steps]
    generator = [_zero(value) for value in _series(steps, "wait_rwt_s")]
    learner = [_zero(value) for value in _series(steps, "wait_twt_s")]
    axes.bar(x, generator, width=1.0, color=ORANGE, label="generators (RWT)", linewidth=0)
    axes.bar(x, learner, width=1.0, bottom=generator, color=BLUE, label="learner (TWT)", linewidth=0)
    axes.set_ylim(bottom=0)
    legend(axes)


def draw_learning(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Entropy on the left; engine against learner log-probs on a logarithmic scale at the right."""
    style(axes, "Entropy and log-prob mismatch", "optimizer step")
    x = [record["step"] for record in steps]
    axes.plot(x, _series(steps, "entropy"), color=GREEN, linewidth=1.5, label="entropy (nat)")
    axes.set_ylabel("entropy", fontsize=9, color=GREEN)
    mismatch = [value if value > 0 else math.nan for value in _series(steps, "lag0_max_log_ratio")]
    if any(math.isfinite(value) for value in mismatch):
        right = axes.twinx()
        right.plot(x, mismatch, color=RED, linewidth=1, alpha=0.8)
        right.axhline(1e-3, color=RED, linewidth=1, linestyle=":")
        right.set_yscale("log")
        right.set_ylabel("max |log ratio| at lag 0, limit 1e-3 dotted", fontsize=9, color=RED)
        right.tick_params(labelsize=8, colors=RED)
        right.spines[["top", "left", "bottom"]].set_visible(False)
        right.spines["right"].set_color(GRID)


def draw_ledger(axes: Axes, ledger: Mapping[str, Any]) -> None:
    """Where every admitted trajectory went."""
    style(axes, "Ledger (trajectories)", "")
    rows: list[tuple[str, int, str]] = []
    for state, color in (
        ("pending", GREY), ("trained", GREEN), ("dropped", ORANGE), ("abandoned", ORANGE), ("failed", RED),
    ):  # fmt: skip
        value = ledger.get(state) or 0
        if isinstance(value, Mapping):
            rows += [(f"{state}: {reason}", int(number), color) for reason, number in sorted(value.items())]
            if not value:
                rows.append((state, 0, color))
        else:
            rows.append((state, int(value), color))
    rows.reverse()
    if not ledger:
        empty(axes, "no ledger recorded")
        return
    names, counts, colors = zip(*rows, strict=True)
    bars = axes.barh(names, counts, color=colors, height=0.6)
    axes.bar_label(bars, fontsize=8, color=INK, padding=3)
    axes.margins(x=0.15)
    axes.set_title(f"Ledger ({int(ledger.get('admitted') or 0):,} trajectories admitted)", **TITLE)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` finite values; nan where there is none."""
    result = []
    for index in range(len(values)):
        part = [value for value in values[max(0, index + 1 - window) : index + 1] if math.isfinite(value)]
        result.append(sum(part) / len(part) if part else math.nan)
    return result


def _series(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """One number per step; nan where it is missing. Values by tag are added up."""
    result = []
    for record in steps:
        value = record.get(name)
        if isinstance(value, Mapping):
            value = sum(_zero(inner) for inner in value.values())
        result.append(math.nan if value is None else float(value))
    return result


def _zero(value: float | None) -> float:
    return 0.0 if value is None or not math.isfinite(value) else float(value)


def _title(folder: Path, steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    seconds = float(steps[-1].get("t") or 0) - float(steps[0].get("t") or 0)
    text = f"Springtide: {summary.get('name') or folder.name}, {steps[-1]['step']} steps"
    return f"{text} in {seconds / 60:.1f} min" if seconds > 0 else text
