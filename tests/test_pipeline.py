"""Scorer-actor pipelining: the cost model by hand, the choice of mode, the order, the batch range."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pipeline import (
    TAIL_SHARE,
    Costs,
    Measured,
    ScoringChooser,
    ScoringFacts,
    arrivals,
    batch_range,
    better,
    colocated,
    completions,
    decoupled_s,
    full_batch_s,
    order,
    thrash_s,
)

seconds = st.floats(0, 50, allow_nan=False)
gaps = st.lists(st.floats(0, 10), min_size=1, max_size=12)


@st.composite
def readiness(draw: st.DrawFn) -> tuple[float, ...]:
    return tuple(itertools.accumulate(draw(gaps)))


@st.composite
def costs(draw: st.DrawFn, scorers: int = 1) -> Costs:
    return Costs(
        score_s=draw(seconds),
        train_s=draw(seconds),
        swap_s=draw(st.floats(0, 10)),
        scorers=draw(st.integers(scorers, 4)),
        learners=draw(st.integers(1, 4)),
    )


def test_arrivals() -> None:
    assert arrivals(2, 3.0, 4) == (0.0, 0.0, 3.0, 6.0)
    assert arrivals(0, 3.0, 2) == (3.0, 6.0)
    assert arrivals(9, 3.0, 2) == (0.0, 0.0)
    with pytest.raises(ValueError, match="tprm_s = -1"):
        arrivals(0, -1, 2)


def test_flow_shop_by_hand() -> None:
    """f' = 2 on one scorer, g' = 3 on two learners."""
    two = Costs(score_s=2, train_s=6, swap_s=9, scorers=1, learners=2)
    assert decoupled_s((0, 0, 0), two) == 2 + 3 * 3
    assert decoupled_s((0, 0, 10), two) == 10 + 2 + 3
    assert decoupled_s((0, 0, 10), two, sizes=(1, 1, 0.5)) == 10 + 1 + 1.5
    assert decoupled_s((0, 0, 10), two, gated=True) == 10 + 3 * 3  # the first two are scored by then
    shared = Costs(score_s=3, train_s=6, swap_s=0.5, scorers=1, learners=2)
    assert colocated((0, 0, 0), shared) == (1 + 3 * 3, 1)
    assert colocated((0, 1, 2), shared) == (4 + 7, 2)  # the second burst takes both
    assert colocated((0, 1, 2), shared, gated=True) == (2 + 1 + 9, 1)
    assert full_batch_s((0, 1, 2), shared) == 12 and thrash_s((0, 1, 2), shared) == 12
    with pytest.raises(ValueError, match="2 sizes for 3"):
        decoupled_s((0, 0, 0), two, sizes=(1, 1))


@given(readiness(), costs())
def test_completion_is_bounded_by_arrival_and_work(ready: tuple[float, ...], given_costs: Costs) -> None:
    dec = decoupled_s(ready, given_costs)
    col, bursts = colocated(ready, given_costs)
    count, ranks = len(ready), given_costs.shared
    score, train = given_costs.score_s / given_costs.scorers, given_costs.train_s / given_costs.learners
    work = (given_costs.score_s + given_costs.train_s) / ranks
    eps = 1e-6 * (1 + dec + col)
    assert max(ready[-1] + score + train, count * max(score, train)) <= dec + eps
    assert dec <= ready[-1] + count * (score + train) + eps
    assert 1 <= bursts <= count
    assert max(ready[-1] + 2 * given_costs.swap_s + work, count * work) <= col + eps
    assert col <= thrash_s(ready, given_costs) + eps  # greedy never swaps more often than that
    assert decoupled_s(ready, given_costs, gated=True) + eps >= dec
    assert full_batch_s(ready, given_costs) == pytest.approx(
        ready[-1] + 2 * given_costs.swap_s + count * work, abs=eps
    )


@given(readiness(), costs(), st.floats(1, 3))
def test_slower_parts_never_end_earlier(ready: tuple[float, ...], given_costs: Costs, factor: float) -> None:
    slower = Costs(
        given_costs.score_s * factor,
        given_costs.train_s * factor,
        given_costs.swap_s,
        given_costs.scorers,
        given_costs.learners,
    )
    assert decoupled_s(ready, slower) >= decoupled_s(ready, given_costs) - 1e-9


def fill(costs: Costs, count: int) -> float:
    """What decoupled takes beyond its work if all is ready and nothing was scored ahead."""
    work = count * (costs.score_s + costs.train_s) / (costs.scorers + costs.learners)
    return decoupled_s((0.0,) * count, costs) - work


@given(st.floats(0.01, 50), st.floats(0.01, 20), st.integers(1, 32))
def test_if_all_is_ready_decoupled_wins_iff_two_swaps_exceed_the_fill(
    work: float, swap: float, count: int
) -> None:
    """T4: balanced split, RAS = M. The fill is then one micro-batch's scoring."""
    balanced = Costs(score_s=work, train_s=3 * work, swap_s=swap, scorers=1, learners=3)
    ready = arrivals(count, 0.0, count)
    dec, col = decoupled_s(ready, balanced), colocated(ready, balanced)[0]
    assert fill(balanced, count) == pytest.approx(work, rel=1e-6)
    if not math.isclose(2 * swap, work, rel_tol=1e-6):
        assert (dec < col) == (2 * swap > work)


