"""The smallest environment: guess how many coins are in the purse, told higher or lower."""

import random
import re

from cluster.errors import ConfigError
from cluster.types import Task
from envs.base import Env, StepResult, TaskSet


class Coin(Env):
    """One reward, ``success``: 1 when the number is found within ``guesses`` guesses, else 0."""

    def __init__(self, most: int = 20, guesses: int = 6) -> None:
        self.most, self.guesses = most, guesses

    def start(self, task: Task, seed: int) -> str:
        """The task holds the answer; ``seed`` is not needed, nothing here is random."""
        self.coins, self.left = int(task.data["coins"]), self.guesses
        return f"A purse holds 1 to {self.most} coins. How many? You have {self.left} guesses."

    def step(self, actions: list[str]) -> StepResult:
        """An action is a reply; the first number in it is the guess."""
        self.left -= 1
        found = re.search(r"\d{1,9}", actions[0] if actions else "")
        guess = int(found[0]) if found else None
        won = guess == self.coins
        hint = "Answer with a number." if guess is None else "higher" if guess < self.coins else "lower"
        return StepResult(
            "Right!" if won else hint,
            rewards={"success": float(won)} if won or not self.left else {},
            done=won or not self.left,
            valid=guess is not None,
        )


class CoinTasks(TaskSet):
    """Unlimited tasks. Purses with a multiple of five coins are kept for evaluation."""

    def __init__(self, most: int = 20, seed: int = 0) -> None:
        if most < 5:
            raise ConfigError(f"env.params.most = {most!r}: must be at least 5")
        self.most, self.seed = most, seed

    def task(self, split: str, index: int) -> Task:
        """``task("train", 3)``: its purse never holds a multiple of five coins."""
        if split not in self.splits or index < 0:
            raise ValueError(f"no task {index} in split {split!r} (splits: {', '.join(self.splits)})")
        purses = [n for n in range(1, self.most + 1) if (n % 5 == 0) == (split == "eval")]
        coins = random.Random(f"{self.seed}/{split}/{index}").choice(purses)
        return Task(id=f"{split}-{index}", env="coin", seed=index, data={"coins": coins})

    def fingerprint(self) -> str:
        """Names everything that the tasks depend on."""
        return f"coin-1/{self.most}/{self.seed}"
