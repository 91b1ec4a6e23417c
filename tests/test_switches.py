"""The switch ledger in the simulator: what moves should save, are said to have saved, and did save."""

import math
from pathlib import Path

import pytest

from cluster.config import Config, load
from cluster.ranks import Proposal, RankMachine, StepFacts
from cluster.sim.catalogue import load_profile
from cluster.sim.scenario import Result, Scenario
from cluster.sim.workloads import load_workload
from cluster.sim.world import World

RECIPE = Path(__file__).resolve().parent.parent / "deploy" / "recipes" / "twin-elastic.toml"
STEPS = 44  # the first phase of the load
SPLITS = [(1, 3), (2, 2)]
LAST = STEPS - 6  # admission is still open


def job(split: tuple[int, int], seed: int) -> Config:
    words = [f"run.steps={STEPS}", f"generator.replicas={split[0]}", f"learner.ranks={split[1]}",
             f'env.params={{workload="twin-shift", seed={seed}}}']  # fmt: skip
    return load(RECIPE, words)


def world(config: Config) -> World:
    workload = load_workload(str(config.env.params["workload"]))
    return World(Scenario.from_config(config, load_profile(config.twin.profile), workload))


def without_moves(config: Config, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The same job and random numbers, nothing moved."""

    def stay(self: RankMachine, facts: StepFacts, counts: dict[str, int]) -> Proposal | None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(RankMachine, "decide", stay)
        return world(config).run()


def saved_s(kept: Result, moved: Result) -> float:
    """Of a step, once all moves have been made."""
    first = int(moved.moves[-1]["step"]) + 1
    spans = [result.steps[LAST].t - result.steps[first].t for result in (kept, moved)]
    return (spans[0] - spans[1]) / (LAST - first)


@pytest.mark.parametrize("split", SPLITS)
def test_on_a_steady_load_the_ledger_tells_what_moves_save(
    split: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions within 30% of what is told, that within a third of what was saved; summed over seeds, since
    groups come in waves and single runs tell little."""
    predicted = realised = saved = 0.0
    for seed in range(4):
        config = job(split, seed)
        moved, kept = world(config).run(), without_moves(config, monkeypatch)
        assert moved.moves and all("realised_s" in move for move in moved.moves), moved.moves
        predicted += math.fsum(float(move["predicted_s"]) for move in moved.moves)
        realised += math.fsum(float(move["realised_s"]) for move in moved.moves)
        saved += saved_s(kept, moved)
    assert abs(predicted - realised) <= 0.3 * realised
    assert abs(realised - saved) <= 0.35 * saved, (realised, saved)


def test_moves_made_before_a_new_load_was_trained_save_what_they_promise() -> None:
    """The load takes 2.4 times the training that the one before did, and none of it has been trained."""
    early: list[tuple[float, float]] = []
    for seed in range(4):
        params = f'env.params={{workload="twin-shift", seed={seed}}}'
        result = world(load(RECIPE, ["run.steps=90", params])).run()
        early += [
            (float(move["predicted_s"]), float(move["realised_s"]))
            for move in result.moves
            if "early" in str(move["reason"]) and "realised_s" in move
        ]
    assert len(early) >= 8
    assert all(abs(predicted - realised) <= 0.35 * realised for predicted, realised in early), early
    predicted, realised = (math.fsum(seconds) for seconds in zip(*early, strict=True))
    assert abs(predicted - realised) <= 0.3 * realised, (predicted, realised)


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_load_settles_for_good(seed: int) -> None:
    result = world(job((1, 3), seed)).run()
    assert all(int(move["step"]) <= 12 for move in result.moves), result.moves
    assert {move["move"] for move in result.moves} == {"learner>generator"}
