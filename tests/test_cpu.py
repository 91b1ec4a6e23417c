"""The CPU share that a job reports of itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cluster.processes import record
from deploy.cpu import CpuMeter


def test_the_share_is_that_of_this_process_and_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)  # it has started, and what it spent before does not count
        begun = time.monotonic()
        meter, before = CpuMeter(), child_s(child.pid)
        own = time.process_time()
        while time.process_time() - own < 0.4 and time.monotonic() - begun < 60:
            pass
        spent = child_s(child.pid) - before
        told, seconds = meter.read(), time.monotonic() - begun
    finally:
        child.kill()
        child.wait()
    cores = os.cpu_count() or 1
    assert told["share"] * cores * seconds > spent + 0.3, "our own loop is missing"
    assert told["share"] <= 2.2 / cores
    assert told["machine"] > told["share"] * 0.9
    assert told["processes"] >= 2
    assert any(name.startswith("python") and size > 1 for name, size in told["rss_mb"].items()), told


def test_processes_that_announced_themselves_count_wherever_they_were_started(tmp_path: Path) -> None:
    """As the actors of a cluster that was joined: they are no children of the driver."""
    spin = "import os, sys\nif os.fork(): sys.exit()\nprint(os.getpid(), flush=True)\nwhile True: pass"
    child = subprocess.Popen(
        [sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    orphan = int(child.stdout.readline())
    try:
        child.wait(20)
        assert orphan not in [process.pid for process in psutil.Process().children(recursive=True)]
        plain, meter = CpuMeter(), CpuMeter(tmp_path)
        record(tmp_path / "learner-0", orphan)
        begun, own = time.monotonic(), time.process_time()
        with_it, before = CpuMeter(tmp_path), child_s(orphan)
        while child_s(orphan) - before < 0.4 and time.monotonic() - begun < 60:
            time.sleep(0.05)
        told, seconds = with_it.read(), time.monotonic() - begun
        assert told["processes"] == plain.read()["processes"] + 1
        spent = told["share"] * (os.cpu_count() or 1) * seconds
        assert spent > 0.3 + time.process_time() - own
        assert meter.read()["processes"] == told["processes"], "one that came later is seen at the end"
    finally:
        os.kill(orphan, signal.SIGKILL)
        child.stdout.close()


def child_s(pid: int) -> float:
    """CPU seconds of a process, from /proc."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
