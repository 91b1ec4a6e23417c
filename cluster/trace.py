"""The event trace: one JSON line per event, appended by every process of a run.

Each line is one ``write`` to a file opened for appending, so lines of several processes do not
mix. Times are seconds since the epoch. Tests assert orders of events on it.
"""

import json
import os
import time
from pathlib import Path
from typing import Any


class Trace:
    """``Trace(path, "feeder")("trained", {"step": 3})``."""

    def __init__(self, path: str | Path, component: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._component = component

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Append one event."""
        line = {"t": round(time.time(), 6), "by": self._component, "event": event, **fields}
        os.write(self._file, (json.dumps(line, default=str) + "\n").encode())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """All events in order of time; a torn last line is left out."""
    events = []
    for line in Path(path).read_text(errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return sorted(events, key=lambda event: float(event["t"]))
