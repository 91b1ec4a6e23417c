"""Pictures of simulations: who did what when, what was waited for, how full the queue was, what it yields."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cluster.sim.compare import fastest, fixed_split, per_token
from cluster.sim.scenario import Result
from cluster.sim.statistics import Interval, interval
from cluster.sim.study import Study
from cluster.sim.vary import Varied
from deploy.style import BLUE, GREEN, GREY, GRID, INK, ORANGE, RED, legend, style

ROLES = {"generator": "#9cc3ea", "learner": "#f2c48a", "scorer": "#9ed3ae", "spare": "#e3e6e9"}
"""Colours of roles; a rank that waits is drawn in ``WAIT`` over them."""
WAIT = "#5d6670"
BINS = 480
"""Columns of the Gantt chart: a wait shorter than its column is drawn by its share of it."""


def draw_study(
    path: str | Path,
    title: str,
    ours: Result,
    static: Result | None,
    results: Mapping[str, Sequence[Result]],
    goodput: Mapping[str, Interval],
) -> Path:
    """Write one picture: Gantt of ``ours``, waits by cause, queue depth, goodput with intervals."""
    figure = Figure(figsize=(13.5, 8.2), dpi=90, facecolor="white", layout="constrained")
    figure.suptitle(title, fontsize=13, color=INK, x=0.01, ha="left", weight="bold")
    grid = figure.add_gridspec(2, 3)
    gantt(figure.add_subplot(grid[0, :]), ours)
    goodput_bars(figure.add_subplot(grid[1, 0]), goodput)
    wait_bars(figure.add_subplot(grid[1, 1]), results)
    depth_lines(figure.add_subplot(grid[1, 2]), ours, static)
    path = Path(path)
    figure.savefig(path)
    return path


def gantt(axes: Axes, result: Result, bins: int = BINS) -> None:
    """One row per rank, coloured by its role; dark where it waited. Vertical lines: moves."""
    style(axes, f"Roles of the ranks ({result.scenario.policy.name}); dark: waiting", "simulated seconds")
    end = _end(result)
    ranks = 1 + max((rank for _, rank, _ in result.roles), default=0)
    names = list(ROLES)
    codes = np.full((ranks, bins), names.index("spare"))
    for t, rank, role in sorted(result.roles):
        codes[rank, min(bins - 1, int(t / end * bins)) :] = names.index(role if role in ROLES else "spare")
    axes.imshow(
        codes, aspect="auto", interpolation="nearest", extent=(0, end, ranks - 0.5, -0.5),
        cmap=ListedColormap(list(ROLES.values())), vmin=0, vmax=len(ROLES) - 1,
    )  # fmt: skip
    axes.imshow(
        waiting(result.waits, ranks, end, bins), aspect="auto", interpolation="nearest",
        extent=(0, end, ranks - 0.5, -0.5), cmap=_fade(), vmin=0, vmax=1,
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set_ylabel("rank", fontsize=9, color=INK)
    used = {role for _, _, role in result.roles}
    handles = [Patch(color=color, label=role) for role, color in ROLES.items() if role in used]
    axes.legend(
        handles=[*handles, Patch(color=WAIT, label="waiting")], fontsize=8, frameon=False, ncols=5,
        loc="lower right", bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip


def waiting(
    waits: Sequence[tuple[float, float, int, str]], ranks: int, end: float, bins: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Share of each (rank, column) that was waited, 0..1. Shape [ranks, bins]."""
    share = np.zeros((ranks, bins))
    scale = bins / end
    for start, stop, rank, _ in waits:
        if rank >= ranks:
            continue
        low, high = max(0.0, start * scale), min(float(bins), stop * scale)
        first, last = int(low), min(bins - 1, int(high))
        if high <= low:
            continue
        if first == last:
            share[rank, first] += high - low
            continue
        share[rank, first] += first + 1 - low
        share[rank, first + 1 : last] += 1.0
        share[rank, last] += high - last
    clipped: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.clip(share, 0.0, 1.0)
    return clipped


def goodput_bars(axes: Axes, goodput: Mapping[str, Interval]) -> None:
    """Goodput of each policy with its interval over seeds."""
    style(axes, "Goodput (tokens per second, all ranks)", "")
    names = list(goodput)[::-1]
    means = [goodput[name].mean for name in names]
    colors = [BLUE if name.startswith("tide") else GREY for name in names]
    axes.barh(names, means, color=colors, height=0.6)
    for at, name in enumerate(names):
        _, low, high, n = goodput[name]
        if n > 1:
            axes.plot([max(0.0, low), high], [at, at], color=INK, linewidth=1.5)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)


