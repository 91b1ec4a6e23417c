"""The terminal view of a run: phases while it starts, a live panel while it trains, a table at the end.

On a terminal the panel is redrawn in place. Elsewhere (logs of continuous integration) every phase
is a line, and so is the state of the run about every ten seconds.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.config import Config
from deploy.moves import roles_line

LINE_EVERY_S = 10.0
_BARS = "▁▂▃▄▅▆▇█"
MOVES_SHOWN = 3
_HISTORY = 60  # steps kept for the reward curve


class View:
    """Use as a context manager; call ``update`` as often as you like.

    ``update`` takes any subset of these keys and keeps the last value of each: ``step``, ``steps``,
    ``version``; ``reward``, ``reward_std``, ``success``, ``loss``, ``grad_norm``, ``entropy``;
    ``goodput_tok_s``, ``sampled_tok_s``, ``overlap_fraction``; ``lag_mean``, ``lag_max``, ``max_lag``;
    ``ready_depth``, ``running_groups``, ``wait_rwt_s``, ``wait_twt_s``; ``mismatch_max_log_ratio``;
    ``ledger`` (the fields of ``cluster.types.Ledger``); ``tasks`` (one line: see ``tasks_line``);
    ``ranks`` (name -> state, "ok" when healthy);
    ``roles`` (one line: ranks by role, the move under way, the target); ``moves`` (the last, a line each).
    """

    def __init__(
        self,
        title: str,
        steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._title = title
        self._state: dict[str, Any] = {"step": 0, "steps": steps}
        self._rewards: list[float] = []
        self._began = clock()
        self._first: tuple[float, int] | None = None  # (time, step) of the first status
        self._last_line = float("-inf")
        self._live: Live | None = None
        self._last_step = -1
        self._last_printed = -1

    def __enter__(self) -> Self:
        self._console.print(Text(self._title, style="bold"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """One line per phase of the start, with the seconds it took: ``with view.phase("...")``."""
        began = self._clock()
        if self._console.is_terminal and self._live is None:
            with self._console.status(text):
                yield
        else:
            yield
        self._console.print(f"  {text} [dim]{self._clock() - began:.1f} s[/dim]", highlight=False)

    def note(self, text: str) -> None:
        """One line that stays on screen above the panel: a failure survived, a checkpoint, a rank moved."""
        self._console.print(Text(f"  {text}"))

    def update(self, status: Mapping[str, Any]) -> None:
        """Take a new status and draw it."""
        self._state.update(status)
        step, now = int(self._state["step"]), self._clock()
        before_any = self._state.get("reward") is None
        if self._first is None or (before_any and step != self._first[1]):  # a resumed run starts beyond 0
            self._first = (now, step)
        if step != self._last_step and self._state.get("reward") is not None:
            self._rewards = [*self._rewards, float(self._state["reward"])][-_HISTORY:]
            self._last_step = step
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(self._panel(now))
        elif now - self._last_line >= LINE_EVERY_S or (
            step >= int(self._state["steps"]) and step != self._last_printed
        ):
            self._console.print(self._line(now), highlight=False, soft_wrap=True)
            self._last_line, self._last_printed = now, step

    def stop(self) -> None:
        """Take the panel away; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(self, rows: Mapping[str, Any], title: str = "Summary") -> None:
        """The closing table: names and values, in the order given."""
        self.stop()
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in rows.items():
            table.add_row(Text(name, style="dim"), Text(number(value)))
        self._console.print(table)

    def eta_s(self, now: float) -> float | None:
        """Seconds left at the pace since the first status; None before a step was made."""
        if self._first is None:
            return None
        made = int(self._state["step"]) - self._first[1]
        if made <= 0:
            return None
        return (now - self._first[0]) / made * max(0, int(self._state["steps"]) - int(self._state["step"]))

    def _line(self, now: float) -> str:
        state, eta = self._state, self.eta_s(now)
        parts = [f"step {state['step']}/{state['steps']}", f"elapsed {duration(now - self._began)}"]
        if eta is not None:
            parts.append(f"left {duration(eta)}")
        for name, label in (
            ("reward", "reward"), ("success", "success"), ("goodput_tok_s", "goodput tok/s"),
            ("lag_mean", "lag mean"), ("lag_max", "lag max"), ("ready_depth", "ready"),
            ("wait_rwt_s", "RWT s"), ("wait_twt_s", "TWT s"),
        ):  # fmt: skip
            if state.get(name) is not None:
                parts.append(f"{label} {number(state[name])}")
        if isinstance(state.get("ledger"), Mapping):
            parts.append(ledger_line(state["ledger"]))
        if state.get("tasks"):
            parts.append(f"tasks {state['tasks']}")
        if state.get("roles"):
            parts.append(f"ranks {state['roles']}")
        ill = [f"{name} {word}" for name, word in self._ranks().items() if word != "ok"]
        return " | ".join([*parts, *ill])

    def _panel(self, now: float) -> RenderableType:
        state, eta = self._state, self.eta_s(now)
        step, steps = int(state["step"]), int(state["steps"])
        head = Table.grid(padding=(0, 1))
        left = f"{duration(eta)} left" if eta is not None else "..."
        head.add_row(
            f"step {step}/{steps}",
            ProgressBar(total=max(1, steps), completed=step, width=32),
            f"{duration(now - self._began)} elapsed, {left}",
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            "reward", self._show("reward", "{} ± {}", "reward_std"), "success", self._show("success"),
            "curve", sparkline(self._rewards),
        )  # fmt: skip
        bound = state.get("max_lag", "?")
        grid.add_row(
            "goodput", self._show("goodput_tok_s", "{} tok/s"),
            "sampled", self._show("sampled_tok_s", "{} tok/s"),
            "lag", self._show("lag_mean", "mean {}, max {}, bound " + str(bound), "lag_max"),
        )  # fmt: skip
        grid.add_row(
            "ready", self._show("ready_depth", "{} groups"),
            "running", self._show("running_groups", "{} groups"),
            "waits", self._show("wait_rwt_s", "RWT {} s, TWT {} s", "wait_twt_s"),
        )  # fmt: skip
        grid.add_row(
            "loss", self._show("loss"), "grad", self._show("grad_norm"),
            "mismatch", self._show("mismatch_max_log_ratio", "max |log ratio| {}"),
        )  # fmt: skip
        lines: list[RenderableType] = [head, Text(""), grid, Text("")]
        if isinstance(state.get("ledger"), Mapping):
            lines.append(Text(ledger_line(state["ledger"]), style="cyan"))
        if state.get("tasks"):
            lines.append(Text(f"tasks  {state['tasks']}"))
        ranks = Text()
        for name, word in self._ranks().items():
            ranks.append("● ", style="green" if word == "ok" else "red")
            ranks.append(f"{name}{'' if word == 'ok' else ' ' + word}   ")
        if ranks:
            lines.append(ranks)
        if state.get("roles"):
            lines.append(Text(f"ranks  {state['roles']}"))
        lines += [Text(f"  {line}", style="dim") for line in state.get("moves") or ()]
        return Panel(Group(*lines), title=self._title, title_align="left", border_style="blue")

    def _show(self, name: str, form: str = "{}", *others: str) -> Text:
        values = [self._state.get(key) for key in (name, *others)]
        if values[0] is None:
            return Text("-", style="dim")
        return Text(form.format(*(number(value) for value in values)), style="bold")

    def _ranks(self) -> dict[str, str]:
        ranks = self._state.get("ranks")
        return {str(name): str(word) for name, word in ranks.items()} if isinstance(ranks, Mapping) else {}


