"""``springtide scale RUN``: change how many ranks of a running job generate, train and score.

The job is found through its run folder (``job.json``, written by its driver). What is asked becomes the
controller's target: one rank moves per sync barrier until it is reached, and it holds until another is set
or it is taken back (``--auto``).
"""

import difflib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.config import RunConfig
from cluster.errors import ConfigError
from cluster.processes import alive
from cluster.trace import read_trace
from deploy.moves import counts_of, line_of, moves_of, roles_line
from deploy.paths import RunFolder

POLL_S = 1.0
SAY_EVERY_S = 10.0
DEADLINE_S = 900.0
CLOSING_POLLS = 10
"""The last move's times are written a moment after the target is reached."""


@dataclass(frozen=True)
class Wish:
    """What the operator asks for; None leaves a count as it is."""

    generators: int | None = None
    learners: int | None = None
    scorers: int | None = None
    env_workers: int | None = None

    def __post_init__(self) -> None:
        least = {"generators": 1, "learners": 1, "scorers": 0, "env_workers": 1}
        for name, count in self.asked().items():
            if count < least[name]:
                raise ConfigError(f"--{name.replace('_', '-')} {count}: at least {least[name]}")

    def asked(self) -> dict[str, int]:
        """Counts by name, those that were given."""
        names = ("generators", "learners", "scorers", "env_workers")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def missing(self, status: Mapping[str, Any]) -> list[str]:
        """What a status still lacks, in words; empty when everything asked for is there and at work."""
        have = counts_of(status["roles"]["ranks"])
        healthy = sum(row[0] for row in status["generators"].values())
        found = []
        for name, count in self.asked().items():
            role = name.removesuffix("s").replace("_", " ")
            now = len(status["workers"]) if name == "env_workers" else have.get(role, 0)
            if now != count:
                found.append(f"{name.replace('_', ' ')} {now} of {count}")
            elif name == "generators" and healthy != count:
                found.append(f"generators at work {healthy} of {count}")
        if found or status["roles"]["phase"] == "settled":
            return found
        return [f"rank {status['roles']['move']}"]


