"""What a killed driver leaves behind, and its removal by the next start.

Everything that a driver starts ends by itself when the driver dies, within seconds; whoever starts
next on the same run folder waits for that, and ends by force what takes longer. Folders in
shared memory and in the temporary folder carry their driver's process id in their names.
"""

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from cluster.errors import ConfigError
from cluster.processes import alive, living
from deploy.paths import temporary_root

GRACE_S = 15.0
SHARED_MEMORY = Path("/dev/shm")
_OWNED = re.compile(r"^springtide-(?:ray-)?(\d+)-")


def end_leftovers(pids: Path, grace_s: float = GRACE_S) -> list[str]:
    """Wait for the processes of an earlier driver of this run; kill those that outlive the grace.

    Returns the names of those killed. Raises ConfigError when the earlier driver still runs.
    """
    driver = alive(pids / "driver")
    if driver is not None:
        raise ConfigError(f"run folder {pids.parent} is in use by process {driver.pid}: stop it first")
    deadline = time.monotonic() + grace_s
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = living(pids)
    for process in left.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in process.children(recursive=True):
                child.kill()
            process.kill()
    psutil.wait_procs(list(left.values()), timeout=grace_s)
    shutil.rmtree(pids, ignore_errors=True)
    return sorted(left)


def remove_leftovers(roots: Sequence[Path] | None = None) -> list[Path]:
    """Delete the folders of jobs whose driver is gone; returns them."""
    removed = []
    for root in roots or {Path(tempfile.gettempdir()), temporary_root(), SHARED_MEMORY}:
        for folder in root.glob("springtide-*"):
            owner = _OWNED.match(folder.name)
            if owner and not psutil.pid_exists(int(owner.group(1))):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed
