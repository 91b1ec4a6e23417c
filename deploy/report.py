"""``report.png``: one picture of a finished (or running) run, from its own files."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.metrics import read_steps

# The picture is made without a display; a Figure that is not registered with pyplot needs no backend,
# and the setting keeps a user's configuration from opening one.
matplotlib.use("Agg")

INK, GRID = "#22303c", "#d9dee3"
_MOVES_DRAWN = 12
BLUE, ORANGE, GREEN, RED, GREY = "#2a6fbb", "#e08a1e", "#3a9a5b", "#c8443c", "#8a949e"


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

    moves = summary.get("moves") or []
    moved = bool(moves) or len({tuple(sorted((s.get("ranks") or {}).items())) for s in steps}) > 1
    height = 11.0 if moved else 7.6  # a third row of pictures
    figure = Figure(figsize=(13.5, height), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots(3 if moved else 2, 3)
    figure.suptitle(_title(folder, steps, summary), fontsize=13, color=INK, x=0.01, ha="left", weight="bold")
    draw_reward(axes[0][0], steps, records)
    draw_throughput(axes[0][1], steps)
    draw_lag(axes[0][2], steps)
    draw_waits(axes[1][0], steps)
    draw_learning(axes[1][1], steps)
    draw_ledger(axes[1][2], summary.get("ledger") or steps[-1].get("ledger") or {})
    if moved:
        draw_ranks(axes[2][0], steps)
        draw_switches(axes[2][1], moves)
        draw_savings(axes[2][2], moves)
    path = folder / "report.png"
    figure.savefig(path)
    return path


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
    _legend(axes)


def draw_lag(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """How many groups were trained at each lag."""
    style(axes, "Lag of trained groups (versions)", "lag")
    counts: Counter[int] = Counter()
    for record in steps:
        for lag, number in (record.get("lag_hist") or {}).items():
            counts[int(lag)] += int(number)
    if not counts:
        _empty(axes, "no lag recorded")
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
    _legend(axes)


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
        _empty(axes, "no ledger recorded")
        return
    names, counts, colors = zip(*rows, strict=True)
    bars = axes.barh(names, counts, color=colors, height=0.6)
    axes.bar_label(bars, fontsize=8, color=INK, padding=3)
    axes.margins(x=0.15)
    axes.set_title(f"Ledger ({int(ledger.get('admitted') or 0):,} trajectories admitted)", **TITLE)


def draw_ranks(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Ranks by role, on top of each other."""
    style(axes, "Ranks by role", "optimizer step")
    x = [record["step"] for record in steps]
    colors = {"generator": BLUE, "learner": GREEN, "scorer": ORANGE, "spare": GREY}
    below = [0.0] * len(x)
    for role, color in colors.items():
        counts = [float((record.get("ranks") or {}).get(role, 0)) for record in steps]
        if any(counts):
            axes.bar(x, counts, width=1.0, bottom=below, color=color, label=role, linewidth=0)
            below = [low + count for low, count in zip(below, counts, strict=True)]
    axes.set_ylim(0, 1.25 * max(1.0, *below))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=4)


def draw_switches(axes: Axes, moves: Sequence[Mapping[str, Any]]) -> None:
    """What each move took, by part, beside what it was expected to take."""
    style(axes, "Moves: seconds by part (line: expected)", "")
    made = [move for move in moves if move["seconds"] is not None][-_MOVES_DRAWN:]
    if not made:
        _empty(axes, "no move was made")
        return
    names = sorted({name for move in made for name in move["parts"]})
    colors = dict(zip(names, (BLUE, ORANGE, GREEN, RED, INK) * len(names), strict=False))
    for row, move in enumerate(made):
        left = 0.0
        for name, seconds in move["parts"].items():
            axes.barh(row, seconds, left=left, color=colors[name], height=0.6)
            left += seconds
        axes.barh(row, max(0.0, move["seconds"] - left), left=left, color=GREY, height=0.6)
        axes.plot([move["cost_s"]] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.5)
    axes.set_yticks(range(len(made)), [f"{move['move']}: {move['kind']}" for move in made])
    for name, color in colors.items():
        axes.barh(0, 0, color=color, label=name)
    axes.barh(0, 0, color=GREY, label="rest")
    axes.set_ylim(-0.7, len(made) + 0.1)  # room for the legend
    axes.legend(frameon=False, fontsize=7, loc="upper left", ncols=4)


def draw_savings(axes: Axes, moves: Sequence[Mapping[str, Any]]) -> None:
    """Predicted against realised saving per step."""
    style(axes, "Moves: saving per step (seconds)", "")
    told = [move for move in moves if move["predicted_s"]][-_MOVES_DRAWN:]
    if not told:
        _empty(axes, "no saving was predicted")
        return
    rows = range(len(told))
    predicted = [move["predicted_s"] for move in told]
    realised = [math.nan if move["realised_s"] is None else move["realised_s"] for move in told]
    axes.barh([row + 0.2 for row in rows], predicted, height=0.36, color=GREY, label="predicted")
    axes.barh([row - 0.2 for row in rows], realised, height=0.36, color=BLUE, label="realised")
    axes.set_yticks(rows, [f"{move['move']}: {move['kind']}" for move in told])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_ylim(-0.7, len(told) + 0.1)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


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


TITLE: dict[str, Any] = {"fontsize": 10, "color": INK, "loc": "left", "weight": "bold"}


def style(axes: Axes, title: str, label: str) -> None:
    """Title, label of the x axis, and the look of all charts."""
    axes.set_title(title, **TITLE)
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(labelsize=8, colors=INK)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