def view_status(status: dict[str, Any], config: Config) -> dict[str, Any]:
    """The controller's status in this view's words."""
    step = dict(status["step"])
    rewards = step.pop("reward", None)
    shown: dict[str, Any] = {"step": status["version"]} | {
        name: step[name]
        for name in ("step", "reward_std", "success", "loss", "grad_norm", "entropy", "lag_mean",
                     "lag_max", "wait_rwt_s", "wait_twt_s", "goodput_tok_s", "overlap_fraction",
                     "sampled_tok_s", "mismatch_max_log_ratio")
        if name in step
    }  # fmt: skip
    if isinstance(rewards, dict):
        shown["reward"] = rewards.get("outcome", 0.0)
    ranks = {name: "ok" if healthy else "starting" for name, (healthy, _, _) in status["generators"].items()}
    moves = [switch_line(record) for record in status["roles"]["switches"][-MOVES_SHOWN:]]
    return shown | {
        "version": status["version"],
        "max_lag": config.run.max_lag,
        "ready_depth": status["ready_depth"],
        "running_groups": status["open_groups"],
        "ledger": status["ledger"],
        "tasks": tasks_line(status["tasks"], status["admission"]),
        "ranks": ranks,
        "roles": roles_line(status["roles"]),
        "moves": moves,
    }


def switch_line(record: Mapping[str, Any]) -> str:
    """One record of the switch ledger: ``step 12 generator>learner done, 4.2 s (expected 6.0), saves ...``"""
    text = f"step {record['step']} {record['move']} {record['state']}"
    if record["cost_s"] is not None:
        text += f", {record['cost_s']:.1f} s (expected {record['cost_predicted_s']:.1f})"
    if record["predicted_s"]:
        realised = record["realised_s"]
        text += f", saves {'?' if realised is None else f'{realised:.2f}'} s a step "
        text += f"(expected {record['predicted_s']:.2f})"
    return text


def tasks_line(tasks: Mapping[str, int], events: Mapping[str, int]) -> str:
    """``12 resident, 3 parked, 1 queued; in all 40 parked, 37 resumed, 2 moved``; "" if there is nothing."""
    if not any(tasks.values()) and not any(events.values()):
        return ""
    now, so_far = (", ".join(f"{n} {word}" for word, n in counts.items()) for counts in (tasks, events))
    return f"{now}; in all {so_far}"


def number(value: Any) -> str:
    """Short form of a value: three significant digits, thousands separated; a dictionary is summed."""
    if isinstance(value, Mapping):
        value = sum(float(inner) for inner in value.values())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3700`` -> ``1:01:40``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: list[float]) -> str:
    """A curve in block characters, scaled to its own range."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """``admitted 640 = trained 560 + dropped 8 + ... + pending 72``; says so when it does not add up."""
    names = ("trained", "dropped", "abandoned", "failed", "pending")
    counts = {name: count(ledger.get(name, 0)) for name in names}
    admitted = count(ledger.get("admitted", 0))
    text = f"admitted {admitted} = " + " + ".join(f"{name} {counts[name]}" for name in names)
    missing = admitted - sum(counts.values())
    return text if missing == 0 else f"{text}  (does not balance: {missing:+d})"


def count(value: Any) -> int:
    """A ledger field: a number, or numbers by reason."""
    return sum(int(inner) for inner in value.values()) if isinstance(value, Mapping) else int(value)
