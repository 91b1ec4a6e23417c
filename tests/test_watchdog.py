"""The watchdog: a killed parent's descendants end, even those that left its tree; a dismissed one leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy.watchdog import LOOK_EVERY_S

REPO = Path(__file__).resolve().parent.parent
# A driver with a child in a session of its own, whose child ignores SIGTERM and watches nobody.
DRIVER = """
import subprocess, sys, time
from deploy import watchdog
dog = watchdog.start([sys.argv[1] + "/springtide-*"])
stubborn = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); time.sleep(300)"
middle = f"import subprocess,sys,time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]);time.sleep(300)"
subprocess.Popen([sys.executable, "-c", middle], start_new_session=True)
print(dog.pid, flush=True)
if sys.argv[2] == "dismiss":
    sys.stdin.readline()
    watchdog.dismiss(dog)
    print("left", dog.returncode, flush=True)
time.sleep(300)
"""


def start(folder: Path, how: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), how],
        env=dict(os.environ, PYTHONPATH=str(REPO)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(pid).children(recursive=True)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "springtide-x").mkdir()
    (tmp_path / "other").mkdir()
    driver = start(tmp_path, "stay")
    below = descendants(driver.pid, 3)  # the watchdog, the middle one, the stubborn one
    middle = next(p for p in below if p.children())
    time.sleep(3 * LOOK_EVERY_S)  # seen at least once, though it may have started late
    middle.kill()  # the stubborn one is an orphan now
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive
    deadline = time.monotonic() + 30
    while (tmp_path / "springtide-x").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]
    assert driver.stdin is not None and driver.stdout is not None
    driver.stdin.close()
    driver.stdout.close()


def test_a_dismissed_watchdog_kills_nobody(tmp_path: Path) -> None:
    driver = start(tmp_path, "dismiss")
    try:
        below = descendants(driver.pid, 3)
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write("go\n")
        driver.stdin.flush()
        dog = int(driver.stdout.readline())
        assert driver.stdout.readline().split() == ["left", "0"]
        assert not psutil.pid_exists(dog)
        others = [p for p in below if p.pid != dog]
        assert len(others) == 2
        assert all(p.is_running() for p in others)
        for process in others:
            process.kill()
    finally:
        driver.kill()
        driver.wait(10)
        for pipe in (driver.stdin, driver.stdout):
            pipe.close() if pipe else pytest.fail("no pipe")
