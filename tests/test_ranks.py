"""Rank moves: a toy plant under a shifting load, and the rules on their own."""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.balance import Balance, Estimate, Saturation
from cluster.messages import RankRow
from cluster.ranks import Bounds, Proposal, RankMachine, StepFacts, choose_rank, deficit, toward

COSTS = {"generator>learner": 3.0, "learner>generator": 3.0, "generator>scorer": 1.0, "scorer>generator": 1.0}
GROUPS = 16
LAG = 1


@dataclass(frozen=True)
class Load:
    """Rank-seconds per step of each kind of work."""

    generate: float
    train: float
    score: float = 0.0


@dataclass
class Plant:
    """Generators fill a bounded queue, learners take batches from it: two rates and their waits."""

    counts: dict[str, int]
    noise: random.Random
    sigma: float = 0.03
    ready: float = 0.0
    step: int = 0

    def run(self, load: Load, switch_s: float = 0.0) -> StepFacts:
        """One optimizer step; a switch stops everybody first."""
        n_g, n_l, n_s = (self.counts[role] for role in ("generator", "learner", "scorer"))
        generate = load.generate * self.noise.lognormvariate(0, self.sigma)
        train = load.train * self.noise.lognormvariate(0, self.sigma)
        rate = n_g / generate  # batches per second
        waited = max(0.0, 1.0 - self.ready) / rate
        self.ready = max(0.0, self.ready - 1.0)
        busy = train / Balance().speed(n_l)
        if load.score:
            busy = max(busy, load.score / n_s) if n_s else busy + load.score / Balance().speed(n_l)
        made = min(rate * busy, LAG - self.ready)
        self.ready += made
        idle = busy - made / rate
        self.step += 1
        return StepFacts(
            step=self.step,
            step_s=waited + busy + switch_s,
            sync_s=switch_s,
            rwt_s=idle * n_g,
            twt_s=waited * n_l,
            generator_busy_s=(waited + made / rate) * n_g,
            learner_busy_s=train / Balance().speed(n_l) * n_l,
            scorer_busy_s=load.score,
            groups=GROUPS,
            depth=round(self.ready * GROUPS),
            phase="cold" if self.step == 1 else "train",
            scoring="decoupled" if n_s else "colocated",
        )


def phases(length: int, *loads: Load) -> Iterator[Load]:
    for load in loads:
        for _ in range(length):
            yield load


def wait_s(facts: StepFacts) -> float:
    return facts.rwt_s + facts.twt_s


def fixed_split(split: dict[str, int], seed: int, loads: Callable[[], Iterator[Load]]) -> float:
    plant = Plant(dict(split), random.Random(seed))
    return math.fsum(wait_s(plant.run(load)) for load in loads())


@dataclass
class Run:
    """What an elastic run did."""

    machine: RankMachine
    waited: float
    moves: list[tuple[int, str]]  # (step, kind)
    seconds: float
    splits: list[dict[str, int]]


def elastic(
    split: dict[str, int], seed: int, loads: Callable[[], Iterator[Load]], sigma: float = 0.03, **bounds: Any
) -> Run:
    plant = Plant(dict(split), random.Random(seed), sigma)
    machine = RankMachine(Bounds(**bounds), COSTS)
    run = Run(machine, 0.0, [], 0.0, [])
    switch_s = 0.0
    for load in loads():
        facts = plant.run(load, switch_s)
        run.waited += wait_s(facts)
        run.seconds += facts.step_s
        run.splits.append(dict(plant.counts))
        switch_s = 0.0
        proposal = machine.decide(facts, plant.counts)
        if proposal is not None:
            machine.begun(proposal)
            plant.counts[proposal.source] -= 1
            plant.counts[proposal.target] += 1
            switch_s = COSTS.get(proposal.kind, 0.0)
            machine.switched(proposal.kind, switch_s)
            machine.done(proposal)
            run.moves.append((facts.step, proposal.kind))
    return run


def split_of(generators: int, learners: int, scorers: int = 0) -> dict[str, int]:
    return {"generator": generators, "learner": learners, "scorer": scorers, "spare": 0}


def alternating() -> Iterator[Load]:
    """Generation-bound, then training-bound, and again, on eight ranks."""
    hard, easy = Load(generate=300.0, train=100.0), Load(generate=100.0, train=300.0)
    return phases(40, hard, easy, hard, easy)