@given(st.integers(1, 16), st.integers(1, 4), st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 5))
def test_any_split_decoupled_wins_iff_two_swaps_exceed_the_fill(
    count: int, learners: int, train: float, score: float, swap: float
) -> None:
    split = Costs(score, train, swap, 1, learners)
    ready = arrivals(count, 0.0, count)
    dec, col = decoupled_s(ready, split), colocated(ready, split)[0]
    if abs(2 * swap - fill(split, count)) > 1e-6:
        assert (dec < col) == (2 * swap > fill(split, count))


def test_the_chosen_mode_is_the_faster_one_over_a_grid() -> None:
    """T4: RAS x TPRM x swap; fresh chooser, facts repeated until it may change."""
    right = total = 0
    grid = itertools.product(range(9), (0.0, 0.2, 0.5, 1, 2, 4, 8), (0.05, 0.2, 0.5, 1, 2))
    for ras, tprm, swap in grid:
        facts = ScoringFacts(8, ras, tprm, Costs(1.0, 3.0, swap, 1, 3))
        dec, col = completions(facts)
        for start in ("decoupled", "colocated"):
            chooser = ScoringChooser(start)  # type: ignore[arg-type]
            for _ in range(3):
                mode = chooser.choose(facts)
            best, chosen = min(dec, col), dec if mode == "decoupled" else col
            total += 1
            right += chosen == best
            assert chosen <= best * 1.0205  # never worse than the hysteresis band
    assert right / total >= 0.95, f"{right} of {total}"


def test_a_tie_goes_to_the_mode_that_frees_ranks() -> None:
    """Arrival-bound: both end with the last arrival; colocated on the learners alone frees the scorer."""
    slow = ScoringFacts(8, 0, 100.0, Costs(1.0, 3.0, 0.1, 1, 3, colocated=3))
    dec, col = completions(slow)
    assert abs(dec - col) < 0.01 * dec
    chooser = ScoringChooser()
    modes = [chooser.choose(slow) for _ in range(3)]
    assert modes == ["decoupled", "colocated", "colocated"]
    assert slow.costs.freed == 1
    assert better(10.0, 10.05, 0) == "decoupled" and better(10.0, 10.05, 1) == "colocated"


def test_without_scorers_colocated_is_chosen_at_once() -> None:
    facts = ScoringFacts(8, 8, 0.0, Costs(1.0, 3.0, 2.0, 0, 1, colocated=1))
    assert math.isinf(completions(facts)[0])
    assert ScoringChooser().choose(facts) == "colocated"


