"""Intervals against textbook values and against what they promise."""

import math

import numpy as np
import pytest

from cluster.sim.statistics import difference, interval, ratio, reduction, t_point


def test_t_points_match_the_table() -> None:
    for freedom, point in ((1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042), (40, 2.021), (120, 1.980)):
        assert t_point(freedom) == pytest.approx(point, abs=6e-4)
    assert t_point(10**6) == pytest.approx(1.95996, abs=1e-4)
    with pytest.raises(ValueError, match="freedom = 0"):
        t_point(0)


def test_interval_of_known_values() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.high - found.mean == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5), rel=1e-3)
    assert found.plain() == {"mean": 3.0, "interval": [found.low, found.high], "seeds": 5}


def test_one_value_has_no_bounds() -> None:
    found = interval([2.0])
    assert (found.mean, found.low, found.high) == (2.0, -math.inf, math.inf)
    assert found.plain() == {"mean": 2.0, "interval": [None, None], "seeds": 1}
    assert ratio([2.0], [1.0]).plain()["mean"] == pytest.approx(2.0)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = interval(random.normal(3.0, 2.0, size=5).tolist())[1:3]
        hits += low <= 3.0 <= high
    assert 0.935 < hits / 2000 < 0.965


def test_pairing_cancels_what_seeds_share() -> None:
    random = np.random.default_rng(1)
    shared = random.uniform(50.0, 150.0, size=5)
    theirs = shared.tolist()
    ours = (shared * 1.3 * random.normal(1.0, 0.01, size=5)).tolist()
    found = ratio(ours, theirs)
    assert found.low < 1.3 < found.high and found.high - found.low < 0.06
    unpaired = interval(ours).high - interval(ours).low
    assert unpaired > 10 * (difference(ours, [1.3 * x for x in theirs]).high)
    assert reduction([20.0, 30.0], [100.0, 100.0]).mean == pytest.approx(0.75)


def test_impossible_comparisons_are_refused() -> None:
    for call in (
        lambda: interval([]),
        lambda: interval([1.0, math.nan]),
        lambda: ratio([1.0], [0.0]),
        lambda: reduction([1.0], [0.0]),
        lambda: ratio([1.0, 2.0], [1.0]),
    ):
        with pytest.raises(ValueError):
            call()
