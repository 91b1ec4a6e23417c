"""Calls to samples to packed rows: ids, masks and weights survive exactly."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import VersionSpan
from learner.batch import compile_group, loss_weights, pack
from tests.learner_tiny import make_call, make_group, make_sample, make_samples, make_trajectory

EOS = 2


def three_turns():
    first = make_call(0, 0, [5, 6, 7], [10, EOS])
    second = make_call(1, 5, [8, 9], [11, 12, EOS], versions=(VersionSpan(0, 0, 1), VersionSpan(1, 1, 3)))
    third = make_call(2, 10, [8], [EOS], versions=(VersionSpan(1, 0, 1),))
    return make_trajectory("t0", [first, second, third])


def test_append_only_trajectory_is_one_row_of_the_sampled_ids() -> None:
    (row,) = compile_group(make_group([three_turns()]))
    assert row.ids.tolist() == [5, 6, 7, 10, EOS, 8, 9, 11, 12, EOS, 8, EOS]
    assert np.flatnonzero(row.mask).tolist() == [3, 4, 7, 8, 9, 11]
    assert row.versions.tolist() == [-1, -1, -1, 0, 0, -1, -1, 0, 1, 1, -1, 1]
    assert row.turns.tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert row.behaviour[[3, 4, 7]].tolist() == pytest.approx([-0.5, -0.51, -0.5])
    assert not row.behaviour[~row.mask].any()
    assert row.ids.dtype == np.int32 and row.behaviour.dtype == np.float32 and row.turns.dtype == np.int16


def test_end_token_is_trained_though_it_is_the_padding_id_and_observations_are_not() -> None:
    call = make_call(0, 0, [EOS, 5], [EOS, EOS])
    (row,) = compile_group(make_group([make_trajectory("t0", [call])]))
    assert row.mask.tolist() == [False, False, True, True]


def test_call_mode_gives_a_row_per_call_with_the_history_as_context() -> None:
    rows = compile_group(make_group([three_turns()]), "call")
    assert [row.ids.tolist()[-1] for row in rows] == [EOS] * 3
    assert [np.flatnonzero(row.mask).tolist() for row in rows] == [[3, 4], [7, 8, 9], [11]]
    assert sum(row.trained for row in rows) == 6


def test_eviction_starts_a_row_and_no_token_is_trained_twice() -> None:
    first = make_call(0, 0, [5, 6, 7], [10, 11])
    evicted = make_call(1, 4, [8], [12])
    rows = compile_group(make_group([make_trajectory("t0", [first, evicted])]))
    assert [row.ids.tolist() for row in rows] == [[5, 6, 7, 10, 11], [5, 6, 7, 10, 8, 12]]
    assert [np.flatnonzero(row.mask).tolist() for row in rows] == [[3, 4], [5]]
    assert rows[1].versions.tolist() == [-1] * 5 + [0]


def test_last_action_of_a_long_episode_is_trained() -> None:
    calls, length = [], 0
    for turn in range(6):
        calls.append(make_call(turn, length, [5, 6], [7, 8, 9, EOS]))
        length += 6
    (row,) = compile_group(make_group([make_trajectory("t0", calls)]))
    assert row.mask[-4:].all() and row.trained == 24


def test_call_without_output_adds_context_only() -> None:
    calls = [make_call(0, 0, [5], []), make_call(1, 1, [6], [7])]
    (row,) = compile_group(make_group([make_trajectory("t0", calls)]))
    assert row.mask.tolist() == [False, False, True]
    assert compile_group(make_group([make_trajectory("t0", calls[:1])])) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": b""}, "log-probs"),
        ({"temperature": 0.5}, "temperature"),
        ({"versions": (VersionSpan(0, 0, 1),)}, "spans"),
        ({"versions": (VersionSpan(0, 1, 2),)}, "spans"),
        ({"versions": (VersionSpan(0, 0, 3),)}, "spans"),
    ],
)
def test_inconsistent_call_is_refused(changes: dict, message: str) -> None:
    calls = [make_call(0, 0, [5], [6]), make_call(1, 2, [5], [6, 7], **changes)]
    with pytest.raises(ValueError, match=message):
        compile_group(make_group([make_trajectory("t0", calls)]))


def test_empty_prompt_greedy_and_unequal_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        compile_group(make_group([make_trajectory("t0", [make_call(0, 0, [], [5])])]))
    with pytest.raises(ValueError, match="temperature 0"):
        compile_group(make_group([make_trajectory("t0", [make_call(0, 0, [5], [5], temperature=0.0)])]))
    with pytest.raises(ValueError, match="lengths differ"):
        make_sample(0, 5, 2, mask=np.zeros(4, bool))


def recover(plan, samples):
    """Read each sample back from the packed rows."""
    found = {}
    for batch in plan.ranks:
        for row in range(batch.rows):
            for number in range(1, batch.segments[row].max() + 1):
                at = batch.segments[row] == number
                (index,) = set(batch.sample[row][at].tolist())
                assert index not in found
                assert batch.positions[row][at].tolist() == list(range(at.sum()))
                found[index] = {
                    name: getattr(batch, name)[row][at]
                    for name in ("ids", "mask", "behaviour", "versions", "advantage", "weight", "temperature")
                }
    assert sorted(found) == list(range(len(samples)))
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=25),
    ranks=st.integers(1, 4),
    row_tokens=st.integers(40, 90),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
def test_packing_loses_nothing_and_keeps_its_bounds(
    lengths: list[int], ranks: int, row_tokens: int, reduction: str
) -> None:
    samples = [make_sample(i, length, 1 + i % (length - 1)) for i, length in enumerate(lengths)]
    advantage = [np.where(s.mask, np.float32(i + 1), 0).astype(np.float32) for i, s in enumerate(samples)]
    plan = pack(samples, advantage, row_tokens, ranks, 2, reduction, 1.0)
    assert len({batch.rows for batch in plan.ranks}) == 1
    assert len({len(batch.micro_batches()) for batch in plan.ranks}) == 1
    assert all(batch.ids.shape[1] <= row_tokens for batch in plan.ranks)
    weights = loss_weights(samples, reduction)
    for index, arrays in recover(plan, samples).items():
        sample = samples[index]
        for name in ("ids", "mask", "behaviour", "versions"):
            assert np.array_equal(arrays[name], getattr(sample, name))
        assert np.array_equal(arrays["advantage"], advantage[index])
        assert np.array_equal(arrays["weight"], weights[index])
        assert set(arrays["temperature"].tolist()) == {np.float32(0.7)}
    for batch in plan.ranks:
        padding = batch.segments == 0
        assert not batch.weight[padding].any() and not batch.mask[padding].any()
        assert (batch.sample[padding] == -1).all()
        assert batch.global_tokens == sum(s.trained for s in samples)


def test_packing_is_deterministic_balanced_and_picklable() -> None:
    samples, advantage = make_samples()
    plans = [pack(samples, advantage, 64, 2, 2) for _ in range(2)]
    for one, two in zip(plans[0].ranks, plans[1].ranks, strict=True):
        copy = pickle.loads(pickle.dumps(two))
        for field in dataclasses.fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(copy, field.name))
    loads = [int((batch.segments > 0).sum()) for batch in plans[0].ranks]
    assert max(loads) - min(loads) <= 40  # the longest sample


def test_more_ranks_than_samples_gives_padding_ranks() -> None:
    plan = pack([make_sample(0, 5, 2)], [np.ones(5, np.float32)], 16, 3, 1)
    assert [int(batch.mask.sum()) for batch in plan.ranks] == [3, 0, 0]
    assert all(batch.rows == 1 for batch in plan.ranks)
    empty = pack([], [], 16, 2, 1)
    assert [batch.global_tokens for batch in empty.ranks] == [0, 0]


def test_too_long_sample_is_refused_by_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"17 tokens.*row_tokens is 16"):
        pack([make_sample(0, 17, 2)], [np.zeros(17, np.float32)], 16, 1, 1)


def test_weights_by_a_slow_oracle() -> None:
    samples, _ = make_samples()
    samples[1] = dataclasses.replace(samples[1], trajectory="t0")  # one trajectory of two rows
    samples[3] = dataclasses.replace(samples[3], mask=np.zeros(31, bool))  # all masked
    names = [s.trajectory for s in samples]
    counts = {name: sum(int(s.mask.sum()) for s in samples if s.trajectory == name) for name in names}
    alive = [name for name in counts if counts[name] > 0]
    expected = {
        "token_mean": lambda name: 1 / sum(counts.values()),
        "sequence_mean": lambda name: 1 / (len(alive) * counts[name]),
        "constant": lambda name: 1 / (len(alive) * 8.0),
    }
    for reduction, value in expected.items():
        for sample, weight in zip(samples, loss_weights(samples, reduction, 8.0), strict=True):
            for t in range(len(sample.ids)):
                want = value(sample.trajectory) if sample.mask[t] else 0.0
                assert weight[t] == pytest.approx(want, rel=1e-6, abs=0)
    assert sum(w.sum() for w in loss_weights(samples, "sequence_mean")) == pytest.approx(1, rel=1e-5)


def test_coefficients_and_weights_outside_the_mask_are_zero() -> None:
    sample = make_sample(0, 6, 3)
    noisy = dataclasses.replace(sample, behaviour=np.full(6, np.nan, np.float32))
    batch = pack([noisy], [np.full(6, np.inf, np.float32)], 8, 1, 1).ranks[0]
    assert not batch.advantage[~batch.mask].any() and not batch.behaviour[~batch.mask].any()
    assert not batch.weight[~batch.mask].any()