def test_what_is_scored_ahead_counts_for_scorers_of_their_own() -> None:
    """Two micro-batches, both ready, swaps free: sharing wins, unless segments were scored as they came."""
    late = ScoringFacts(2, 2, 0.0, Costs(2.0, 4.0, 0.0, 1, 2, colocated=3))
    ahead = ScoringFacts(2, 2, 0.0, Costs(2.0, 4.0, 0.0, 1, 2, colocated=3, ahead=0.9))
    assert completions(late) == (6.0, 4.0)
    assert completions(ahead) == (pytest.approx(4.2), 4.0)
    shared = ScoringFacts(2, 2, 0.0, Costs(2.0, 4.0, 0.0, 1, 2, colocated=2, ahead=0.9))
    for facts, mode in ((late, "colocated"), (shared, "decoupled")):
        chooser = ScoringChooser()
        assert [chooser.choose(facts) for _ in range(3)][-1] == mode
    with pytest.raises(ValueError, match=r"ahead = 1\.5"):
        Costs(1, 1, 1, 1, 1, ahead=1.5)


def test_hysteresis_needs_agreement_and_a_lead() -> None:
    fast_swap = ScoringFacts(8, 8, 0.0, Costs(1.0, 3.0, 0.1, 1, 3))
    slow_swap = ScoringFacts(8, 8, 0.0, Costs(1.0, 3.0, 1.0, 1, 3))
    chooser = ScoringChooser()
    seen = [chooser.choose(f) for f in (fast_swap, slow_swap, fast_swap, slow_swap)]
    assert seen == ["decoupled"] * 4  # asked for every second step only
    near = ScoringFacts(8, 8, 0.0, Costs(1.0, 3.0, 0.45, 1, 3))  # colocated leads by 1%
    assert [chooser.choose(near) for _ in range(5)] == ["decoupled"] * 5
    assert [chooser.choose(fast_swap) for _ in range(2)] == ["decoupled", "colocated"]
    assert chooser.choose(None) == "colocated"


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 5), st.floats(0, 3)), min_size=4, max_size=40))
def test_the_mode_never_changes_twice_within_the_steps_that_must_agree(
    trace: list[tuple[int, float, float]],
) -> None:
    chooser = ScoringChooser(agree_steps=3)
    modes = [
        chooser.choose(ScoringFacts(8, ras, tprm, Costs(1.0, 3.0, swap, 1, 3)))
        for ras, tprm, swap in trace
    ]
    changes = [i for i in range(1, len(modes)) if modes[i] != modes[i - 1]]
    assert all(b - a >= 3 for a, b in itertools.pairwise(changes))


@given(
    st.integers(0, 40), st.floats(0, 100), st.floats(0, 100), st.integers(1, 10), st.integers(0, 20),
    st.floats(0, 100),
)  # fmt: skip
def test_batch_range_is_the_first_size_at_which_waiting_stops_to_pay(
    ready: int, gap: float, train: float, least: int, more: int, fixed: float
) -> None:
    ideal = least + more
    size = batch_range(ready, gap, train, least, ideal, fixed)
    assert least <= size <= ideal and size >= min(ready, ideal)
    if gap <= train:
        assert size == ideal
        return

    def rate(n: int, wait: float) -> float:
        total = wait + fixed + n * train
        return n / total if total else math.inf

    if size < ideal:  # one more would have to be waited for
        assert rate(size + 1, gap) <= rate(size, 0) * (1 + 1e-9)
    if size > max(least, min(ready, ideal)):  # with one fewer, waiting paid
        assert rate(size, gap) >= rate(size - 1, 0) * (1 - 1e-9)


