"""The registry, the latency model and the built-in environments, without sandboxes."""

import asyncio
import math
import pickle
import statistics
from itertools import pairwise

import pytest

from cluster.config import EnvConfig
from cluster.errors import ConfigError, EnvFailed
from cluster.types import Task
from envs.base import StepResult
from envs.coin import Coin, CoinTasks
from envs.factbook import Factbook, FactbookTasks, is_right, key_of, split_of, tidy
from envs.latency import Latency
from envs.pool import EnvPool
from envs.registry import ENVIRONMENTS, EnvBuilder, build_tasks, builder, paths

PLAYABLE = sorted(set(ENVIRONMENTS) - {"load"})  # that one refuses every player but a timed twin


@pytest.fixture(scope="module")
def factbook() -> FactbookTasks:
    return FactbookTasks()


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'coins' is unknown \(did you mean 'coin'\?\)"):
        paths("coins")
    with pytest.raises(ConfigError, match="unknown"):
        paths("package:not a class")


def test_literal_path_stands_for_itself() -> None:
    faulty = "tests.faulty_env:Faulty"
    assert paths(faulty) == (faulty, faulty + "Tasks")
    assert build_tasks(faulty).task("train", 3).seed == 3
    with pytest.raises(ConfigError, match="no_such"):
        builder("no_such:Env")


def test_parameters_are_shared_and_unknown_ones_refused() -> None:
    assert builder("coin", {"most": 30, "guesses": 3}).params == {"most": 30, "guesses": 3}
    assert build_tasks("coin", {"most": 30, "guesses": 3}).fingerprint() == "coin-1/30/0"
    assert build_tasks("coin", {}, seed=7).fingerprint() == "coin-1/20/7"
    with pytest.raises(ConfigError, match=r"env\.params\.gueses is unknown \(did you mean 'guesses'\?\)"):
        builder("coin", {"gueses": 3})
    with pytest.raises(ConfigError, match=r"env\.params\.x is unknown \(valid: facts, places\)"):
        builder("factbook", {"x": 3})
    with pytest.raises(ConfigError, match="facts = 99"):
        build_tasks("factbook", {"facts": 99})


def test_builder_pickles_and_names_the_original_error() -> None:
    made = pickle.loads(pickle.dumps(builder("coin", {"most": 9})))
    assert made.build().most == 9
    with pytest.raises(EnvFailed, match="KeyError: 'no such map'"):
        EnvBuilder("tests.faulty_env:Faulty", {"broken": "raise"}).build()
    with pytest.raises(EnvFailed, match=r"is no envs\.base\.Env"):
        EnvBuilder("collections:OrderedDict").build()


@pytest.mark.parametrize("name", PLAYABLE)
def test_every_built_in_keeps_the_contract(name: str) -> None:
    tasks, again = build_tasks(name, {}, seed=1), build_tasks(name, {}, seed=1)
    assert tasks.fingerprint() == again.fingerprint()
    seen: dict[str, set[str]] = {}
    for split in tasks.splits:
        for index in range(40):
            task = tasks.task(split, index)
            assert task == again.task(split, index)
            assert task.env == name
            seen.setdefault(split, set()).add(repr(sorted(task.data.items())))
    assert not seen["train"] & seen["eval"]
    task = tasks.task("train", 0)
    texts = []
    for _ in range(2):
        env = builder(name, {}).build()
        texts.append(env.start(task, 3))
        result = env.step(["nothing sensible"])
        texts.append(result.observation)
        assert isinstance(result, StepResult)
        assert not result.valid or name == "factbook"  # any text is an answer there
        env.close()
    assert texts[:2] == texts[2:]


def test_coin_is_solved_by_bisection_and_lost_after_the_last_guess() -> None:
    tasks = CoinTasks(most=20)
    for index in range(30):
        env, low, high = Coin(), 1, 20
        env.start(tasks.task("train", index), index)
        result = StepResult("")
        while not result.done:
            guess = (low + high) // 2
            result = env.step([f"I say {guess}."])
            low, high = (guess + 1, high) if result.observation == "higher" else (low, guess - 1)
        assert result.rewards == {"success": 1.0}
    env = Coin(guesses=2)
    env.start(Task(id="t", env="coin", seed=0, data={"coins": 7}), 0)
    assert env.step(["no idea"]) == StepResult("Answer with a number.", valid=False)
    assert env.step(["8"]) == StepResult("lower", rewards={"success": 0.0}, done=True)


def test_coin_splits_share_no_purse() -> None:
    tasks = CoinTasks(most=20, seed=3)
    train = {tasks.task("train", i).data["coins"] for i in range(300)}
    held_out = {tasks.task("eval", i).data["coins"] for i in range(300)}
    assert held_out == {5, 10, 15, 20} and train == set(range(1, 21)) - held_out
    with pytest.raises(ValueError, match="split 'test'"):
        tasks.task("test", 0)


