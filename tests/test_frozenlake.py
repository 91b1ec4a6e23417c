"""FrozenLake in words: what the walker is told, how it ends, and that no map is in two splits."""

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.types import Task
from envs.frozenlake import (
    MOVES,
    WORDS,
    FrozenLake,
    FrozenLakeTasks,
    random_map,
    scripted,
    solvable,
    split_of,
)
from envs.registry import build_tasks, builder


def task(*rows: str) -> Task:
    return Task(id="t", env="frozenlake", seed=0, data={"map": list(rows)})


def test_tells_what_lies_around_and_where_the_goal_is() -> None:
    lake = FrozenLake()
    assert lake.start(task("SFF", "HFF", "FFG"), 0) == (
        "up:edge right:ice down:hole left:edge goal down:2 right:2"
    )
    moved = lake.step(["right"])
    assert moved.observation == "up:edge right:ice down:ice left:trail goal down:2 right:1"
    assert (moved.done, moved.valid, moved.changed, moved.rewards) == (False, True, True, {})


def test_offsets_point_up_and_left_too() -> None:
    lake = FrozenLake()
    assert lake.start(task("GF", "FS"), 0).endswith("goal up:1 left:1")
    assert "left:goal" in lake.step(["up"]).observation


def test_goal_and_hole_end_the_episode() -> None:
    for move, ending, success in (("right", "arrived", 1.0), ("down", "fell", 0.0)):
        lake = FrozenLake()
        lake.start(task("SG", "HF"), 0)
        result = lake.step([move])
        assert (result.observation, result.done, result.rewards) == (ending, True, {"success": success})
        lake.close()


@pytest.mark.parametrize("reply", ["", "jump", "up right"])
def test_nonsense_leaves_the_walker_standing(reply: str) -> None:
    lake = FrozenLake()
    before = lake.start(task("SF", "FG"), 0)
    result = lake.step([reply])
    assert (result.observation, result.valid, result.changed, result.done) == (before, False, False, False)
    assert lake.step([]).valid is False


def test_walking_into_the_edge_changes_nothing_but_is_valid() -> None:
    lake = FrozenLake()
    before = lake.start(task("SF", "FG"), 0)
    result = lake.step([" up "])
    assert (result.observation, result.valid, result.changed) == (before, True, False)


def test_every_word_is_in_the_vocabulary() -> None:
    tasks, rng = FrozenLakeTasks(size=8, seed=3), random.Random(0)
    for index in range(20):
        lake = FrozenLake()
        observation = lake.start(tasks.task("train", index), 0)
        for _ in range(30):
            assert set(observation.split()) <= set(WORDS)
            result = lake.step([scripted(observation, rng)])
            observation = result.observation
            if result.done:
                break
        assert set(observation.split()) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_maps_are_solvable_unique_and_in_one_split_only() -> None:
    tasks = FrozenLakeTasks()
    counts = {"train": 600, "eval": 256, "warm": 300}
    found = {
        split: ["/".join(tasks.task(split, index).data["map"]) for index in range(count)]
        for split, count in counts.items()
    }
    everything = [rows for maps in found.values() for rows in maps]
    assert len(set(everything)) == sum(counts.values())
    assert all(split_of(rows.split("/")) == split for split, maps in found.items() for rows in maps)
    assert all(solvable(rows.split("/")) for rows in everything)


def test_tasks_are_the_same_for_ever_and_in_any_order() -> None:
    first, second = FrozenLakeTasks(seed=5), FrozenLakeTasks(seed=5)
    forward = [first.task("train", index) for index in range(40)]
    assert forward == [second.task("train", index) for index in reversed(range(40))][::-1]
    assert forward[0] == first.task("train", 0)
    assert FrozenLakeTasks(seed=6).task("train", 0) != forward[0]
    assert FrozenLakeTasks(seed=6).fingerprint() != first.fingerprint()


def test_a_split_that_is_exhausted_says_so() -> None:
    tasks = FrozenLakeTasks(size=2, min_distance=2)
    with pytest.raises(ConfigError, match=r"only \d+ different maps of size 2"):
        tasks.task("train", 500)


@pytest.mark.parametrize(
    ("params", "message"),
    [({"size": 9}, "size = 9"), ({"hole_p": 0.9}, "hole_p = 0.9"), ({"min_distance": 7}, "min_distance = 7")],
)
def test_parameters_out_of_range_are_refused_by_name(params: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tasks("frozenlake", params)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 4).flatmap(
        lambda n: st.lists(st.text("FH", min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    data=st.data(),
)
def test_solvable_agrees_with_walking(rows: list[str], data: st.DataObject) -> None:
    """Flooding by repeated steps in gymnasium's own lake finds the goal exactly when ``solvable`` says so."""
    size = len(rows)
    start, goal = data.draw(st.lists(st.integers(0, size * size - 1), min_size=2, max_size=2, unique=True))
    flat = list("".join(rows))
    flat[start], flat[goal] = "S", "G"
    board = ["".join(flat[at : at + size]) for at in range(0, size * size, size)]
    frontier: list[list[str]] = [[]]
    seen, won = {str(start)}, False
    while frontier and not won:
        path = frontier.pop()
        for move in MOVES:
            lake = FrozenLake()
            lake.start(task(*board), 0)
            result = [lake.step([step]) for step in [*path, move]][-1]
            lake.close()
            won = won or result.rewards.get("success") == 1.0
            if not result.done and result.state_key not in seen:
                seen.add(str(result.state_key))
                frontier.append([*path, move])
    assert solvable(board) is won


def test_random_map_keeps_its_distance() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    for _ in range(50):
        flat = "".join(random_map(rng, 4, 0.3, 4))
        start, goal = divmod(flat.index("S"), 4), divmod(flat.index("G"), 4)
        assert abs(start[0] - goal[0]) + abs(start[1] - goal[1]) >= 4


def test_scripted_player_is_mediocre() -> None:
    tasks, rng, won = FrozenLakeTasks(), random.Random(0), 0.0
    for index in range(200):
        lake = FrozenLake()
        observation = lake.start(tasks.task("warm", index), 0)
        for _ in range(12):
            result = lake.step([scripted(observation, rng)])
            observation = result.observation
            if result.done:
                won += result.rewards["success"]
                break
    assert 0.25 < won / 200 < 0.6


def test_scripted_player_walks_the_longer_way_and_ignores_or_avoids_the_hole_ahead() -> None:
    observation = "up:edge right:ice down:hole left:edge goal down:3 right:1"
    assert scripted(observation, random.Random(0), wander=0.0, notice=0.0) == "down"
    assert scripted(observation, random.Random(0), wander=0.0, notice=1.0) == "right"


def test_builder_is_picklable() -> None:
    made = pickle.loads(pickle.dumps(builder("frozenlake", {"size": 4, "hole_p": 0.2}))).build()
    assert isinstance(made, FrozenLake)
