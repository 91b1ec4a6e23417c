"""``springtide simulate``: how a job would run on a cluster that you describe, under each policy.

Tables on the terminal, JSON and a picture for keeping, and an answer in words: how to split the ranks, and
what elasticity would buy.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.errors import ConfigError, nearest
from cluster.sim.catalogue import load_profile
from cluster.sim.policies import ASYNC, POLICIES
from cluster.sim.profile import Profile
from cluster.sim.scenario import Split
from cluster.sim.statistics import Interval, interval
from cluster.sim.study import (
    FULL,
    QUICK,
    SENSITIVITY,
    Options,
    Study,
    headline,
    ladder,
    leave_one_out,
    plain,
    report,
    sensitivity,
    study,
)  # fmt: skip
from cluster.sim.sweep import run_many
from cluster.sim.workloads import TableWorkload, load_workload

HEADLINES = {
    "goodput_vs_sync": ("goodput, tide / synchronous", "x"),
    "goodput_vs_best_async": ("goodput, tide / best tuned asynchronous", "x"),
    "goodput_elastic_vs_static": ("goodput, tide / tide with a fixed split", "x"),
    "goodput_elastic_untuned": ("goodput, elastic from an even split / best fixed split", "x"),
    "goodput_static_untuned": ("goodput, fixed even split / best fixed split", "x"),
    "wait_reduction_vs_best_static": ("RWT + TWT per token, below the best fixed split by", "%"),
    "kv_hit_vs_request_lru": ("prefix-cache hit, tide / request-level LRU", "x"),
    "train_step_reduction": ("training step, 8 ready, below swapping per micro-batch by", "%"),
    "train_step_reduction_vs_one_burst": ("training step, 8 ready, below one burst by", "%"),
}
NOTABLE = 1.05
"""Below this ratio, elasticity is not worth recommending: a fixed split is simpler."""


def simulate(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code. Raises ConfigError for anything that cannot be run as asked."""
    jobs = [_job(name, arguments) for name in arguments.workload]
    for target in (arguments.json, arguments.picture):
        if target and not Path(target).resolve().parent.is_dir():
            raise ConfigError(f"cannot write {target}: no folder {Path(target).resolve().parent}")
    if arguments.picture and Path(arguments.picture).suffix != ".png":
        raise ConfigError(f"--picture {arguments.picture}: only PNG is written, so end it in .png")
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: do not fold the tables
        console = Console(width=160)
    tree: dict[str, Any] = {}
    for number, (workload, profile, options) in enumerate(jobs):
        with _progress(f"simulating {workload.name}") as advance:
            found = study(workload, profile, options, advance)
        figures = report(found)
        show(console, found, arguments.sweep)
        if arguments.sweep:
            figures["sensitivity"] = plain(_vary(console, found))
        figures["advice"] = advice(found)
        figures["command"] = "springtide " + " ".join(sys.argv[1:])
        for line in figures["advice"]:
            console.print(line)
        tree[workload.name] = figures
        if arguments.picture:
            path = Path(arguments.picture)
            if len(jobs) > 1:
                path = path.with_name(f"{path.stem}-{workload.name}{path.suffix}")
            console.print(f"picture: {_draw(path, found)}", highlight=False)
        if arguments.json:  # after each, so that a long study that is stopped keeps what it has
            Path(arguments.json).write_text(json.dumps(tree, indent=2) + "\n")
            if number == len(jobs) - 1:
                console.print(f"figures: {arguments.json}", highlight=False)
    return 0


