"""The environment contract.

An environment is single use: built by a picklable builder, started once with a task and a
seed, stepped until done, closed. It is synchronous, because each one lives alone in a
sandboxed child process; the pool makes it asynchronous. It never sees the model, and the
framework does the parsing of replies, the truncation and the time limits::

    class Coin(Env):
        def start(self, task, seed):
            self.side = random.Random(seed).choice(["heads", "tails"])
            return "Heads or tails?"

        def step(self, actions):
            right = actions[0] == self.side
            return StepResult("right" if right else "wrong", rewards={"success": float(right)}, done=True)
"""

from typing import Any

import msgspec

from cluster.types import Task


class StepResult(msgspec.Struct, frozen=True):
    """What the environment answers to an action.

    ``rewards`` are named components of this turn; ``valid`` is False when the action made no
    sense to the environment, ``changed`` False when the state stayed the same.
    """

    observation: str
    rewards: dict[str, float] = {}
    done: bool = False
    valid: bool = True
    changed: bool = True
    state_key: str | None = None
    info: dict[str, Any] = {}


class Env:
    """Base class. Override ``start`` and ``step``; ``capabilities`` declares the optional rest."""

    capabilities: frozenset[str] = frozenset()  # snapshot, state_key, pause, replay, parties

    def start(self, task: Task, seed: int) -> str:
        """Begin the episode; returns the first observation."""
        raise NotImplementedError

    def step(self, actions: list[str]) -> StepResult:
        """Apply the parsed actions of one turn."""
        raise NotImplementedError

    def pause(self) -> None:
        """The next step may be long in coming: stop your own clocks. Called if "pause" is a capability."""

    def resume(self) -> None:
        """The clocks go on, for the next step comes now. Called after ``pause``, if it was called."""

    def close(self) -> None:
        """Free what the environment holds; called on every exit path."""


class TaskSet:
    """Where tasks come from: deterministic, index-addressed, split by content.

    ``task("train", i)`` is the same for ever; no task content of one split is in another.
    """

    splits: tuple[str, ...] = ("train", "eval")

    def task(self, split: str, index: int) -> Task:
        """The ``index``-th task of a split, ``index >= 0``."""
        raise NotImplementedError

    def size(self, split: str) -> int | None:
        """Number of tasks in a split, None if unlimited."""
        return None

    def fingerprint(self) -> str:
        """Identifies the data, so that a cursor is never applied to other data."""
        raise NotImplementedError
