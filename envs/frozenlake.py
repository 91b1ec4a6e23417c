"""FrozenLake, told in words to a walker who sees only the cells around them.

The lake is gymnasium's own FrozenLake-v1 (not slippery) on random solvable maps with a random start
and goal. What the walker is told when standing on a cell, for instance::

    up:edge right:hole down:ice left:trail goal down:2 right:1

is what lies in the four neighbouring cells (``trail`` is ice with their own footprints: they have
been there) and how far away the goal is. Never a way. Each piece is one word, so that a word-level
tokenizer reads it in seven tokens.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from cluster.errors import ConfigError
from cluster.types import Task
from envs.base import Env, StepResult, TaskSet

MOVES: dict[str, tuple[int, int]] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
"""Action word -> (row, column) step, in the order in which an observation names the neighbours."""

GYM_ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
CELLS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
MOST_SIZE = 8

WORDS: tuple[str, ...] = (
    *MOVES,
    "goal",
    "fell",
    "arrived",
    *(f"{move}:{cell}" for move in MOVES for cell in ("ice", "hole", "edge", "trail", "goal")),
    *(f"{move}:{cells}" for move in MOVES for cells in range(move in ("up", "left"), MOST_SIZE)),
)
"""Every word that an observation or an action can hold: the vocabulary of a tiny model."""

EVAL_RESIDUES, WARM_RESIDUES = (0,), (1, 2)  # of a map's content hash modulo 10; train has the others
_DRAWS_WITHOUT_NEWS = 20_000  # a split without a new map for this long is exhausted


class FrozenLake(Env):
    """One reward, ``success``: 1 on the goal, 0 in a hole. A step limit is the caller's to set."""

    capabilities = frozenset({"state_key"})

    def __init__(self) -> None:
        self._lake: Any = None

    def start(self, task: Task, seed: int) -> str:
        """``task.data["map"]`` holds the rows, say ``["SFF", "HFF", "FFG"]``; nothing here is random."""
        self._rows: list[str] = [str(row) for row in task.data["map"]]
        self._lake = gymnasium.make(
            "FrozenLake-v1",
            desc=self._rows,
            is_slippery=False,
            max_episode_steps=-1,  # none: the caller limits the turns
            disable_env_checker=True,
        )
        state, _ = self._lake.reset(seed=seed)
        self._state = int(state)
        self._visited = {self._state}
        goal = "".join(self._rows).index("G")
        self._goal = divmod(goal, len(self._rows[0]))
        return self._describe()

    def step(self, actions: list[str]) -> StepResult:
        """An action is one of up, right, down, left; anything else leaves the walker standing."""
        action = GYM_ACTIONS.get(actions[0].strip() if actions else "")
        if action is None:
            return StepResult(self._describe(), valid=False, changed=False, state_key=str(self._state))
        before = self._state
        state, reward, terminated, _, _ = self._lake.step(action)
        self._state = int(state)
        self._visited.add(self._state)
        ending = "arrived" if reward > 0 else "fell"
        return StepResult(
            ending if terminated else self._describe(),
            rewards={"success": float(reward)} if terminated else {},
            done=bool(terminated),
            changed=self._state != before,
            state_key=str(self._state),
        )

    def close(self) -> None:
        """Close gymnasium's environment."""
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    def _describe(self) -> str:
        row, column = divmod(self._state, len(self._rows[0]))
        around = [f"{move}:{self._cell(row + down, column + right)}" for move, (down, right) in MOVES.items()]
        down, right = self._goal[0] - row, self._goal[1] - column
        vertical = f"down:{down}" if down >= 0 else f"up:{-down}"
        horizontal = f"right:{right}" if right >= 0 else f"left:{-right}"
        return " ".join([*around, "goal", vertical, horizontal])

    def _cell(self, row: int, column: int) -> str:
        width = len(self._rows[0])
        if not (0 <= row < len(self._rows) and 0 <= column < width):
            return "edge"
        if row * width + column in self._visited:
            return "trail"
        return CELLS[self._rows[row][column]]


