"""Names of files in a run folder; one place, so that nobody spells them twice."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from cluster.config import Config
from cluster.errors import ConfigError

REPO = Path(__file__).resolve().parent.parent
SHORT = Path("/tmp")
_SOCKET_NAME = 107  # bytes that the system allows for the path of a Unix socket
_SESSION = "/springtide-ray-{pid}-abcdefgh/session_2026-11-30_12-00-00_123456_{pid}/sockets/plasma_store"


def temporary_root() -> Path:
    """Where temporary folders with sockets go: the system's choice (TMPDIR), or /tmp if that is too long."""
    root = Path(tempfile.gettempdir())
    longest = len(os.fsencode(root)) + len(_SESSION.format(pid=os.getpid()))
    return root if longest <= _SOCKET_NAME or not SHORT.is_dir() else SHORT


def check_target(file: str) -> None:
    """A file can be written: looked at before the work whose result it gets. Raises ConfigError."""
    path = Path(file).resolve()
    if path.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {file}: no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {file}: permission denied")


def with_environment(config: Config, recipe: str | Path) -> Config:
    """``env.folder`` filled in: a ``module:Class`` may lie beside its recipe, or in the current folder."""
    module, colon, _ = config.env.name.partition(":")
    top = module.partition(".")[0]
    folder = config.env.folder
    if colon and not folder:
        places = (Path(recipe).resolve().parent, Path.cwd())
        found = [p for p in places if (p / f"{top}.py").is_file() or (p / top).is_dir()]
        folder = str(found[0]) if found and found[0] != REPO else ""
    return replace(config, env=replace(config.env, folder=os.path.abspath(folder) if folder else ""))


def make_importable(folder: str) -> None:
    """Let this process, and those that it starts, import from ``env.folder``. Raises ConfigError."""
    if not folder:
        return
    if not Path(folder).is_dir():
        raise ConfigError(f"env.folder = {folder!r}: no such folder")
    if folder not in sys.path:
        sys.path.append(folder)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*given, folder]))


class RunFolder:
    """``RunFolder("runs/frozenlake-20261130-120000")``."""

    def __init__(self, path: str | Path, weights_folder: str = "/dev/shm") -> None:
        self.path = Path(path).resolve()
        self.run_id = self.path.name
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.trace = self.path / "trace.jsonl"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.png"
        self.checkpoints = self.path / "checkpoints"
        self.queue = self.path / "queue"
        self.workers = self.path / "workers"
        self.record = self.path / "record"
        self.evaluations = self.path / "evaluations.jsonl"
        self.pids = self.path / "pids"
        self.job = self.path / "job.json"  # where the running job is to be found; gone when it ends
        self.weights = Path(weights_folder) / f"springtide-{os.getpid()}-{self.run_id}"  # of this driver

    def make(self) -> None:
        """Create the folder and the subfolders that processes write to."""
        for folder in (self.path, self.checkpoints, self.queue, self.workers):
            folder.mkdir(parents=True, exist_ok=True)

    def write_config(self, text: str) -> None:
        """Write the effective configuration; it appears whole, since a resume depends on it."""
        self._write_whole(self.config, text)

    def write_job(self, place: Mapping[str, str]) -> None:
        """Say where the running job is: see ``deploy.local.place``."""
        self._write_whole(self.job, json.dumps(dict(place), indent=2) + "\n")

    @staticmethod
    def _write_whole(path: Path, text: str) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
