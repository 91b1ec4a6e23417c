"""Errors named after the boundary that was crossed.

Each is also a standard-library type, so that generic handlers work, and each is
picklable (one positional message), because Ray and process pools pickle exceptions.
A failure of an environment or an engine ends one trajectory and is *data*
(``failed(boundary)``); a failure of configuration ends the job with one clear line.
"""

import difflib
from collections.abc import Iterable


class SpringtideError(Exception):
    """Base of every error that Springtide raises on purpose."""

    boundary = "internal"


class ConfigError(SpringtideError, ValueError):
    """A setting is unknown, unused, contradictory or out of range. Mend the recipe."""

    boundary = "config"


class EnvFailed(SpringtideError, RuntimeError):
    """The environment raised, died, timed out or answered nonsense."""

    boundary = "env"


class EnvTimeout(EnvFailed, TimeoutError):
    """The environment did not answer within its deadline; its process was ended."""


class EngineFailed(SpringtideError, RuntimeError):
    """A generator died or refused a request that was valid. Safe to retry elsewhere."""

    boundary = "engine"


class BadRequest(SpringtideError, ValueError):
    """A request that no generator can serve (ids beyond the vocabulary, prompt too long)."""

    boundary = "request"


class StreamFailed(SpringtideError, ConnectionError):
    """The queue server cannot be reached or refused an order."""

    boundary = "queue"


class WeightsFailed(SpringtideError, RuntimeError):
    """Publishing or loading weights failed; the generator keeps its old version."""

    boundary = "weights"


class TooManyFailures(SpringtideError, RuntimeError):
    """Group after group fails: going on would only repeat it. Ends the job with the last cause."""

    boundary = "run"


class StaleEpoch(SpringtideError, RuntimeError):
    """An order carried an older epoch than the receiver's. The sender must re-read the table."""

    boundary = "epoch"


class StaleBatch(SpringtideError, AssertionError):
    """A token older than the staleness bound reached the learner: a bug, never data."""

    boundary = "staleness"


class CheckpointDamaged(SpringtideError, OSError):
    """A checkpoint failed its checksums or lacks a part; the previous one is used."""

    boundary = "checkpoint"


class RayFailed(SpringtideError, RuntimeError):
    """The job's own Ray did not start."""

    boundary = "ray"


class LearnerLost(SpringtideError, RuntimeError):
    """A learner rank died or hung; the group is rebuilt from the last checkpoint."""

    boundary = "learner"


def nearest(word: str, valid: Iterable[str]) -> str:
    """Which of ``valid`` was probably meant: ``" (did you mean 'x'?)"``, else all choices, "" if none."""
    choices = sorted(valid)
    if not choices:
        return ""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (valid: {', '.join(choices)})"