def wait_bars(axes: Axes, results: Mapping[str, Sequence[Result]]) -> None:
    """Share of all rank-seconds that were waited, by side and cause."""
    style(axes, "Waiting (share of all rank-seconds)", "")
    names = list(results)[::-1]
    causes = {name: causes_of(results[name]) for name in names}
    every = sorted({cause for found in causes.values() for cause in found})
    palette = [ORANGE, BLUE, GREEN, RED, GREY, "#7b5ea7", "#b98f2d", "#4aa3a2", "#a45a3f", "#c7a0c9"]
    left = [0.0] * len(names)
    for number, cause in enumerate(every):
        width = [causes[name].get(cause, 0.0) for name in names]
        axes.barh(names, width, left=left, height=0.6, color=palette[number % len(palette)], label=cause)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set_xlim(0, 1)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    if every:
        axes.legend(frameon=False, fontsize=7, loc="lower right")


def causes_of(results: Sequence[Result]) -> dict[str, float]:
    """Waits by side and cause as a share of rank-seconds, mean over seeds, warm-up left out."""
    found: dict[str, list[float]] = {}
    for result in results:
        steps = [step for step in result.steps if step.step > result.scenario.warmup_steps]
        ranks = sum(steps[-1].roles.values()) if steps else 0
        total = result.seconds * ranks
        if not total:
            continue
        for side, kind in (("RWT", "rwt_s"), ("TWT", "twt_s")):
            for step in steps:
                for cause, seconds in getattr(step, kind).items():
                    found.setdefault(f"{side}: {cause}", []).append(seconds / total)
    return {cause: sum(values) / len(results) for cause, values in found.items()}


def depth_lines(axes: Axes, ours: Result, static: Result | None) -> None:
    """Ready groups over time."""
    style(axes, "Ready groups in the queue", "simulated seconds")
    for result, color in ((static, GREY), (ours, BLUE)):
        if result is None or not result.depth:
            continue
        times, depths = zip(*_thinned(result.depth), strict=True)
        axes.step(
            times, depths, where="post", color=color, linewidth=1.2, label=result.scenario.policy.name
        )
    axes.set_ylim(bottom=0)
    legend(axes)


def draw_sweeps(path: str | Path, title: str, varied: Sequence[Varied]) -> Path:
    """One row per swept key: goodput and waits per trained token over its values."""
    figure = Figure(figsize=(11, 0.8 + 3.0 * len(varied)), dpi=90, facecolor="white", layout="constrained")
    figure.suptitle(title, fontsize=13, color=INK, x=0.01, ha="left", weight="bold")
    grid = figure.add_gridspec(len(varied), 2)
    for row, one in enumerate(varied):
        goodput = figure.add_subplot(grid[row, 0])
        style(goodput, "Goodput (tokens per second, all ranks)", one.sweep.key)
        swept_lines(goodput, one, lambda found, name: found.goodput(name))
        waits = figure.add_subplot(grid[row, 1])
        style(waits, "Waiting (rank-milliseconds per trained token)", one.sweep.key)
        swept_lines(waits, one, lambda found, name: [1000 * s for s in per_token(found.results[name])])
        goodput.legend(frameon=False, fontsize=8, loc="best")
    path = Path(path)
    figure.savefig(path)
    return path


def swept_lines(axes: Axes, varied: Varied, figure: Callable[[Study, str], list[float]]) -> None:
    """``figure`` of ``tide`` and of the best system with a fixed split, with intervals over seeds."""
    numbers = varied.sweep.numbers()
    order = list(range(len(varied.studies)))
    at: list[float] = [float(index) for index in order]
    if numbers is None:
        axes.set_xticks(at, varied.sweep.values)
    else:
        at = numbers
        order.sort(key=lambda index: at[index])
        if min(at) > 0 and max(at) >= 4 * min(at):
            axes.set_xscale("log", base=2)
        axes.set_xticks(at, varied.sweep.values, minor=False)
        axes.minorticks_off()
    best = [fastest(found, fixed_split(found)) for found in varied.studies]
    for label, color, names in (
        ("best fixed split", GREY, best), ("tide, elastic", BLUE, ["tide"] * len(order)),
    ):  # fmt: skip
        points = [
            (at[index], interval(figure(varied.studies[index], name)))
            for index in order
            if (name := names[index]) is not None and name in varied.studies[index].results
        ]
        if not points:
            continue
        axes.plot([x for x, _ in points], [y.mean for _, y in points], "o-", color=color, label=label)
        for x, (_, low, high, n) in points:
            if n > 1:
                axes.plot([x, x], [max(0.0, low), high], color=color, linewidth=1)
    axes.set_ylim(bottom=0)


def _thinned(points: Sequence[tuple[float, int]], most: int = 2000) -> Sequence[tuple[float, int]]:
    return points[:: max(1, len(points) // most)]


def _end(result: Result) -> float:
    times = [step.t for step in result.steps] + [stop for _, stop, _, _ in result.waits] + [1e-9]
    return max(times)


def _fade() -> ListedColormap:
    """From nothing to the colour of waiting."""
    red, green, blue = (int(WAIT[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return ListedColormap([(red, green, blue, alpha) for alpha in np.linspace(0, 0.9, 32)])
