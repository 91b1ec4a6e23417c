"""What a run is: the settings whose change would make another run of it.

The state of a learner fits one model; curves, splits and the ledger mean one environment, one seed, one size
of a group and one way of turning history into prompts. Everything else may change when a run is resumed.
"""

from typing import Any

import msgspec

from cluster.config import Config

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
