"""``springtide train`` up to the point where something heavy starts: check, prepare, rehearse, hand over."""

import asyncio
import json
import sys
from pathlib import Path

from cluster.config import Config, dump
from cluster.errors import ConfigError
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
        _make(folder)
        folder.write_config(json.dumps(dump(config), indent=2) + "\n")
        from deploy.run import train  # Ray and the rest take seconds to import: only now

        stopper = Stopper(lambda: view.note("stopping"))
        try:
            summary = train(config, folder, model, view, stopper)
        except asyncio.CancelledError:
            command = f"springtide train --resume {folder.path}"
            sys.stderr.write(f"springtide: interrupted; to continue: {command}\n")
            return stopper.exit_code
        view.note(f"{folder.summary}\n  {folder.report}")
    return 0 if summary["ledger"]["balanced"] else 1


def _make(folder: RunFolder) -> None:
    try:
        folder.make()
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {folder.path} (run.root): {error.strerror}") from error
