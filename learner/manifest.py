"""Which checkpoints there are and whether they are whole: names and checksums, no torch.

The feeder and the driver decide with it; the ranks are told the folder.
"""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointDamaged

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{6,})")


def digest(file: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(folder: Path) -> list[str]:
    """What is wrong with a checkpoint folder: one line per damaged or missing file."""
    try:
        listed: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST}: {error}"]
    damage: list[str] = []
    for name, facts in sorted(listed.items()):
        file = folder / name
        if not file.is_file():
            damage.append(f"{name}: missing")
        elif file.stat().st_size != facts["bytes"]:
            damage.append(f"{name}: {file.stat().st_size} bytes instead of {facts['bytes']}")
        elif digest(file) != facts["sha256"]:
            damage.append(f"{name}: checksum differs")
    return damage


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder, from its name."""
    match = NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder.name!r} is not the name of a checkpoint (step-000020)")
    return int(match.group(1))


def checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders below ``root``, newest first, not verified."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if NAME.fullmatch(p.name)), key=step_of, reverse=True)


def latest_valid(root: Path) -> Path | None:
    """The newest checkpoint that passes its checksums; None if there is none at all.

    Damaged ones are passed over with a warning that lists the damage. One process decides and
    tells the ranks. Raises CheckpointDamaged if there are checkpoints but all are damaged:
    starting over must be the user's decision.
    """
    found = checkpoints(root)
    for folder in found:
        damage = verify(folder)
        if not damage:
            return folder
        log.warning("checkpoint %s is damaged, trying the one before: %s", folder, "; ".join(damage))
    if found:
        raise CheckpointDamaged(
            f"all {len(found)} checkpoints in {root} are damaged; remove them to start over"
        )
    return None


def covered_step(root: Path) -> int:
    """Payloads of steps up to this one are no longer needed: every kept checkpoint covers them.

    0 while fewer than two checkpoints exist, so that a damaged newest one can be replaced by
    the initial weights and the log.
    """
    found = checkpoints(root)
    return step_of(found[-1]) if len(found) >= 2 else 0
