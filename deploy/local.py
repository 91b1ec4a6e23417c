"""The local Ray cluster that a job starts for itself, and what must be gone when it ends."""

import contextlib
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray

from cluster.config import Config
from cluster.errors import ConfigError

GRACE_S = 5.0
_OWNED = re.compile(r"^springtide-ray-(\d+)-")


def start(config: Config, namespace: str, slots: int, repo: Path) -> Path | None:
    """Start a Ray of our own, or join the one at ``cluster.address``; returns our temporary folder.

    Raises ConfigError when the address cannot be reached.
    """
    environment = {"PYTHONPATH": str(repo), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    common: dict[str, Any] = {
        "namespace": namespace,
        "runtime_env": {"env_vars": environment},
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": True,
    }
    if config.cluster.address:
        try:
            ray.init(address=config.cluster.address, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cluster.address = {config.cluster.address!r}: {error}") from error
        return None
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"springtide-ray-{os.getpid()}-"))
    ray.init(
        address="local",
        num_cpus=max(slots, os.cpu_count() or 1),
        object_store_memory=config.cluster.object_store_mb * 2**20,
        include_dashboard=config.cluster.dashboard,
        dashboard_port=config.cluster.dashboard_port,
        _temp_dir=str(folder),
        **common,
    )
    return folder


def gpus() -> int:
    """Device slots of the cluster that are CUDA devices."""
    return int(ray.cluster_resources().get("GPU", 0))


def remove_leftovers(root: Path | None = None) -> None:
    """Delete temporary folders of jobs whose driver was killed."""
    for folder in (root or Path(tempfile.gettempdir())).glob("springtide-ray-*"):
        owner = _OWNED.match(folder.name)
        if owner and not psutil.pid_exists(int(owner.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def stop(folder: Path | None) -> list[str]:
    """Shut Ray down; end every process that this one still has below it. Returns what was left."""
    below = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, alive = psutil.wait_procs(below, timeout=GRACE_S)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(f"{process.pid} {process.name()}")
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(alive, timeout=GRACE_S)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return left
