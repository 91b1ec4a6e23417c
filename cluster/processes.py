"""Which process plays which part of a run: one small file each, for operators and for cleaning up.

``pids/learner-0`` holds ``"<pid> <start time>"``. The start time tells a process from a later one
that was given the same number, so nothing foreign is ever signalled.
"""

import functools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

VARIABLE = "SPRINGTIDE_PID_FILE"
"""Where an actor's process finds the path of its file (set by the driver)."""

REPLACED = "replaced"
"""What an actor's ``run`` returns when its process ends on purpose, to be followed by another: no death."""

_SLACK_S = 0.05  # the system's clock ticks, rounded twice


def announce(path: str | Path | None = None) -> None:
    """Write this process's file at ``path``, by default the one its environment names, if any."""
    target = path or os.environ.get(VARIABLE)
    if target:
        record(target, os.getpid())


def record(path: str | Path, pid: int) -> None:
    """Write the file of process ``pid``; it appears whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{pid}")
    partial.write_text(f"{pid} {psutil.Process(pid).create_time():.3f}\n")
    partial.replace(target)


def alive(path: str | Path) -> psutil.Process | None:
    """The process that wrote the file, if it still runs (a zombie does not)."""
    try:
        pid, started = Path(path).read_text().split()
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - float(started)) <= _SLACK_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, psutil.Error):
        return None


def living(folder: str | Path) -> dict[str, psutil.Process]:
    """Every process of ``folder`` that still runs, by name."""
    found = {}
    for path in sorted(Path(folder).glob("[!.]*")):
        process = alive(path)
        if process is not None:
            found[path.name] = process
    return found


def sole(run: Callable[[Any], Awaitable[T]]) -> Callable[[Any], Awaitable[T]]:
    """For an actor's ``run``: a call while an earlier one is under way ends the process.

    It means that the caller lost sight of the earlier one (a broken connection looks like a dead
    process). Two at once would share one name; a fresh process is in one state for certain.
    """
    running: set[int] = set()

    @functools.wraps(run)
    async def guarded(self: Any) -> T:
        if id(self) in running:
            sys.stderr.write(f"{type(self).__name__}.run was called while it ran: starting afresh\n")
            os._exit(1)
        running.add(id(self))
        try:
            return await run(self)
        finally:
            running.discard(id(self))

    return guarded
