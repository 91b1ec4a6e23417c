"""The balance model where the pipeline's state decides: KV memory, and loads that nobody has trained yet."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.balance import Balance, StepFacts, below
from cluster.works import Rows

HELD = StepFacts(step=11, step_s=10.0, rwt_s=0.0, twt_s=0.0, generator_busy_s=40.0, learner_busy_s=40.0,
                 groups=8, depth=16, open=8)  # fmt: skip
"""Learners set the pace; on average 12 groups are in flight, and the bound would let in 28."""


def split_of(generators: int, learners: int) -> dict[str, int]:
    return {"generator": generators, "learner": learners, "scorer": 0, "spare": 0}


def held(demand: float) -> Balance:
    """After three steps in which tasks wanted that share of the memory of four generators."""
    balance = Balance(scaling=1.0)
    for step in (11, 12, 13):
        balance.observe(replace(HELD, step=step, demand=demand), split_of(4, 4))
    return balance


def test_generators_whose_memory_is_full_are_not_held_back() -> None:
    """More groups side by side would speed them up, but there is no room for more."""
    assert held(0.0).held_back(split_of(4, 4), "colocated") > 0.15, "memory unknown"
    assert held(0.1).held_back(split_of(4, 4), "colocated") > 0.15, "ample"
    assert held(1.0).held_back(split_of(4, 4), "colocated") < 0.02, "full but for the end of a step"
    assert held(2.0).held_back(split_of(4, 4), "colocated") == 0.0


@given(demand=st.floats(0.05, 3.0), generators=st.integers(1, 4))
def test_fewer_generators_gain_nothing_from_scarce_memory(demand: float, generators: int) -> None:
    ample = held(0.0).step_s(split_of(generators, 4), "colocated")
    scarce = held(demand).step_s(split_of(generators, 4), "colocated")
    assert ample <= 1.001 * scarce


def test_more_generators_bring_more_memory() -> None:
    full = held(2.0)
    gain = full.step_s(split_of(4, 100), "colocated") / full.step_s(split_of(8, 100), "colocated")
    assert gain > 1.9, "a group's own time shortens too, since more of them fly at once"


def test_a_generator_less_takes_its_memory_along() -> None:
    """Two are full at 0.8 * 6 / 0.6 = 8 groups, and more are in flight at any time.

    A batch takes 10 s with 12 in flight, half of it a group's own time, half work that all ranks share.
    """
    assert held(0.6).generation.seconds(4, 12.0) == pytest.approx(10.0)
    two = held(0.6).step_s(split_of(2, 100), "colocated")
    assert two == pytest.approx(5.0 * 12 / 8 + 5.0 * 2)
    assert two > held(0.0).step_s(split_of(2, 100), "colocated") + 2.0


def test_a_batch_that_enters_at_once_fills_memory_for_a_while() -> None:
    assert below(20.0, 8.0, 24.0) == 20.0, "never full"
    assert below(20.0, 8.0, 16.0) == 16.0, "always full"
    assert below(20.0, 8.0, 20.0) == pytest.approx(0.5 * 20.0 + 0.5 * 18.0)
    assert below(2.0, 8.0, 3.0) == pytest.approx(0.5 * 3.0 + 0.5 * 1.5), "not fewer than none"
    assert below(20.0, 0.0, 19.0) == 19.0


# -- a load that has not been trained yet ------------------------------------------------------------


def step(n: int, *, trained: int, grown: int, learner_s: float, generator_s: float) -> StepFacts:
    """Eight groups are trained and eight are made; ``trained`` and ``grown``: tokens of their rows."""
    return StepFacts(
        step=n, step_s=10.0, rwt_s=0.0, twt_s=0.0, generator_busy_s=generator_s, learner_busy_s=learner_s,
        groups=8, depth=8, open=1, generated_tokens=1000, trained_tokens=1000, row_tokens=trained,
        grown_tokens=grown,
    )  # fmt: skip


def shifting(grown: int, score_s: float = 0.0) -> Balance:
    """Rows of 4,000 tokens a batch are trained while generators, three times as fast now, make others."""
    balance = Balance(scaling=1.0)
    for n in range(1, 12):
        seen = step(n, trained=4000, grown=4000, learner_s=30.0, generator_s=40.0)
        balance.observe(replace(seen, scorer_busy_s=score_s), split_of(4, 3))
    for n in (12, 13):
        seen = step(n, trained=4000, grown=grown, learner_s=30.0, generator_s=13.0)
        balance.observe(replace(seen, scorer_busy_s=score_s), split_of(4, 3))
    assert balance.generation.mixed > 0, "the shift was noticed"
    return balance


def test_what_a_load_takes_to_train_is_told_before_it_is_trained() -> None:
    assert shifting(10_000).step_s(split_of(4, 1), "decoupled") == pytest.approx(75.0, rel=0.01)
    assert shifting(4_000).step_s(split_of(4, 1), "decoupled") == pytest.approx(30.0, rel=0.01)
    both = shifting(10_000, score_s=8.0).step_s(split_of(4, 1), "colocated")
    assert both == pytest.approx(75.0 + 20.0, rel=0.01)


def test_what_is_foreseen_does_not_blur_how_far_both_sides_overlap() -> None:
    """Generating and training alternate. A step with old batches still takes what those take to train."""
    balance = Balance(scaling=1.0)
    for n in range(1, 24):
        seen = step(n, trained=4000, grown=4000, learner_s=30.0, generator_s=40.0)
        balance.observe(replace(seen, step_s=20.0), split_of(4, 3))
    before = balance.serial
    for n in (24, 25, 26):
        seen = step(n, trained=4000, grown=20_000, learner_s=30.0, generator_s=13.0)
        balance.observe(replace(seen, step_s=13.25), split_of(4, 3))
        assert balance.serial == pytest.approx(before, abs=0.15)
    assert before > 0.95 and balance.generation.mixed > 0


def test_where_rows_are_not_told_the_last_batches_are_what_is_known() -> None:
    assert shifting(0).step_s(split_of(4, 1), "decoupled") == pytest.approx(30.0, rel=0.01)


def test_a_batch_of_an_unknown_number_of_groups_is_not_foreseen() -> None:
    """Nothing times what a group takes would be a batch that costs nothing."""
    balance = shifting(10_000)
    balance.passed(replace(HELD, step=14, groups=0))
    assert balance.step_s(split_of(4, 1), "decoupled") == pytest.approx(30.0, rel=0.01)


def test_once_it_is_trained_the_batches_tell() -> None:
    balance = shifting(10_000)
    for n in range(14, 30):
        seen = step(n, trained=10_000, grown=11_000, learner_s=66.0, generator_s=13.0)
        balance.observe(seen, split_of(4, 3))
    assert balance.generation.mixed <= 0
    assert balance.step_s(split_of(4, 1), "decoupled") == pytest.approx(66.0)


def test_of_a_shift_only_the_newest_step_counts() -> None:
    """The one before may hold both loads."""
    rows = Rows()
    assert not rows.known
    for shifted, grown in ((False, 4000), (False, 7000), (True, 10_000)):
        rows.add((30.0, 3.0, 4000, 8), (grown, 8.0), (0, 0), shifted)
    assert rows.known
    assert rows.works(8) == pytest.approx((75.0, 7.5))
    assert rows.works(4) == pytest.approx((37.5, 3.75))


def test_a_change_is_believed_by_its_excess_over_what_groups_in_flight_may_hide() -> None:
    def told(*flying: int) -> float:
        rows = Rows()
        rows.add((30.0, 3.0, 4000, 8), (4000, 8.0), (0, 0), False)
        rows.add((30.0, 3.0, 4000, 8), (10_000, 8.0), (flying[0], flying[1]), True)
        return rows.works(8)[0]

    assert told(0, 0) == pytest.approx(75.0)
    assert told(8, 8) == pytest.approx(30.0 * 2.5 ** (1 - (math.sqrt(2 / 12) / math.log(2.5)) ** 2))
    assert told(40, 0) == pytest.approx(30.0), "anything could be"