def test_batch_range_bounds() -> None:
    assert batch_range(0, math.inf, 1.0, 2, 8, 5.0) == 2
    assert batch_range(0, 2.0, 1.0, 2, 8, 7.0) == 4
    assert batch_range(6, 2.0, 1.0, 2, 8, 7.0) == 6
    with pytest.raises(ValueError, match="b_min = 3, b_ideal = 2"):
        batch_range(0, 1, 1, 3, 2)


items = st.lists(st.integers(0, 100), max_size=60)


@given(items, st.integers(1, 200), st.sampled_from(["decoupled", "colocated"]), st.integers(1, 5),
       st.none() | st.integers(1, 6))  # fmt: skip
def test_order_deals_every_item_exactly_once(
    lengths: list[int], micro_tokens: int, mode: str, ranks: int, most: int | None
) -> None:
    batches = order(lengths, micro_tokens, mode, ranks, most)
    dealt = [item for batch in batches for part in batch for item in part]
    assert sorted(dealt) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == ranks and any(batch)
        for part in batch:
            assert most is None or len(part) <= most
            assert sum(lengths[i] for i in part) <= micro_tokens or len(part) == 1
    assert batches == order(lengths, micro_tokens, mode, ranks, most)


@given(st.lists(st.integers(1, 20), min_size=20, max_size=60), st.integers(1, 4))
def test_decoupled_puts_the_shortest_at_the_tail(lengths: list[int], ranks: int) -> None:
    batches = order(lengths, 40, "decoupled", ranks)
    smallest = [min(lengths[i] for part in batch for i in part) for batch in batches]
    largest = [max(lengths[i] for part in batch for i in part) for batch in batches]
    assert all(a >= b for a, b in zip(smallest, largest[1:], strict=False))


def test_the_last_micro_batch_is_tiny_and_the_early_ones_are_full() -> None:
    lengths = [50] * 16 + [5, 6]
    for mode in ("decoupled", "colocated"):
        batches = order(lengths, 100, mode, 2)
        loads = [[sum(lengths[i] for i in part) for part in batch] for batch in batches]
        assert loads[:-1] == [[100, 100]] * 4
        assert max(loads[-1]) <= TAIL_SHARE * 100
    assert len(order([50, 5], 100, "decoupled", 1)) == 1  # all fits in one: nothing to overlap with


@given(st.lists(st.integers(1, 100), min_size=8, max_size=64), st.integers(2, 4))
def test_zigzag_evens_out_the_ranks(lengths: list[int], ranks: int) -> None:
    batches = order(lengths, 400, "colocated", ranks, tail_share=0.0)
    loads = [sum(lengths[i] for batch in batches for i in batch[rank]) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(lengths)


def test_order_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="micro_tokens = 0"):
        order([1], 0, "decoupled", 1)
    with pytest.raises(ValueError, match="mode 'both'"):
        order([1], 1, "both", 1)
    with pytest.raises(ValueError, match="negative"):
        order([-1], 1, "decoupled", 1)


def test_measured_means_and_their_guesses() -> None:
    measured = Measured(weight=0.5)
    assert measured.costs(1, 1) is None
    measured.observe(train_s=3.0)
    assert measured.costs(1, 1) is None  # neither scoring nor a swap was seen
    measured.observe(swap_s=1.0)
    assert measured.costs(0, 2, 2) == Costs(1.0, 3.0, 1.0, 0, 2, 2)  # a forward pass is a third
    measured.observe(score_s=2.0, train_s=5.0)
    assert measured.costs(1, 1) == Costs(2.0, 4.0, 1.0, 1, 1)
    measured.observe(ahead=0.8)
    measured.observe(ahead=0.4)
    known = measured.costs(1, 1)
    assert known is not None and known.ahead == pytest.approx(0.6)
    with pytest.raises(ValueError, match="score_s = -1"):
        measured.observe(score_s=-1)
    with pytest.raises(ValueError, match="learners = 0"):
        Costs(1, 1, 1, 1, 0)
