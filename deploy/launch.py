"""``springtide train`` up to the point where something heavy starts: check, prepare, rehearse, hand over."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from cluster.config import Config, dump
from cluster.errors import ConfigError, SpringtideError
from cluster.trace import read_trace
from deploy.paths import RunFolder
from deploy.preflight import (
    check_address,
    check_dashboard_port,
    check_environment,
    check_model,
    check_queue,
    check_transport,
    rehearse,
)
from deploy.prepare import model_folder
from deploy.signals import Stopper
from deploy.view import View


def start(config: Config, path: Path) -> int:
    """Prepare folder and model, run the job, print where things are; returns the exit code.

    0 is a run whose books balance, 1 one whose books don't, 130 or 143 one that was interrupted.
    Raises SpringtideError with one clear cause; most of what can be wrong is found before Ray starts.
    """
    tasks = check_environment(config)
    check_transport(config)
    check_address(config.cluster.address)
    check_dashboard_port(config)
    check_queue(config.queue.url)
    folder = RunFolder(path, config.cluster.weights_folder)
    with View(f"Springtide: {config.run.name}", config.run.steps) as view:
        with view.phase("preparing the model"):
            model = model_folder(config)
            harness = check_model(config, model)
        with view.phase("rehearsing the environment"):
            rehearse(config, tasks, harness)
        fresh = not folder.config.exists()
        _make(folder)
        folder.write_config(json.dumps(dump(config), indent=2) + "\n")
        send_token(config.cluster.address)
        from deploy.run import train  # Ray and the rest take seconds to import: only now

        stopper = Stopper(lambda: view.note("stopping"))
        try:
            summary = train(config, folder, model, view, stopper)
        except asyncio.CancelledError:
            command = f"springtide train --resume {folder.path}"
            sys.stderr.write(f"springtide: interrupted; to continue: {command}\n")
            return stopper.exit_code
        except SpringtideError:
            if fresh and not _begun(folder):  # nothing to resume or to look into: it never started
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        view.note(f"{folder.summary}\n  {folder.report}")
    return 0 if summary["ledger"]["balanced"] else 1


def _begun(folder: RunFolder) -> bool:
    """Somebody played or trained, or died trying: there is something to resume or to look into."""
    died = folder.trace.exists() and any(e["event"] == "component_died" for e in read_trace(folder.trace))
    return (
        died
        or folder.metrics.exists()
        or any(folder.workers.iterdir())
        or any(folder.checkpoints.iterdir())
    )


def send_token(address: str) -> None:
    """Let Ray send its token to a cluster that we join, if there is one: by itself it doesn't.

    Ray reads the variable when it is imported. A cluster without authentication takes no offence.
    """
    there = Path.home() / ".ray" / "auth_token"
    given = [os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")]
    if address and (any(given) or there.is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _make(folder: RunFolder) -> None:
    try:
        folder.make()
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {folder.path} (run.root): {error.strerror}") from error
