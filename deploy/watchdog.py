"""Ends what a killed driver leaves behind. A process of its own, standard library only.

The driver's children watch their parents, but not all of them are ours (Ray's agents take up to a
minute to notice). So this process remembers every descendant of the driver that it has seen, by id and
start time, and when its standard input closes without a word, it gives them ``GRACE_S`` to end by
themselves, kills the rest, and removes the folders it was told of. Told ``done``, it just leaves.
"""

import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LOOK_EVERY_S = 2.0
GRACE_S = 6.0
DONE = b"done"

Known = set[tuple[int, int]]  # (process id, start time in clock ticks)


def start(patterns: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start it for this process; folders that match ``patterns`` go with the driver.

    It survives signals sent to our process group.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *patterns]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def dismiss(watchdog: "subprocess.Popen[bytes]", deadline_s: float = 10.0) -> None:
    """All is taken down: let it leave. One that does not is killed."""
    try:
        watchdog.communicate(DONE, timeout=deadline_s)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        watchdog.kill()
        watchdog.wait(deadline_s)


def table() -> dict[int, tuple[int, int]]:
    """Process id -> (parent's id, start time) of every living process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text()
            except OSError:  # it ended while we looked
                continue
            fields = text[text.rindex(")") + 2 :].split()
            if fields[0] != "Z":
                found[int(entry)] = (int(fields[1]), int(fields[19]))
    return found


def look(root: int, known: Known) -> None:
    """Add the descendants of ``root``, and of all that is known, to ``known``."""
    processes = table()
    inside = {root} | {pid for pid, started in known if processes.get(pid, (0, -1))[1] == started}
    grown = True
    while grown:
        grown = False
        for pid, (parent, started) in processes.items():
            if parent in inside and pid not in inside and pid != os.getpid():
                inside.add(pid)
                known.add((pid, started))
                grown = True


def living(known: Known) -> list[int]:
    """Those of ``known`` that still live."""
    processes = table()
    return [pid for pid, started in known if processes.get(pid, (0, -1))[1] == started]


def main(root: int, patterns: Sequence[str]) -> None:
    """Watch ``root`` until standard input says or shows that it is gone."""
    known: Known = set()
    while not select.select([0], [], [], LOOK_EVERY_S)[0]:
        look(root, known)
    if os.read(0, len(DONE)) == DONE:
        return
    deadline = time.monotonic() + GRACE_S
    while living(known) and time.monotonic() < deadline:
        look(root, known)
        time.sleep(0.2)
    for pid in living(known):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for pattern in patterns:
        for folder in glob.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
