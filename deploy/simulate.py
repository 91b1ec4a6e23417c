"""``springtide simulate``: how a job would run on a cluster that you describe, under each policy.

Tables on the terminal, JSON and a picture for keeping, and an answer in words: how to split the ranks, and
what elasticity would buy. With ``--sweep``, how that depends on something.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from cluster.errors import ConfigError, nearest
from cluster.sim.catalogue import load_profile
from cluster.sim.compare import calmest, fixed_split, plain, report
from cluster.sim.knobs import Job, Sweep, ranks_of, set_to, split_of, sweep_of
from cluster.sim.policies import POLICIES
from cluster.sim.statistics import interval
from cluster.sim.study import FULL, QUICK, Options, Study, scenario_of, study
from cluster.sim.sweep import QUIET, Workers
from cluster.sim.sweep import Progress as Listener
from cluster.sim.vary import VARIED, Varied, rows, vary
from cluster.sim.workloads import TableWorkload, load_workload
from deploy.paths import check_target
from deploy.simulate_text import answer, show, show_varied

STEPS, STUDY_STEPS = 16, 24
MOST_WORKERS = 8  # a worker takes about 100 MB


def simulate(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code. Raises ConfigError for anything that cannot be run as asked."""
    planned = [_planned(name, arguments) for name in arguments.workload]
    _check_targets(arguments)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: do not fold the tables
        console = Console(width=160)
    tree: dict[str, Any] = {}
    with Workers(arguments.workers or _cores()) as workers:
        for job, sweeps, options in planned:
            name = job.workload.name
            tree[name] = _one(console, job, sweeps, options, workers, _picture(arguments, name))
            tree[name]["command"] = shlex.join(["springtide", *sys.argv[1:]])
            if arguments.json:  # after each, so that a long study that is stopped keeps what it has
                Path(arguments.json).write_text(json.dumps(tree, indent=2) + "\n")
    if arguments.json:
        console.print(f"figures: {arguments.json}", highlight=False)
    return 0


def _one(
    console: Console, job: Job, sweeps: list[Sweep], options: Options, workers: Workers, picture: Path | None
) -> dict[str, Any]:
    """Simulate one workload, print and draw what was found; returns its figures as JSON values."""
    with progress_bar(job.workload.name) as bar:
        if sweeps:
            varied = vary(sweeps, options, workers, bar)
            found = None
        else:
            found = study(job, options, workers, bar)
    if found is None:
        for one in varied:
            show_varied(console, one)
        if picture:
            console.print(f"picture: {_draw_varied(picture, job, varied)}", highlight=False)
        return {"sensitivity": [plain(row) for one in varied for row in rows(one)]}
    show(console, found)
    lines = answer(found)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)
    if picture:
        with progress_bar(f"{job.workload.name}: drawing"):
            path = _draw(picture, found, workers)
        console.print(f"picture: {path}", highlight=False)
    return report(found) | {"advice": lines}


def _planned(name: str, arguments: argparse.Namespace) -> tuple[Job, list[Sweep], Options]:
    """What one workload's run consists of; everything is checked before the first one starts."""
    workload = load_workload(name)
    profile = load_profile(arguments.profile or workload.spec.run.profile)
    for option, least in (("ranks", 2), ("steps", 2), ("seeds", 1), ("workers", 1)):
        value = getattr(arguments, option)
        if value is not None and value < least:
            raise ConfigError(f"--{option} {value}: must be at least {least}")
    policies = tuple(dict.fromkeys(arguments.policy or ()))
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"unknown policy {policy!r}{nearest(policy, POLICIES)}")
    split = split_of(arguments.split) if arguments.split else None
    ranks = ranks_of(split) if split else arguments.ranks or workload.spec.run.ranks
    if split and arguments.ranks and arguments.ranks != ranks:
        raise ConfigError(f"--split {arguments.split} has {ranks} ranks, --ranks says {arguments.ranks}")
    job = Job(workload, profile, ranks, split)
    for text in arguments.set or ():
        job = set_to(job, text)
    sweeps = [sweep_of(job, text) for text in arguments.sweep or ()]
    full = arguments.study
    period = max(_period(one.workload) for one in (job, *(one for sweep in sweeps for one in sweep.jobs)))
    steps = arguments.steps or max(STUDY_STEPS if full else STEPS, 3 * period)
    options = Options(
        policies=policies or (FULL if full else VARIED if sweeps else QUICK),
        steps=steps, warmup_steps=min(12, max(1, steps // 2)),
        seeds=tuple(range(arguments.seeds or (5 if full else 3))),
        tuning_steps=max(10 if full else 6, period), full=full, untuned=not sweeps,
    )  # fmt: skip
    for one in (job, *(one for sweep in sweeps for one in sweep.jobs)):
        scenario_of(one, options)
    return job, sweeps, options


def _check_targets(arguments: argparse.Namespace) -> None:
    for target in (arguments.json, arguments.picture):
        if target:
            check_target(target)
    if arguments.picture and Path(arguments.picture).suffix != ".png":
        raise ConfigError(f"--picture {arguments.picture}: only PNG is written, so end it in .png")


def _picture(arguments: argparse.Namespace, name: str) -> Path | None:
    """Where to draw a workload: the name goes into the file's when there are several."""
    if not arguments.picture:
        return None
    path = Path(arguments.picture)
    return path if len(arguments.workload) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")


def _period(workload: TableWorkload) -> int:
    """Steps until all phases have been seen once; 0 if there is but one."""
    spec = workload.spec
    phases = 1 + max(kind.phase for kind in spec.kind)
    return -(-spec.phase_groups * phases // spec.run.groups_per_step) if phases > 1 else 0


def _cores() -> int:
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


class _Bar(Listener):
    """A bar in simulated optimizer steps. Its length grows: a search's next round depends on the last."""

    def __init__(self, bar: Progress, label: str) -> None:
        self._bar, self._label = bar, label
        self._task, self._total = bar.add_task(label, total=None), 0

    def stage(self, name: str) -> None:
        self._bar.update(self._task, description=f"{self._label}: {name}")

    def entered(self, steps: int) -> None:
        self._total += steps
        self._bar.update(self._task, total=self._total)

    def ended(self, steps: int) -> None:
        self._bar.update(self._task, advance=steps)


@contextmanager
def progress_bar(label: str) -> Iterator[Listener]:
    """On stderr, if that is a terminal; what it shows ends with it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield QUIET
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), Remaining(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar, label)


def _draw(path: Path, found: Study, workers: Workers) -> Path:
    from deploy.tide_plots import draw_study  # matplotlib

    name = "tide" if "tide" in found.results else next(iter(found.results))
    static = calmest(found, fixed_split(found))
    drawn = [name] + ([static] if static and static != name else [])
    scenarios = [replace(found.tuned[n].scenario(found.base), seed=found.options.seeds[0]) for n in drawn]
    results = workers.run(scenarios, lean=False)
    goodput = {n: interval(found.goodput(n)) for n in found.results}
    title = f"{found.job.workload.name} on {found.job.ranks} ranks, {found.job.profile.name}"
    rival = results[1] if len(results) > 1 else None
    return draw_study(path, title, results[0], rival, found.results, goodput)


def _draw_varied(path: Path, job: Job, varied: list[Varied]) -> Path:
    from deploy.tide_plots import draw_sweeps  # matplotlib

    return draw_sweeps(path, f"{job.workload.name} on {job.ranks} ranks, {job.profile.name}", varied)
