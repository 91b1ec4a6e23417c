"""When a process was busy, for another one that adds up and compares such intervals."""

import time


class Busy:
    """An interval that begins now, by the wall clock; its length is told by a clock that never steps."""

    def __init__(self) -> None:
        self._start = time.time()
        self._begun = time.monotonic()

    def told(self) -> tuple[float, float]:
        """(start, now) in seconds since the epoch."""
        return self._start, self._start + time.monotonic() - self._begun
