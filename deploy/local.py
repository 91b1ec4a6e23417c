"""The local Ray cluster that a job starts for itself, and what must be gone when it ends."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import AuthenticationError, RayError

from cluster.config import ClusterConfig, Config
from cluster.errors import ConfigError, RayFailed
from deploy.paths import temporary_root
from deploy.signals import bounded

GRACE_S = 5.0
SHUTDOWN_S = 30.0
TOKEN_REMEDY = "is the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token?"
AUTH_MODE = "RAY_AUTH_MODE"
GCS_WAIT_S = 10.0
EXCLUDED = [".venv", ".git", ".cache", "runs", "bench.json", "*.egg-info"]
"""What of the repository is not uploaded to a cluster that we join."""


class Local(NamedTuple):
    """A Ray of our own: its temporary folder, and its dashboard's address ("" without one)."""

    folder: Path
    dashboard: str


def start(config: Config, namespace: str, slots: int, repo: Path) -> Local | None:
    """Start a Ray of our own, or join the one at ``cluster.address`` (None).

    A cluster that we join stays up after the job. Ray authenticates by a token (its default): ours is the
    one of ``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH`` or ``~/.ray/auth_token``, so whoever submits from
    another machine or account than the one that ran ``ray start`` copies that file once. The
    repository is uploaded as the actors' working directory.

    Raises ConfigError when the address cannot be reached or the token is refused, RayFailed when our own
    does not start, CancelledError when SIGTERM came while Ray's own handler was in force.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # a user's own environments
    paths = [str(repo), *(os.path.abspath(path) for path in given)]
    environment = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # its own messages in our terminal or log: no colour codes
    common: dict[str, Any] = {
        "namespace": namespace,
        "runtime_env": {"env_vars": environment},
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": True,
    }
    if config.cluster.address:
        common["runtime_env"] |= {"working_dir": str(repo), "excludes": EXCLUDED}
        join(config.cluster.address, common)
        return None
    folder = Path(tempfile.mkdtemp(prefix=f"springtide-ray-{os.getpid()}-", dir=temporary_root()))
    environment["VLLM_RPC_BASE_PATH"] = str(folder)  # sockets, otherwise left in the temporary folder
    # Ray's agents report the end of a killed driver's cluster to its control service, and wait this
    # long (a minute by default) for one that ended with it.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(int(GCS_WAIT_S)))
    others = {child.pid for child in psutil.Process().children()}
    try:
        context = ray.init(
            address="local",
            num_cpus=max(slots, os.cpu_count() or 1),
            object_store_memory=config.cluster.object_store_mb * 2**20,
            include_dashboard=config.cluster.dashboard,
            dashboard_port=dashboard_port(config.cluster),
            _temp_dir=str(folder),
            # Our actors bring their own environment variables, so workers started ahead of them would
            # only cost start-up time and memory.
            _system_config={"prestart_worker_first_driver": False},
            **common,
        )
    except BaseException as error:
        stop(folder, spare=others)
        if isinstance(error, SystemExit):  # Ray's own handler, in force while it starts
            raise asyncio.CancelledError from error
        if isinstance(error, Exception):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RayFailed(f"did not start: {lines[-1].strip()}") from error
        raise
    return Local(folder, str(context.dashboard_url or "") if config.cluster.dashboard else "")


def dashboard_port(cluster: ClusterConfig) -> int | None:
    """None lets Ray look for a free port, from its usual one (ours by default) on.

    A number that is in use would be an error: one chosen by the user is, the default beside another job
    is not. Without a dashboard Ray binds a port all the same.
    """
    chosen = cluster.dashboard and cluster.dashboard_port != ClusterConfig().dashboard_port
    return cluster.dashboard_port if chosen else None


def join(address: str, common: dict[str, Any]) -> None:
    """Connect to a running cluster. Raises ConfigError."""
    where = f"cluster.address = {address!r}"
    try:
        ray.init(address=address, **common)
    except SystemExit as error:
        raise asyncio.CancelledError from error
    except AuthenticationError as error:
        raise ConfigError(f"{where}: the cluster refused the login; {TOKEN_REMEDY}") from error
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        # Ray says no more than "failed to connect" when a server that answers refuses the token.
        raise ConfigError(f"{where}: {str(error).splitlines()[0]} ({TOKEN_REMEDY})") from error


def place(namespace: str) -> dict[str, str]:
    """Where the job runs, for commands that act on it later."""
    return {
        "address": ray.get_runtime_context().gcs_address,
        "namespace": namespace,
        "host": socket.gethostname(),
        AUTH_MODE: os.environ.get(AUTH_MODE, ""),  # Ray sets it when it starts a cluster with a token
    }


def ours(address: str) -> bool:
    """The address is one of this machine's."""
    return any(a.address == address for addresses in psutil.net_if_addrs().values() for a in addresses)


def foreign_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Addresses of the living nodes (as ``ray.nodes()`` tells them) that are not this machine."""
    alive = {str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]}
    return sorted(address for address in alive if not ours(address))


def gpus() -> int:
    """Device slots of the cluster that are CUDA devices."""
    return int(ray.cluster_resources().get("GPU", 0))


def stop(folder: Path | None, spare: Container[int] = ()) -> list[str]:
    """Shut Ray down; end every process that this one still has below it. Returns what was left.

    Children in ``spare`` are none of Ray's and go on.
    """
    ours = [child for child in psutil.Process().children() if child.pid not in spare]
    below = list(ours)
    for child in ours:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += child.children(recursive=True)
    bounded(ray.shutdown, SHUTDOWN_S)  # one that hangs is freed by the end of what it waits for
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
