"""Names of files in a run folder; one place, so that nobody spells them twice."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


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