@pytest.mark.parametrize("seed", range(5))
def test_half_the_wait_of_the_best_fixed_split(seed: int) -> None:
    best = min(fixed_split(split_of(n, 8 - n), seed, alternating) for n in range(1, 8))
    run = elastic(split_of(4, 4), seed, alternating)
    assert run.waited <= 0.5 * best, (run.waited, best)


@pytest.mark.parametrize("seed", range(5))
def test_it_settles_within_a_few_steps_of_each_shift(seed: int) -> None:
    """At most four ranks have to move: two steps of agreement, then one move every second step."""
    run = elastic(split_of(4, 4), seed, alternating)
    for start in (0, 40, 80, 120):
        late = [kind for step, kind in run.moves if start + 16 < step <= start + 40]
        assert not late, run.moves


@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_within_thirty_percent_of_what_was_realised(seed: int) -> None:
    run = elastic(split_of(4, 4), seed, alternating, sigma=0.01)
    told = [r for r in run.machine.ledger if r.realised_s is not None and r.steps >= 1]
    assert len(told) >= 6
    predicted = math.fsum(r.predicted_s for r in told)
    realised = math.fsum(r.realised_s or 0.0 for r in told)
    assert abs(predicted - realised) <= 0.3 * realised, [(r.move, r.predicted_s, r.realised_s) for r in told]


LOADS = st.builds(Load, generate=st.floats(50, 1000), train=st.floats(50, 1000))


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(2, 64), share=st.floats(0, 1), load=LOADS, seed=st.integers(0, 1000),
       sigma=st.floats(0, 0.1))  # fmt: skip
def test_a_steady_load_never_makes_it_oscillate(
    ranks: int, share: float, load: Load, seed: int, sigma: float
) -> None:
    """Two moves that undo each other are a horizon apart; without noise at most one is taken back (one
    that was made while the queue still filled)."""
    first = min(ranks - 1, max(1, round(share * ranks)))
    run = elastic(split_of(first, ranks - first), seed, lambda: phases(150, load), sigma)
    pairs = list(pairwise(run.moves))
    assert all(b[0] - a[0] >= 10 for a, b in pairs if a[1] != b[1]), run.moves
    if sigma < 0.01:
        assert sum(a[1] != b[1] for a, b in pairs) <= 1, run.moves

    def step_s(split: dict[str, int]) -> float:
        return max(load.generate / split["generator"], load.train / Balance().speed(split["learner"]))

    assert step_s(run.splits[-1]) <= (1.02 + 2 * sigma) * step_s(run.splits[0])


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(3, 48), loads=st.lists(LOADS, min_size=1, max_size=4), seed=st.integers(0, 1000),
       floor=st.integers(1, 3), ceiling=st.integers(0, 5))  # fmt: skip
