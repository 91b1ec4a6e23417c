"""Whether a run can be resumed as asked: nothing is started or written before that is known."""

import json
from pathlib import Path

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.identity import differences
from deploy.paths import RunFolder


def check_resume(path: Path, before: Config, after: Config) -> None:
    """``before`` is the run's saved configuration, ``after`` what it shall go on with.

    Raises ConfigError when that would be another run, or when there is nothing left to do.
    """
    if changed := differences(before, after):
        raise ConfigError(
            f"--resume {path}: {'; '.join(changed)}: this cannot change within a run; start a new one"
        )
    folder = RunFolder(path)
    made = steps_made(folder)
    if made is not None and made >= after.run.steps:
        raise ConfigError(f"--resume {path}: the run has made all its {made} steps; raise run.steps")


def steps_made(folder: RunFolder) -> int | None:
    """Steps of a run that came to its end, by its summary; None for one that did not."""
    try:
        return int(json.loads(folder.summary.read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or its writing was cut short
        return None
