"""Group statistics: exact zeros, ragged groups, permutations, a slow oracle."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import CreditConfig
from learner.credit.group import advantages
from learner.credit.pipeline import credit_group, credit_metrics
from learner.credit.spread import spread
from tests.learner_tiny import make_call, make_group, make_trajectory

BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("std", "none")


def oracle(rewards: list[float], config: CreditConfig) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        if config.baseline == "mean":
            reward -= statistics.fmean(rewards)
        elif config.baseline == "leave_one_out":
            reward -= statistics.fmean(rewards[:i] + rewards[i + 1 :])
        if config.scale == "std":
            reward /= statistics.stdev(rewards) + config.epsilon
        out.append(reward)
    return out


@pytest.mark.parametrize(("baseline", "scale"), list(itertools.product(BASELINES, SCALES)))
def test_against_the_slow_oracle(baseline: str, scale: str) -> None:
    config = CreditConfig(baseline=baseline, scale=scale)
    for rewards in ([0.0, 1.0], [0.2, 0.5, 3.0], [1.0, 0.0, 0.0, 1.0, 1.0]):
        assert advantages(rewards, config) == pytest.approx(oracle(rewards, config), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("value", [0.95, 0.1, 1 / 3])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", SCALES)
def test_constant_group_is_exactly_zero(value: float, baseline: str, scale: str) -> None:
    config = CreditConfig(baseline=baseline, scale=scale)
    for size in (2, 3, 7, 8):
        assert advantages([value] * size, config).tolist() == [0.0] * size


def test_tolerance_of_a_constant_group_on_both_sides() -> None:
    config = CreditConfig(constant_tolerance=1e-6)
    assert not advantages([1.0, 1.0 + 0.9e-6], config).any()
    assert advantages([1.0, 1.0 + 1.1e-6], config).all()


def test_singleton_has_no_comparison_and_plain_reinforce_needs_none() -> None:
    assert advantages([5.0], CreditConfig()).tolist() == [0.0]
    assert advantages([5.0], CreditConfig(baseline="none", scale="none")).tolist() == [5.0]


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9),
    baseline=st.sampled_from(BASELINES),
    scale=st.sampled_from(SCALES),
    data=st.data(),
)
def test_permuting_a_group_permutes_the_result_bit_for_bit(rewards, baseline, scale, data) -> None:
    config = CreditConfig(baseline=baseline, scale=scale)
    order = data.draw(st.permutations(range(len(rewards))))
    straight = advantages(rewards, config)
    assert np.array_equal(advantages([rewards[i] for i in order], config), straight[list(order)])
    assert np.isfinite(straight).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.0, bad], CreditConfig())


def test_spread_per_token_and_per_length() -> None:
    masks = [np.array([False, True, True]), np.array([False, False, True, True])]
    assert [a.tolist() for a in spread(2.0, masks)] == [[0, 2, 2], [0, 0, 2, 2]]
    assert [a.tolist() for a in spread(2.0, masks, "per_length")] == [[0, 0.5, 0.5], [0, 0, 0.5, 0.5]]
    assert not spread(2.0, [np.zeros(3, bool)], "per_length")[0].any()


def group_of(rewards: list[float | None]):
    members = [
        make_trajectory(f"t{i}", [make_call(0, 0, [5], [6] * (i + 1))], reward)
        for i, reward in enumerate(rewards)
    ]
    return make_group(members)


def test_ragged_groups_never_mix_and_failures_leave_the_baseline() -> None:
    groups = [group_of([0, 0, 1, 1]), group_of([1, None, 0, math.nan]), group_of([7.0])]
    credit = [credit_group(group, CreditConfig(scale="none")) for group in groups]
    assert credit[0].advantages == (-0.5, -0.5, 0.5, 0.5)
    assert credit[1].advantages == (0.5, -0.5) and credit[1].unscored == 2
    assert [sample.trajectory for sample in credit[1].samples] == ["t0", "t2"]
    assert credit[2].advantages == (0.0,)
    for one in credit:
        for sample, values in zip(one.samples, one.coefficients, strict=True):
            assert len(values) == len(sample.ids) and not values[~sample.mask].any()
    metrics = credit_metrics(credit)
    assert metrics["group_zero_std_fraction"] == pytest.approx(1 / 3)
    assert metrics["members_unscored"] == 2
    assert metrics["reward_mean"] == pytest.approx((0 + 0 + 1 + 1 + 1 + 0 + 7) / 7)


def test_two_constant_groups_give_zero_although_their_rewards_differ() -> None:
    credit = [credit_group(group_of(rewards), CreditConfig()) for rewards in ([0, 0], [1, 1])]
    assert [one.advantages for one in credit] == [(0.0, 0.0), (0.0, 0.0)]


def test_zero_reward_is_a_score_and_no_reward_is_not() -> None:
    assert credit_group(group_of([0.0, 0.0]), CreditConfig()).unscored == 0
    empty = credit_group(group_of([None, None]), CreditConfig())
    assert empty.samples == () and empty.unscored == 2
    assert credit_metrics([empty])["group_zero_std_fraction"] == 0.0