class Operator(Protocol):
    """The running job, as this command sees it."""

    def status(self) -> dict[str, Any]:
        """See ``Controller.status``."""

    def scale(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """See ``Controller.scale``. Raises ConfigError."""

    def close(self) -> None:
        """Let go of it; the job goes on."""


def scale(run: str, wish: Wish, show: bool, auto: bool, deadline_s: float = DEADLINE_S) -> int:
    """Ask for it, wait until it is so, print what the moves took; returns the exit code.

    Raises ConfigError in one line: no such run, no running job, what forbids the wish, the deadline.
    """
    if not wish.asked() and not show and not auto:
        raise ConfigError(
            "scale needs --generators, --learners, --scorers or --env-workers (or --show, --auto)"
        )
    if wish.asked() and auto:
        raise ConfigError("--auto takes targets back: give it without counts")
    folder = RunFolder(run)
    place = job_of(folder)
    if place.get("RAY_AUTH_MODE"):  # read by Ray when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", place["RAY_AUTH_MODE"])
    from deploy.attach import attach  # Ray takes seconds to import: only now

    sys.stderr.write(f"connecting to {folder.path.name} ...\n")
    operator = attach(place)
    try:
        if show:
            write(describe(folder, operator.status()))
            return 0
        if auto:
            operator.scale({})
            write("targets are taken back")
            return 0
        return pursue(wish, operator, folder, deadline_s)
    finally:
        operator.close()


def job_of(folder: RunFolder) -> dict[str, str]:
    """Where the job of a run folder runs. Raises ConfigError when it does not."""
    if not folder.config.exists():
        raise ConfigError(f"{folder.path} is no run folder: it has no config.json{instead(folder.path)}")
    resume = f"continue it with: springtide train --resume {folder.path}"
    try:
        place: dict[str, str] = json.loads(folder.job.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no job runs in {folder.path}; {resume}") from error
    except ValueError as error:
        raise ConfigError(f"{folder.job} is damaged: {error}") from error
    if ended(folder):
        raise ConfigError(f"no job runs in {folder.path}: its driver is gone; {resume}")
    return place


def ended(folder: RunFolder) -> bool:
    """Its job ran on this machine, and its driver was killed before it could tidy up."""
    try:
        host = json.loads(folder.job.read_text()).get("host")
    except (OSError, ValueError):
        return False
    return host == socket.gethostname() and alive(folder.pids / "driver") is None


def instead(path: Path) -> str:
    """The running job that was probably meant, looked for beside ``path`` and in the usual folder of runs."""
    roots = dict.fromkeys((path.parent, Path(RunConfig().root).resolve()))
    found = (job.parent for root in roots for job in sorted(root.glob("*/job.json")))
    jobs = {path.name: path for path in found if not ended(RunFolder(path))}
    if not jobs:
        return f"; no job runs in {' or '.join(map(str, roots))}"
    begun = [name for name in sorted(jobs) if name.startswith(path.name)]
    close = begun[-1:] or difflib.get_close_matches(path.name, jobs, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {shown(jobs[close[0]])}?)"
    return f" (running jobs: {', '.join(shown(job) for job in jobs.values())})"


def shown(path: Path) -> str:
    """Relative to the current folder if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def pursue(
    wish: Wish,
    operator: Operator,
    folder: RunFolder,
    deadline_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Set the target and wait for it. Raises ConfigError after ``deadline_s``; the target stays in force."""
    before = operator.status()
    earlier = len(moves_of(read_trace(folder.trace), []))
    plan = operator.scale(wish.asked())
    write(announce(wish, before, plan))
    begun, said, last = clock(), clock(), ""
    while missing := wish.missing(status := operator.status()):
        now = clock()
        line = f"{roles_line(status['roles'])} (waiting for {', '.join(missing)})"
        if line != last or now - said >= SAY_EVERY_S:
            write(f"  {now - begun:5.0f} s  {line}")
            said, last = now, line
        if now - begun > deadline_s:
            raise ConfigError(
                f"not reached within {deadline_s:.0f} s: {', '.join(missing)}; the target stays in force "
                "(springtide scale --show tells how far it is, --auto takes it back)"
            )
        sleep(POLL_S)
    write(f"  {clock() - begun:5.0f} s  {roles_line(status['roles'])}: reached")
    for _ in range(CLOSING_POLLS):
        made = moves_of(read_trace(folder.trace), operator.status()["roles"]["switches"])[earlier:]
        if all(move["state"] in ("done", "undone") for move in made):
            break
        sleep(POLL_S)
    for move in made:
        write(f"move {move['move']}: {line_of(move)}")
    return 0


def announce(wish: Wish, before: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """``generators 2 -> 1, learners 1 -> 2; one rank moves per step``"""
    have = counts_of(before["roles"]["ranks"])
    parts = []
    for name, count in wish.asked().items():
        now = before["roles"]["workers"] if name == "env_workers" else have.get(name.removesuffix("s"), 0)
        parts.append(f"{name.replace('_', ' ')} {now} -> {count}")
    more = plan.get("more_ranks", 0)
    taken = f"; {more} more rank{'s' * (more > 1)} from the cluster" if more else ""
    moving = "; one rank moves per sync barrier" if set(wish.asked()) - {"env_workers"} else ""
    return ", ".join(parts) + taken + moving


def describe(folder: RunFolder, status: Mapping[str, Any]) -> str:
    """``--show``: ranks by number and node, target, and the switch ledger."""
    roles = status["roles"]
    lines = [f"{folder.run_id}: version {status['version']}, {roles_line(roles)}"]
    for rank, role in sorted(roles["ranks"].items(), key=lambda row: int(row[0])):
        node = roles["nodes"].get(rank, "")
        lines.append(f"  rank {rank}: {role}{f'  on node {node[:12]}' if node else ''}")
    lines.append(f"  env workers: {', '.join(sorted(status['workers'])) or 'none'}")
    for move in moves_of(read_trace(folder.trace), roles["switches"]):
        lines.append(f"move {move['move']}: {line_of(move)}")
    return "\n".join(lines)


def write(text: str) -> None:
    """One or more lines to standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
