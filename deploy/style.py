"""The look of all charts: colours, titles, axes, legends."""

from typing import Any

from matplotlib.axes import Axes

INK, GRID = "#22303c", "#d9dee3"
BLUE, ORANGE, GREEN, RED, GREY = "#2a6fbb", "#e08a1e", "#3a9a5b", "#c8443c", "#8a949e"

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


def legend(axes: Axes) -> None:
    """Names of what is drawn, if it has any."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="best")


def empty(axes: Axes, text: str) -> None:
    """Say why there is nothing to see."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
