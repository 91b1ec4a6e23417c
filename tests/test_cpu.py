"""The CPU share that a job reports of itself."""

import os
import subprocess
import sys
import time

from deploy.cpu import CpuMeter


def test_the_share_is_that_of_this_process_and_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)  # it has started, and what it spent before does not count
        meter, before, begun = CpuMeter(), child_s(child.pid), time.monotonic()
        while time.monotonic() - begun < 0.7:
            pass
        told, spent = meter.read(), child_s(child.pid) - before
    finally:
        child.kill()
        child.wait()
    cores = os.cpu_count() or 1
    seconds = time.monotonic() - begun
    assert told["share"] * cores * seconds > spent, "our own loop is missing"
    assert told["share"] <= 2.2 / cores
    assert told["machine"] > told["share"] * 0.9
    assert told["processes"] >= 2
    assert any(name.startswith("python") and size > 1 for name, size in told["rss_mb"].items()), told


def child_s(pid: int) -> float:
    """CPU seconds of a process, from /proc."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