class FrozenLakeTasks(TaskSet):
    """Random solvable maps, each different from all others, split by a hash of their content.

    The split ``warm`` is for scripted play before training, so that a warm start has seen neither
    the training maps nor those held out. ``hole_p`` is the chance of a hole on each free cell,
    ``min_distance`` the least number of steps between start and goal on an open lake. Raises
    ConfigError for parameters out of range, and later when a split has no more maps.
    """

    splits = ("train", "eval", "warm")

    def __init__(self, size: int = 4, hole_p: float = 0.35, min_distance: int = 4, seed: int = 0) -> None:
        _require(2 <= size <= MOST_SIZE, "size", size, f"must lie in 2..{MOST_SIZE}")
        _require(0.0 <= hole_p <= 0.8, "hole_p", hole_p, "must lie in 0..0.8 (more leaves no way)")
        most = 2 * (size - 1)
        _require(1 <= min_distance <= most, "min_distance", min_distance, f"must lie in 1..{most} here")
        self.size_, self.hole_p, self.min_distance, self.seed = size, hole_p, min_distance, seed
        self._maps: dict[str, list[list[str]]] = {split: [] for split in self.splits}
        self._streams = {split: self._draw(split) for split in self.splits}

    def task(self, split: str, index: int) -> Task:
        """``task("eval", 3).data["map"]`` is in no other split, and at no other index of its own."""
        if split not in self.splits or index < 0:
            raise ValueError(f"no task {index} in split {split!r} (splits: {', '.join(self.splits)})")
        maps = self._maps[split]
        while len(maps) <= index:
            found = next(self._streams[split], None)
            if found is None:
                raise ConfigError(
                    f"env.params: split {split!r} has only {len(maps)} different maps of size {self.size_}"
                    f" with hole_p = {self.hole_p}, task {index} was asked for: take a larger size"
                )
            maps.append(found)
        return Task(id=f"{split}-{index}", env="frozenlake", seed=index, data={"map": maps[index]})

    def fingerprint(self) -> str:
        """Names everything that the tasks depend on."""
        return f"frozenlake-1/{self.size_}/{self.hole_p}/{self.min_distance}/{self.seed}"

    def _draw(self, split: str) -> Iterator[list[str]]:
        """New maps of one split, until none has come for a long time."""
        rng = np.random.default_rng([self.seed, self.splits.index(split)])
        seen: set[str] = set()
        fruitless = 0
        while fruitless < _DRAWS_WITHOUT_NEWS:
            rows = random_map(rng, self.size_, self.hole_p, self.min_distance)
            key = "/".join(rows)
            if split_of(rows) == split and key not in seen and solvable(rows):
                seen.add(key)
                fruitless = 0
                yield rows
            else:
                fruitless += 1


def random_map(rng: np.random.Generator, size: int, hole_p: float, min_distance: int) -> list[str]:
    """Rows of S, F, H, G; perhaps without a way from S to G."""
    while True:
        start, goal = (int(cell) for cell in rng.choice(size * size, 2, replace=False))
        distance = abs(start // size - goal // size) + abs(start % size - goal % size)
        if distance >= min_distance:
            break
    cells = np.where(rng.random(size * size) < hole_p, "H", "F")
    cells[start], cells[goal] = "S", "G"
    return ["".join(row) for row in cells.reshape(size, size)]


def solvable(rows: list[str]) -> bool:
    """Whether the goal can be reached without stepping into a hole."""
    size = len(rows[0])
    start = "".join(rows).index("S")
    frontier, seen = [start], {start}
    while frontier:
        row, column = divmod(frontier.pop(), size)
        if rows[row][column] == "G":
            return True
        for down, right in MOVES.values():
            r, c = row + down, column + right
            if 0 <= r < len(rows) and 0 <= c < size and rows[r][c] != "H" and r * size + c not in seen:
                seen.add(r * size + c)
                frontier.append(r * size + c)
    return False


def split_of(rows: list[str]) -> str:
    """The split that a map belongs to, by its content alone."""
    residue = int(hashlib.sha256("/".join(rows).encode()).hexdigest(), 16) % 10
    return "eval" if residue in EVAL_RESIDUES else "warm" if residue in WARM_RESIDUES else "train"


def scripted(observation: str, rng: random.Random, wander: float = 0.1, notice: float = 0.3) -> str:
    """A mediocre player: walks straight towards the goal, along the longer way first, and falls often.

    With chance ``wander`` it takes a random step; with chance ``notice`` it sees that the cell ahead
    is a hole and steps aside to any cell that is safe.
    """
    if rng.random() < wander:
        return rng.choice(list(MOVES))
    around = dict(word.split(":") for word in observation.split()[: len(MOVES)])
    offsets = [(move, int(cells)) for move, cells in (w.split(":") for w in observation.split()[-2:])]
    longest = max(cells for _, cells in offsets)
    ahead = rng.choice([move for move, cells in offsets if cells == longest])
    safe = [move for move, cell in around.items() if cell not in ("hole", "edge")]
    if around[ahead] == "hole" and safe and rng.random() < notice:
        return rng.choice(safe)
    return ahead


def _require(ok: bool, name: str, value: object, why: str) -> None:
    if not ok:
        raise ConfigError(f"env.params.{name} = {value!r}: {why}")