def _job(name: str, arguments: argparse.Namespace) -> tuple[TableWorkload, Profile, Options]:
    """What one workload's run consists of; everything is checked before the first one starts."""
    workload = load_workload(name)
    profile = load_profile(arguments.profile or workload.spec.run.profile)
    for option, least in (("ranks", 2), ("steps", 2), ("seeds", 1), ("workers", 1)):
        value = getattr(arguments, option)
        if value is not None and value < least:
            raise ConfigError(f"--{option} {value}: must be at least {least}")
    policies = tuple(dict.fromkeys(arguments.policy or (FULL if arguments.study else QUICK)))
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"unknown policy {policy!r}{nearest(policy, POLICIES)}")
    _fits(workload, profile)
    period = _period(workload)
    split = _split(arguments.split) if arguments.split else None
    ranks = split.generators + split.learners + split.scorers if split else arguments.ranks
    if split and arguments.ranks and arguments.ranks != ranks:
        raise ConfigError(f"--split {arguments.split} has {ranks} ranks, --ranks says {arguments.ranks}")
    steps = arguments.steps or max(24, 3 * period)
    seeds = arguments.seeds or (5 if arguments.study else 3)
    workers = arguments.workers or min(2, os.cpu_count() or 1)
    return workload, profile, Options(
        ranks=ranks or workload.spec.run.ranks, policies=policies, steps=steps, split=split,
        warmup_steps=min(12, max(1, steps // 2)), seeds=tuple(range(seeds)),
        tuning_steps=max(10 if arguments.study else 6, period),
        full=arguments.study or arguments.sweep, workers=workers,
    )  # fmt: skip


def _split(text: str) -> Split:
    """``generators/learners`` or ``generators/learners/scorers``."""
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise ConfigError(f"--split {text!r}: give generators/learners/scorers, such as 12/17/3")
    numbers = [int(part) for part in parts]
    if min(numbers[:2]) < 1:
        raise ConfigError(f"--split {text}: generators and learners must be at least 1")
    return Split(*numbers)


def _period(workload: TableWorkload) -> int:
    """Steps until all phases have been seen once; 0 if there is but one."""
    spec = workload.spec
    phases = 1 + max(kind.phase for kind in spec.kind)
    return -(-spec.phase_groups * phases // spec.run.groups_per_step) if phases > 1 else 0


def _fits(workload: TableWorkload, profile: Profile) -> None:
    """The longest context has to fit into one generator."""
    room = profile.generator.kv_tokens - profile.generator.block
    for kind in workload.spec.kind:
        if kind.max_context > room:
            raise ConfigError(
                f"workload {workload.name}: {kind.name}.max_context = {kind.max_context} does not fit into "
                f"{profile.name}: generator.kv_tokens = {profile.generator.kv_tokens}"
            )


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal. Its length grows: a sweep's next round depends on the last."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=0)
        asked = 0

        def advance(ended: int, entered: int) -> None:
            nonlocal asked
            asked += entered
            bar.update(task, advance=ended, total=asked)

        yield advance


def show(console: Console, found: Study, sweep: bool) -> None:
    """Policies, headline figures, ladder; with ``sweep`` every split that was tried."""
    options, run = found.options, found.workload.spec.run
    table = Table(
        title=f"{found.workload.name}: {options.ranks} ranks, {found.profile.name}, "
        f"{run.groups_per_step} x {run.group_size} trajectories a step, bound {run.max_lag}, "
        f"{options.steps} steps, {len(options.seeds)} seeds",
        title_justify="left", box=None, header_style="bold",
    )  # fmt: skip
    for name in ("policy", "gen/learn/score", "scoring", "goodput tok/s", "waits s/step", "KV hit", "train s",
                 "group s", "moves"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("policy", "scoring") else "right", no_wrap=True)
    for name, results in found.results.items():
        best = found.tuned[name].best
        table.add_row(
            name, split_text(best.split, best.policy.rollout), best.policy.scoring,
            spread(interval(found.goodput(name))), spread(interval(found.waits(name))),
            f"{fmean(r.kv_hit for r in results):.1%}", f"{fmean(r.train_s for r in results):.1f}",
            f"{fmean(r.group_latency_s for r in results):.0f}",
            f"{fmean(len(r.moves) for r in results):.1f}",
        )  # fmt: skip
    console.print(table)
    figures = headline(found)
    for key, (label, unit) in HEADLINES.items():
        if key in figures:
            console.print(f"  {label}: [bold]{number_text(figures[key], unit)}[/bold]", highlight=False)
    rungs = ladder(found)
    for row in rungs if len(rungs) > 2 else []:
        gain = f", {number_text(row['gain'], 'x')} of the one before" if row["gain"] else ""
        goodput = f"{row['goodput_tok_s'].mean:,.0f} tok/s"
        console.print(f"  ladder: {row['label']}: {goodput}{gain}", highlight=False)
    for row in leave_one_out(found):
        console.print(f"  all / {row['label']}: {number_text(row['worth'], 'x')}", highlight=False)
    if sweep:
        _show_splits(console, found)


def _show_splits(console: Console, found: Study) -> None:
    table = Table(title="goodput by split (tuning runs)", title_justify="left", box=None, header_style="bold")
    for name in ("policy", "gen/learn/score", "scoring", "tok/s", "of the best"):
        table.add_column(name, justify="left" if name in ("policy", "scoring") else "right")
    for name, tuned in found.tuned.items():
        top = max(tuned.tried.values(), default=0.0)
        tried = sorted(tuned.tried.items(), key=lambda item: (item[0][1], item[0][0].generators))
        for (split, scoring), goodput in tried:
            table.add_row(
                name, split_text(split), scoring, f"{goodput:,.0f}", f"{goodput / top:.0%}" if top else "-"
            )
    console.print(table)


def _vary(console: Console, found: Study) -> list[dict[str, Any]]:
    """The headline figures with one parameter changed at a time, on fewer steps and two seeds."""
    options = replace(
        found.options,
        policies=tuple(name for name in found.options.policies if name in QUICK),
        seeds=found.options.seeds[:2], tuning_steps=6, full=False,
    )  # fmt: skip
    with _progress("varying") as advance:
        rows = sensitivity(found, list(SENSITIVITY), options, advance)
    keys = [key for key in HEADLINES if any(key in row for row in rows)]
    table = Table(title="sensitivity", title_justify="left", box=None, header_style="bold")
    for name in ("parameter", "times", *keys):
        table.add_column(name, justify="left" if name == "parameter" else "right", overflow="fold")
    for row in rows:
        cells = [f"{row[key].mean:.2f}" if key in row else "-" for key in keys]
        table.add_row(row["label"], f"{row['factor']:g}", *cells)
    console.print(table)
    return rows


def advice(found: Study) -> list[str]:
    """How to split the ranks, and what elasticity would buy, in sentences."""
    ranks = found.options.ranks
    if found.options.split:
        return [f"Everybody ran at the split {split_words(found.options.split)}: nothing was tuned."]
    lines = []
    fixed = [name for name in found.results if found.tuned[name].best.policy.roles == "static"
             and found.tuned[name].best.policy.rollout != "sync"]  # fmt: skip
    best = found.best(fixed)
    if best:
        split = found.tuned[best].best.split
        lines.append(
            f"With a fixed split, give {split_words(split)} of {ranks} ranks ({best}: "
            f"{fmean(found.goodput(best)):,.0f} tokens per second)."
        )
        lines += _penalty(found, best)
    figures = headline(found)
    gain = figures.get("goodput_elastic_vs_static")
    if gain:
        worth = "worth it" if gain.mean >= NOTABLE else "hardly worth it: a fixed split is simpler"
        tide = found.tuned["tide"].best.split
        waits = figures.get("wait_reduction_vs_best_static")
        waited = f" and changes waiting by {-waits.mean:+.0%}" if waits else ""
        lines.append(
            f"Elastic ranks (starting from {split_words(tide)}) give {number_text(gain, 'x')} the goodput of "
            f"the same system with its best fixed split{waited}: {worth}."
        )
    if "goodput_elastic_untuned" in figures:
        lines.append(
            f"From an even split, without a sweep, elastic ranks reach "
            f"{number_text(figures['goodput_elastic_untuned'], 'x')} of that split's goodput; the even split "
            f"kept fixed, {number_text(figures['goodput_static_untuned'], 'x')}."
        )
    if "goodput_vs_best_async" in figures:
        rival = found.best(ASYNC)
        lines.append(
            f"All three mechanisms together give {number_text(figures['goodput_vs_best_async'], 'x')} the "
            f"goodput of the best tuned asynchronous baseline ({rival})."
        )
    return lines


def _penalty(found: Study, name: str) -> list[str]:
    """What being wrong about the split costs."""
    tuned = found.tuned[name]
    top = max(tuned.tried.values(), default=0.0)
    way = tuned.best.policy.scoring
    off = [
        goodput / top
        for (split, scoring), goodput in tuned.tried.items()
        if scoring == way and top
        and abs(abs(split.generators - tuned.best.split.generators) - found.options.ranks / 8) <= 1
    ]  # fmt: skip
    if not off:
        return []
    return [f"An eighth of the ranks on the wrong side would cost {1 - min(off):.0%} of its goodput."]


def _draw(path: Path, found: Study) -> Path:
    from deploy.tide_plots import draw_study  # matplotlib

    name = "tide" if "tide" in found.results else next(iter(found.results))
    static = found.calmest([n for n in found.results if found.tuned[n].best.policy.roles == "static"
                            and found.tuned[n].best.policy.rollout != "sync"])  # fmt: skip
    drawn = [name] + ([static] if static and static != name else [])
    scenarios = [replace(found.tuned[n].scenario(found.base), seed=found.options.seeds[0]) for n in drawn]
    results = run_many(scenarios, lean=False)
    goodput = {n: interval(found.goodput(n)) for n in found.results}
    title = f"{found.workload.name} on {found.options.ranks} ranks, {found.profile.name}"
    rival = results[1] if len(results) > 1 else None
    return draw_study(path, title, results[0], rival, found.results, goodput)


def split_text(split: Split, rollout: str = "stream") -> str:
    """Generators/learners/scorers; "all" when the same ranks do both in turn."""
    if rollout == "sync":
        return f"all {split.generators}"
    return f"{split.generators}/{split.learners}/{split.scorers}"


def split_words(split: Split) -> str:
    """In words, roles without ranks left out."""
    parts = {"generation": split.generators, "training": split.learners, "scoring": split.scorers}
    return ", ".join(f"{count} to {role}" for role, count in parts.items() if count)


def number_text(value: Interval, unit: str) -> str:
    """A ratio or a share with its interval."""
    mean, low, high, n = value
    if unit == "%":
        text = f"{mean:.1%}"
        return text if n == 1 or low == high else f"{text} [{low:.1%}, {high:.1%}]"
    text = f"{mean:.2f}x"
    return text if n == 1 else f"{text} [{low:.2f}, {high:.2f}]"


def spread(value: Interval) -> str:
    """Mean and half width."""
    if value.n == 1:
        return f"{value.mean:,.0f}"
    return f"{value.mean:,.0f} ± {value.mean - value.low:,.0f}"

