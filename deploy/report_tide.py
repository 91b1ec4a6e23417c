"""Charts of the tide in a run's report: tasks parked and moved, ranks by role, moves of ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from deploy.style import BLUE, GREEN, GREY, INK, ORANGE, RED, empty, legend, style

_MOVES_DRAWN = 12


def draw_tasks(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """What became of tasks' places at the generators, per step."""
    style(axes, "Tasks parked, resumed, moved (per step)", "optimizer step")
    x = [record["step"] for record in steps]
    for event, color in (("parked", ORANGE), ("resumed", BLUE), ("moved", RED)):
        counts = [(record.get("admission_events") or {}).get(event) or 0 for record in steps]
        axes.plot(x, counts, color=color, linewidth=1.5, label=f"{event} ({sum(counts):,.0f})")
    axes.set_ylim(bottom=0)
    legend(axes)


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
        empty(axes, "no move was made")
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
        empty(axes, "no saving was predicted")
        return
    rows = range(len(told))
    predicted = [move["predicted_s"] for move in told]
    realised = [math.nan if move["realised_s"] is None else move["realised_s"] for move in told]
    axes.barh([row + 0.2 for row in rows], predicted, height=0.36, color=GREY, label="predicted")
    axes.barh([row - 0.2 for row in rows], realised, height=0.36, color=BLUE, label="realised")
    for row, move in zip(rows, told, strict=True):
        if move["realised_s"] is None:
            axes.text(0, row - 0.2, " not measured", va="center", fontsize=7, color=GREY)
    axes.set_yticks(rows, [f"{move['move']}: {move['kind']}" for move in told])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_ylim(-0.7, len(told) + 0.1)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
