"""How much of this machine's CPU a job takes: read twice, so that watching costs nothing in between."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from cluster.processes import living

VOID_SHARE = 0.7
"""A run of timed twins that takes more of the machine than this measures the machine, not the system."""


class CpuMeter:
    """From its construction to ``read``: the job's processes on this machine.

    They are this process, those that announced themselves in the folder ``pids`` (a cluster that was joined
    starts the actors elsewhere), and everything below either.
    """

    def __init__(self, pids: Path | None = None) -> None:
        self._pids = pids
        self._begun = time.monotonic()
        self._before = self._spent()
        self._machine = _machine()

    def read(self) -> dict[str, Any]:
        """``share`` of all cores by the job, ``machine`` by everything; ``rss_mb`` by role; ``processes``.

        Processes that ended meanwhile are missing from ``share`` and counted in ``machine``.
        """
        seconds = max(1e-9, time.monotonic() - self._begun) * (os.cpu_count() or 1)
        after = self._spent()
        own = sum(spent - self._before.get(key, 0.0) for key, spent in after.items())
        return {
            "share": own / seconds,
            "machine": (_machine() - self._machine) / seconds,
            "rss_mb": _memory(self._tree()),
            "processes": len(after),
        }

    def _tree(self) -> list[psutil.Process]:
        roots = [psutil.Process(), *(living(self._pids).values() if self._pids else ())]
        found = {process.pid: process for process in roots}
        for root in roots:
            with suppress(psutil.Error):  # it may end while we look
                found |= {child.pid: child for child in root.children(recursive=True)}
        return list(found.values())

    def _spent(self) -> dict[tuple[int, float], float]:
        """CPU seconds by process."""
        found = {}
        for process in self._tree():
            with suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
        return found


def _machine() -> float:
    """CPU seconds of the whole machine that were not idle."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _memory(tree: list[psutil.Process]) -> dict[str, float]:
    """Mean resident megabytes of a process, by what it is (Ray names its workers after their actors)."""
    found: dict[str, list[float]] = {}
    for process in tree:
        with suppress(psutil.Error):
            first = (process.cmdline() or [process.name()])[0]
            name = first.rpartition("/")[2].removeprefix("ray::").partition(" ")[0].partition(".")[0]
            found.setdefault(name, []).append(process.memory_info().rss / 2**20)
    return {name: round(sum(sizes) / len(sizes), 1) for name, sizes in sorted(found.items())}
