"""Whether a run can be resumed as asked: nothing is started or written before that is known.

What would make another run of it cannot change: the state of a learner fits one model; curves, splits and the
ledger mean one environment, one seed, one size of a group and one way of turning history into prompts.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import Config
from cluster.errors import ConfigError
from deploy.paths import RunFolder

FIXED = ("model", "env.name", "env.params", "run.seed", "run.group_size", "harness")
_MISSING = object()


def identity(config: Config) -> dict[str, Any]:
    """Value by dotted key, as far down as there are keys: ``{"model.params.hidden": 64, ...}``."""
    tree = msgspec.to_builtins(config)
    found: dict[str, Any] = {}
    for key in FIXED:
        value = tree
        for part in key.split("."):
            value = value[part]
        _flatten(key, value, found)
    return found


def _flatten(key: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{key}.{name}", inner, found)
    else:
        found[key] = value


def differences(before: Config, after: Config) -> list[str]:
    """One line per setting of the identity that differs: ``model.params.hidden = 128 (was 64)``."""
    old, new = identity(before), identity(after)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key, _MISSING), new.get(key, _MISSING)
        if was != now and now != {} and was != {}:
            said = "no longer set" if now is _MISSING else f"= {now!r}"
            lines.append(f"{key} {said} (was {'not set' if was is _MISSING else repr(was)})")
    return lines


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
