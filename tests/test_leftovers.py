"""What a killed driver leaves behind is recognised and removed; nothing else is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import ConfigError, StreamFailed
from cluster.processes import alive, announce, living, record
from cluster.valkey import ValkeyServer
from deploy.leftovers import end_leftovers, remove_leftovers


def sleeper(seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])


def dead_pid() -> int:
    process = sleeper(0)
    process.wait()
    return process.pid


def test_a_process_is_known_by_number_and_start_time(tmp_path: Path) -> None:
    announce(tmp_path / "me")
    found = alive(tmp_path / "me")
    assert found is not None and found.pid == os.getpid()
    (tmp_path / "other").write_text(f"{os.getpid()} 12345.000\n")  # the number was given again
    (tmp_path / "torn").write_text(f"{os.getpid()}")
    assert set(living(tmp_path)) == {"me"}


def test_what_outlives_its_driver_is_ended_after_the_grace(tmp_path: Path) -> None:
    slow, quick = sleeper(60), sleeper(0.3)
    for name, process in (("slow", slow), ("quick", quick)):
        record(tmp_path / "pids" / name, process.pid)
    assert end_leftovers(tmp_path / "pids", grace_s=2.0) == ["slow"]
    slow.wait(5)  # its status was taken by whoever waited first
    quick.wait(5)
    assert not (tmp_path / "pids").exists()


def test_a_run_folder_belongs_to_one_driver(tmp_path: Path) -> None:
    announce(tmp_path / "pids" / "driver")
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        end_leftovers(tmp_path / "pids")


def test_only_folders_of_dead_drivers_are_removed(tmp_path: Path) -> None:
    dead, living_pid = dead_pid(), os.getpid()
    names = [
        f"springtide-{dead}-run",
        f"springtide-ray-{dead}-x",
        f"springtide-{living_pid}-run",
        f"springtide-ray-{living_pid}-x",
        "springtide-notes",
    ]
    for name in names:
        (tmp_path / name / "inner").mkdir(parents=True)
    assert {folder.name for folder in remove_leftovers([tmp_path])} == set(names[:2])
    assert {folder.name for folder in tmp_path.iterdir()} == set(names[2:])


def test_two_queue_servers_never_share_a_folder(tmp_path: Path) -> None:
    first, second = ValkeyServer(tmp_path), ValkeyServer(tmp_path)
    first.start()
    try:
        with pytest.raises(StreamFailed, match="still uses"):
            second.start(deadline_s=0.5)
        first.kill()
        second.start(deadline_s=10.0)
        assert second.alive
    finally:
        first.stop()
        second.stop()