def test_factbook_tasks_are_answerable_and_copying_is_no_answer(factbook: FactbookTasks) -> None:
    for split in factbook.splits:
        for index in range(400):
            task = factbook.task(split, index)
            env = Factbook()
            shown = env.start(task, 0)
            assert len(shown) < 450
            facts = [line.split(": ", 1)[1] for line in shown.splitlines() if ": " in line]
            assert len(facts) == 6
            right = [fact for fact in facts if key_of(fact) == task.data["answer"]]
            for said in (right[0], f"It is {right[0]}."):
                assert env.step([said]).rewards["success"] == 1.0, (shown, said)
            for wrong in (fact for fact in facts if key_of(fact) != task.data["answer"]):
                assert env.step([wrong]).rewards["success"] == 0.0, (shown, wrong)
            if len(set(map(key_of, facts))) > 1:
                assert env.step([shown]).rewards == {"success": 0.0, "format": 0.0}


def test_factbook_splits_share_no_place(factbook: FactbookTasks) -> None:
    for split in factbook.splits:
        places = {p for i in range(1500) for p in factbook.task(split, i).data["places"]}
        assert all(split_of(place) == split for place in places)
        assert len(places) > 40
    assert factbook.size("train") > 4000 and factbook.size("eval") > 1000
    assert factbook.fingerprint() != FactbookTasks(facts=4).fingerprint()
    assert len(factbook.task("train", 0).data["places"]) == 2
    beyond = factbook.task("eval", factbook.size("eval"))
    assert beyond.id != factbook.task("eval", 0).id
    assert beyond.data["question"] == factbook.task("eval", 0).data["question"]


@pytest.mark.parametrize(
    ("raw", "shown", "key"),
    [
        ("8,057,236,243 (2024 est.)", "8,057,236,243", "8057236243"),
        ("$111.326 trillion (2024 est.)", "$111.326 trillion", "111.326 trillion"),
        ("Mount Everest 8,849 m", "Mount Everest", "mount everest"),
        ("-1.1 migrant(s)/1,000 population (2025 est.)", "-1.1 migrant /1,000 population", "-1.1"),
        ("17 births/1,000 population (2024 est.)", "17", "17"),
        ("57.5% of total population (2023)", "57.5%", "57.5"),
        (".dz", ".dz", "dz"),
        ("Supr&ecirc;me <em>Court</em>; note", "Suprême Court", "suprême court"),
    ],
)
def test_tidy_and_key(raw: str, shown: str, key: str) -> None:
    assert tidy(raw) == shown
    assert key_of(shown) == key


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("47,735,685", True),
        ("The population is 47735685 people.", True),
        ("47,735,68", False),
        ("147,735,685", False),
        ("47,735,685 or 19.62", False),
        ("", False),
        ("\ufffd\x00", False),
    ],
)
def test_right_answers(reply: str, right: bool) -> None:
    assert is_right(reply, "47735685", ["19.62", "29.3"]) is right


def test_latency_is_a_pure_function_with_the_stated_mean() -> None:
    latency = Latency(mean_s=0.5, sigma=1.0, seed=3)
    delays = [latency.delay_s(trajectory, turn) for trajectory in range(400) for turn in range(50)]
    assert delays[:50] == [Latency(0.5, 1.0, 3).delay_s(0, turn) for turn in range(50)]
    assert statistics.fmean(delays) == pytest.approx(0.5, rel=0.05)
    assert statistics.median(delays) == pytest.approx(0.5 * math.exp(-0.5), rel=0.05)
    assert all(one != two for one, two in pairwise(delays))
    assert delays[0] != Latency(0.5, 1.0, 4).delay_s(0, 0)
    assert Latency(0.25).delay_s(1, 2) == pytest.approx(0.25)
    assert Latency().delay_s(1, 2) == 0.0
    with pytest.raises(ConfigError, match=r"env\.latency\.sigma = -1"):
        Latency(1.0, -1)


@pytest.mark.parametrize("name", PLAYABLE)
async def test_every_built_in_runs_in_its_process(name: str) -> None:
    pool = EnvPool(builder(name, {}), EnvConfig(name=name, sandbox="process"), 1)
    async with asyncio.timeout(20):
        await pool.start()
        try:
            handle = await pool.acquire()
            task = build_tasks(name, {}).task("train", 0)
            expected = builder(name, {}).build()
            assert await handle.start(task, 0) == expected.start(task, 0)
            assert await handle.step(["12"]) == expected.step(["12"])
            await handle.release()
        finally:
            await pool.close()