def test_floors_ceilings_and_one_move_at_a_time_hold(
    ranks: int, loads: list[Load], seed: int, floor: int, ceiling: int
) -> None:
    floor = min(floor, ranks // 2)
    learners = max(floor, min(ceiling or ranks, ranks // 2))
    run = elastic(
        split_of(ranks - learners, learners), seed, lambda: phases(40, *loads), 0.1,
        floors={"generator": floor, "learner": floor}, ceilings={"learner": max(ceiling, learners)},
    )  # fmt: skip
    for before, after in pairwise(run.splits):
        assert sum(abs(after[role] - before[role]) for role in after) in (0, 2)
        assert min(after["generator"], after["learner"]) >= floor
        assert after["learner"] <= max(ceiling, learners)
        assert sum(after.values()) == ranks


def test_scoring_is_decided_with_the_move() -> None:
    """Short of generation, the only scorer goes to generate and its work joins the learners'."""
    load = Load(generate=700.0, train=60.0, score=20.0)
    run = elastic(split_of(4, 3, 1), 0, lambda: phases(40, load), scoring="auto")
    first = run.machine.ledger[0]
    assert first.move == "scorer>generator"
    assert run.splits[-1]["scorer"] == 0
    fixed = elastic(split_of(4, 3, 1), 0, lambda: phases(40, load), scoring="decoupled")
    assert all(split["scorer"] == 1 for split in fixed.splits), "somebody has to score"


def test_a_slow_scorer_gets_company_from_generators() -> None:
    load = Load(generate=100.0, train=100.0, score=150.0)
    run = elastic(split_of(5, 2, 1), 0, lambda: phases(40, load), scoring="decoupled")
    assert run.moves[0][1] == "generator>scorer", run.moves


# -- rules one by one --------------------------------------------------------------------


def facts(step: int = 1, **changed: Any) -> StepFacts:
    """A step of 10 s with 4 generators and 4 learners, generation-bound by a wide margin."""
    known: dict[str, Any] = {"step": step, "step_s": 10.0, "rwt_s": 0.0, "twt_s": 28.0,
                             "generator_busy_s": 40.0, "learner_busy_s": 12.0}  # fmt: skip
    return StepFacts(**{**known, **changed})


TRAINING_BOUND = {"rwt_s": 28.0, "twt_s": 0.0, "generator_busy_s": 12.0, "learner_busy_s": 40.0}


def machine(**bounds: Any) -> RankMachine:
    return RankMachine(Bounds(**bounds), COSTS, Balance(scaling=1.0))


def test_one_step_is_not_enough_and_a_disagreeing_one_starts_over() -> None:
    decider = machine()
    counts = split_of(4, 4)
    assert decider.decide(facts(1), counts) is None
    assert decider.decide(facts(2, twt_s=0.0, rwt_s=0.0), counts) is None
    assert decider.decide(facts(3), counts) is None
    proposal = decider.decide(facts(4), counts)
    assert proposal is not None
    assert (proposal.kind, proposal.reason) == ("learner>generator", "generation deficit +0.70")
    assert proposal.predicted_s == pytest.approx(10.0 - 40.0 / 5)


def test_nothing_moves_within_the_dead_band_or_for_less_than_it_costs() -> None:
    counts = split_of(4, 4)
    decider = machine()
    assert all(decider.decide(facts(n, twt_s=3.9), counts) is None for n in range(1, 9))
    dear = RankMachine(Bounds(), {kind: 21.0 for kind in COSTS}, Balance(scaling=1.0))
    assert all(dear.decide(facts(n), counts) is None for n in range(1, 9)), "2 s over 10 steps pay 20 s"


@pytest.mark.parametrize(
    ("change", "asked"),
    [({"fill": 0.5, "twt_s": 1.0}, "learner>generator"),
     ({**TRAINING_BOUND, "rwt_s": 1.0, "head_age_s": 16.0}, "generator>learner")],
)  # fmt: skip
def test_short_batches_and_an_old_head_count_inside_the_dead_band(change: dict[str, Any], asked: str) -> None:
    decider, counts = machine(), split_of(4, 4)
    decider.decide(facts(1, **change), counts)
    proposal = decider.decide(facts(2, **change), counts)
    assert proposal is not None and proposal.kind == asked


def test_cold_start_and_evaluation_favour_generation() -> None:
    counts = split_of(4, 4)
    evaluating = machine()
    evaluating.decide(facts(1, twt_s=0.0), counts)
    at_once = evaluating.decide(facts(2, phase="eval"), counts)
    assert at_once is not None and at_once.kind == "learner>generator"
    away = machine()
    assert all(away.decide(facts(n, phase="eval", **TRAINING_BOUND), counts) is None for n in range(1, 9))
    cold = machine(scoring="auto")
    assert cold.decide(facts(1, phase="cold"), split_of(4, 3, 1)) is None, "2 s to and fro"
    cold = machine(scoring="auto")
    proposal = cold.decide(facts(1, step_s=20.0, twt_s=56.0, phase="cold"), split_of(4, 3, 1))
    assert proposal is not None and (proposal.kind, proposal.scoring) == ("scorer>generator", "colocated")
    assert cold.decide(facts(2, phase="cold"), split_of(4, 4)) is None, (
        "learners stay until they are measured"
    )


def make(decider: RankMachine, proposal: Proposal | None, counts: dict[str, int]) -> dict[str, int]:
    assert proposal is not None
    decider.begun(proposal)
    decider.done(proposal)
    return {**counts, proposal.source: counts[proposal.source] - 1,
            proposal.target: counts[proposal.target] + 1}  # fmt: skip


def test_undoing_the_last_move_needs_twice_the_dead_band() -> None:
    for waited, moves in ((0.9, False), (1.1, True)):
        decider, counts = machine(), split_of(4, 4)
        decider.decide(facts(1), counts)
        counts = make(decider, decider.decide(facts(2), counts), counts)
        back = {**TRAINING_BOUND, "rwt_s": waited * 0.2 * 10.0 * counts["generator"]}
        found = [decider.decide(facts(n, **back), counts) for n in range(3, 12)]
        assert any(found) is moves


def test_a_move_that_fails_is_forgotten_and_backs_off() -> None:
    decider, counts = machine(), split_of(4, 4)
    tried = []
    for step in range(1, 60):
        proposal = decider.decide(facts(step), counts)
        if proposal is not None:
            tried.append(step)
            decider.begun(proposal)
            assert decider.decide(facts(step), counts) is None, "one move at a time"
            decider.undone(proposal)
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == [5, 9, 17], tried
    assert {record.state for record in decider.ledger} == {"undone"}


def test_a_proposal_is_regretted_when_the_load_turns_before_it_begins() -> None:
    decider, counts = machine(), split_of(4, 4)
    decider.decide(facts(1), counts)
    proposal = decider.decide(facts(2), counts)
    assert proposal is not None and not decider.regrets(proposal)
    decider.decide(facts(3, **TRAINING_BOUND), counts)
    assert not decider.regrets(proposal), "one step is not enough"
    decider.decide(facts(4, **TRAINING_BOUND), counts)
    assert decider.regrets(proposal)
    decider.begun(proposal)
    decider.undone(proposal, again=True)
    assert not decider.switches.blocked(proposal.kind, 5)


def test_measured_costs_replace_the_prior() -> None:
    decider = machine()
    for seconds in (100.0, 5.0, 7.0, 9.0):
        decider.switched("learner>generator", seconds)
    assert decider.switches.cost("learner>generator") == 7.0
    assert decider.switches.cost("spare>generator") == 1.0, "the cheapest with the same target"


def test_a_move_that_gains_nothing_teaches_distrust() -> None:
    decider, counts = machine(), split_of(4, 4)
    decider.decide(facts(1), counts)
    counts = make(decider, decider.decide(facts(2), counts), counts)
    for step in range(3, 9):
        decider.decide(facts(step, twt_s=0.0), counts)
    (record,) = decider.ledger
    assert decider.switches.take_news() == {"switch_realised_s": 0.0}
    assert decider.switches.take_news() == {}
    assert (record.realised_s, record.steps, record.noise_s) == (0.0, 5, 0.0)
    assert decider.switches.trust("learner>generator") == 0.2


def test_spare_ranks_are_used_and_lost_ones_void_a_measurement() -> None:
    decider = machine()
    counts = {**split_of(3, 4), "spare": 1}
    first = decider.decide(facts(1, twt_s=0.0, generator_busy_s=30.0), counts)
    assert first is not None and first.kind == "spare>generator", "no wait, no agreement needed"
    counts = make(decider, first, counts)
    decider.decide(facts(2), {**counts, "generator": 3})
    assert decider.ledger[0].void == "" and decider.ledger[0].state == "done"
    decider.decide(facts(3), {**counts, "generator": 2})
    assert decider.ledger[0].void == "ranks were lost or joined"


def test_an_operators_target_overrides_and_is_reached_move_by_move() -> None:
    decider, counts = machine(), split_of(4, 4)
    decider.target = {"generator": 6}
    kinds = []
    for step in range(1, 10):
        proposal = decider.decide(facts(step, **TRAINING_BOUND), counts)
        if proposal is not None:
            kinds.append(proposal.kind)
            assert proposal.reason == "target"
            counts = make(decider, proposal, counts)
    assert kinds == ["learner>generator"] * 2
    assert counts == split_of(6, 2)


COUNTS = st.fixed_dictionaries(
    {role: st.integers(0, 5) for role in ("generator", "scorer", "learner", "spare")}
)
TARGETS = st.dictionaries(st.sampled_from(["generator", "scorer", "learner"]), st.integers(0, 6))


@given(counts=COUNTS, target=TARGETS)
def test_a_target_is_approached_and_never_missed_if_it_can_be_met(
    counts: dict[str, int], target: dict[str, int]
) -> None:
    total = sum(counts.values())
    for _ in range(60):
        pair = toward(target, counts, Bounds(floors={}))
        if pair is None:
            break
        counts = {**counts, pair[0]: counts[pair[0]] - 1}
        counts[pair[1]] += 1
        assert min(counts.values()) >= 0
    else:
        pytest.fail("never ends")
    if sum(target.values()) <= total:
        assert all(counts[role] == wish for role, wish in target.items())


def test_what_a_restarted_machine_remembers() -> None:
    decider, counts = machine(), split_of(4, 4)
    decider.decide(facts(1), counts)
    counts = make(decider, decider.decide(facts(2), counts), counts)
    decider.switched("learner>generator", 8.0)
    decider.target = {"learner": 2}
    again = machine()
    again.load(decider.state())
    assert again.switches.cost("learner>generator") == 8.0
    assert again.target == {"learner": 2}
    assert again.ledger[0].void == "the controller was restarted"
    assert again.switches.last == "learner>generator"


def test_the_rank_that_moves() -> None:
    rows = [RankRow(0, "learner", "a"), RankRow(1, "learner", "b"), RankRow(2, "learner", "c"),
            RankRow(3, "generator", "b"), RankRow(4, "generator", "x", True)]  # fmt: skip
    assert choose_rank(rows, "learner", "generator") == 1, "beside its new peers"
    assert choose_rank(rows, "learner", "scorer") == 2, "the highest"
    with pytest.raises(ValueError, match="no rank is a spare"):
        choose_rank(rows, "spare", "generator")


def test_an_odd_step_is_shrugged_off_and_a_new_load_is_taken_over() -> None:
    estimate = Estimate()
    for seen in (10.0, 10.0, 20.0, 10.0):
        assert not estimate.add(seen)
    assert estimate.get() < 14.0
    assert not estimate.add(30.0)
    assert estimate.add(30.0)
    assert estimate.get() == 30.0


def test_alternating_phases_are_told_from_overlap() -> None:
    """At bound 0 the step is the sum of both sides; the model finds that out by itself."""
    balance = Balance(scaling=1.0)
    for step in range(1, 12):
        balance.observe(facts(step, step_s=14.0, generator_busy_s=40.0, learner_busy_s=16.0), split_of(4, 4))
    assert balance.step_s(split_of(4, 4), "colocated") == pytest.approx(14.0)
    assert balance.step_s(split_of(5, 3), "colocated") == pytest.approx(8.0 + 16 / 3)


def test_unsaturated_generators_are_worth_less() -> None:
    balance = Balance(scaling=1.0)
    balance.observe(facts(saturation=0.25, step_s=10.0), split_of(4, 4))
    assert balance.step_s(split_of(8, 4), "colocated") == pytest.approx(7.5 + 1.25)


@given(share=st.floats(0, 1), seconds=st.floats(1, 100), counts=st.lists(st.integers(5, 40), min_size=4))
def test_saturation_is_learned_from_what_more_generators_did(
    share: float, seconds: float, counts: list[int]
) -> None:
    learner = Saturation()
    for n in counts[:4] * 5:
        learner.add(n, seconds * (1 - share + share * 10 / n))
        assert 0 <= learner.share <= 1
    if max(counts[:4]) >= 2 * min(counts[:4]):
        told = learner.scale(20) / learner.scale(10)
        assert told == pytest.approx((1 - share / 2), abs=0.15)


def test_saturation_is_believed_until_counts_differ() -> None:
    learner = Saturation()
    for n in (20, 20, 21, 20, 21):
        learner.add(n, 30.0)
    assert learner.share > 0.7, "one rank of twenty says little"
    for n in range(20, 10, -1):
        learner.add(n, 30.0)
    assert learner.share < 0.2


def test_a_decision_takes_no_time() -> None:
    decider = machine()
    counts = split_of(700, 324)
    begun = time.perf_counter()
    for step in range(1, 101):
        decider.decide(replace(facts(step), step=step), counts)
    assert (time.perf_counter() - begun) / 100 < 0.005


def test_the_deficit_is_signed_and_per_rank() -> None:
    assert deficit(facts(), split_of(4, 4)) == pytest.approx(0.7)
    assert deficit(facts(rwt_s=40.0, twt_s=0.0), split_of(8, 1)) == pytest.approx(-0.5)
    assert deficit(facts(step_s=0.0), split_of(1, 1)) == 0.0


def test_generators_held_back_by_the_bound_count_as_faster_than_they_look() -> None:
    """With a surplus in the queue, and room for more groups, a generator less is predicted to cost little."""
    counts = {"generator": 4, "learner": 4, "scorer": 0}
    known = dict(step_s=10.0, rwt_s=0.0, twt_s=0.0, generator_busy_s=40.0, learner_busy_s=40.0, groups=8)

    def generation(**queue: int) -> float:
        balance = Balance()
        balance.observe(StepFacts(step=1, depth=queue.get("depth", 0), **known), counts)
        balance.observe(StepFacts(step=2, **known, **queue), counts)
        return balance.generation.get()

    held = generation(depth=16, open=8)
    assert held < generation(depth=16) == generation(depth=8, open=8)  # unknown; no surplus
    assert held < generation(depth=16, open=8, most=8)  # no room for more
