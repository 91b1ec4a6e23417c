"""Scores that come late: the same gradients whenever, wherever and in whatever order they are made."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.config import ConfigError
from learner.batch import RankBatch, pack
from learner.clock import Busy
from learner.form import build
from learner.late import Key, Late, OfferedSignals, ScoreBox, Scored, Signal, by_sample, keys_of
from learner.patience import ANSWER_SHARE, Patience
from learner.scoring import Scoring, per_micro_batch, portions
from learner.signals import Colocated, ReferenceScorer
from learner.step import LearnerRank
from tests.clocked import beside
from tests.learner_tiny import (
    make_call,
    make_config,
    make_group,
    make_model,
    make_samples,
    make_trajectory,
    single_rank,
    with_behaviour,
)

KL = {"objective": {"kl_coef": 0.2, "entropy_coef": 0.01}, "scorer": {"replicas": 1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reference"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def samples(model: Path):
    made, advantage = make_samples()
    return with_behaviour(model, made, 0.1), advantage


def gradients(rank: LearnerRank, batch: RankBatch, signals: Any) -> dict[str, torch.Tensor]:
    place, optimizer = rank.joined()
    optimizer.zero_grad(set_to_none=True)
    rank._accumulate(batch, signals, place)
    return {n: p.grad.full_tensor().clone() for n, p in rank.model.named_parameters() if p.grad is not None}


def worst(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys() and one
    return max((one[n] - two[n]).abs().max().item() for n in one)


def batch_of(samples: Any, scoring: str = "", micro_rows: int = 1, row_tokens: int = 64) -> RankBatch:
    rows, advantage = samples
    return pack(rows, advantage, row_tokens, 1, micro_rows, scoring=scoring).ranks[0]


def scored_apart(reference: Path, samples: Any) -> list[Scored]:
    """Scores as scorers of their own make them: a few samples at a time, packed otherwise."""
    rows = samples[0]
    scorer = ReferenceScorer(reference)
    keys = keys_of(rows)
    found = []
    for part in (slice(0, 3), slice(3, 4), slice(4, None)):
        blank = [np.zeros(len(s.ids), np.float32) for s in rows[part]]
        batch = pack(rows[part], blank, 48, 1, 2).ranks[0]
        found.append(scorer.score_samples(batch, keys[part]))
    return found


@pytest.mark.parametrize("scoring", ["", "decoupled", "colocated"])
def test_loss_in_forward_equals_loss_deferred_bit_for_bit(
    model: Path, reference: Path, samples: Any, scoring: str
) -> None:
    """T5. With ``scoring`` the micro-batches are of unequal size and the last one is small."""
    batch = batch_of(samples, scoring, micro_rows=2)
    sizes = [rows.stop - rows.start for rows in batch.micro_batches()]
    assert len(sizes) > 1
    signal = ReferenceScorer(reference).score(batch)
    events: list[str] = []

    def source() -> Signal:
        events.append("signal")
        return signal

    with single_rank(make_config(model, **KL), model) as rank:
        rank.model.register_forward_hook(lambda *_: events.append("forward"))
        deferred = gradients(rank, batch, source)
        assert events[:2] == ["forward", "signal"]
        events.clear()
        rank.deferred = False
        early = gradients(rank, batch, source)
        assert events[:2] == ["signal", "forward"]
        assert worst(deferred, early) == 0.0
        rank.deferred = True
        none = gradients(rank, batch, lambda: Signal(np.zeros_like(signal.values), signal.valid))
        assert worst(deferred, none) > 1e-3  # the signal matters


def test_decoupled_equals_colocated(model: Path, reference: Path, samples: Any) -> None:
    """Scored apart and joined per micro-batch, or by the rank itself: the same gradients to rounding."""
    batch = batch_of(samples, micro_rows=2)
    box = ScoreBox()
    for scored in scored_apart(reference, samples):
        box.offer(scored)
    with single_rank(make_config(model, **KL), model) as rank:
        apart = gradients(rank, batch, OfferedSignals(box, batch, keys_of(samples[0]), 1.0))
        here = gradients(rank, batch, lambda: Colocated(reference).burst(batch))
        assert worst(apart, here) < 1e-6
        exact = ReferenceScorer(reference).score(batch)
        assert worst(here, gradients(rank, batch, lambda: exact)) == 0.0


@pytest.mark.parametrize(("scoring", "micro_rows"), [("decoupled", 2), ("colocated", 2), ("decoupled", 1)])
def test_the_order_of_micro_batches_changes_gradients_by_rounding_only(
    model: Path, reference: Path, samples: Any, scoring: str, micro_rows: int
) -> None:
    plain, ordered = batch_of(samples, "", 8), batch_of(samples, scoring, micro_rows)
    assert len(ordered.micro_batches()) > len(plain.micro_batches())
    scorer = ReferenceScorer(reference)
    with single_rank(make_config(model, **KL), model) as rank:
        one = gradients(rank, plain, lambda: scorer.score(plain))
        two = gradients(rank, ordered, lambda: scorer.score(ordered))
    scale = max(g.abs().max().item() for g in one.values())
    assert worst(one, two) < 1e-5 * scale


def test_a_micro_batch_waits_for_its_own_scores_only(model: Path, reference: Path, samples: Any) -> None:
    """The forward of micro-batch j runs before its scores are there, its loss not before."""
    batch = batch_of(samples, micro_rows=1)
    keys = keys_of(samples[0])
    signal = ReferenceScorer(reference).score(batch)
    values = dict(zip(keys, by_sample(signal, batch, keys), strict=True))
    box = ScoreBox()
    events: list[str] = []
    forwards = threading.Semaphore(0)

    def feed() -> None:
        for number, rows in enumerate(batch.micro_batches()):
            forwards.acquire(timeout=30)  # only after its forward pass has run
            events.append(f"scores {number}")
            own = [keys[i] for i in np.unique(batch.sample[rows][batch.mask[rows]])]
            box.offer(Scored(tuple(own), tuple(values[key] for key in own)))

    def ran(*_: Any) -> None:
        events.append("forward")
        forwards.release()

    with single_rank(make_config(model, **KL), model) as rank:
        exact = gradients(rank, batch, lambda: signal)
        rank.model.register_forward_hook(ran)
        thread = threading.Thread(target=feed)
        thread.start()
        late = gradients(rank, batch, OfferedSignals(box, batch, keys, 30.0))
        thread.join()
        assert worst(late, exact) == 0.0
        count = len(batch.micro_batches())
        assert events == [e for n in range(count) for e in ("forward", f"scores {n}")]
        box.clear()
        with pytest.raises(TimeoutError, match=r"scorer.timeout_s = 0 s for \d+ of \d+ samples, first \('t"):
            rank.step(batch, 1, OfferedSignals(box, batch, keys, 0.05))
        assert rank.version == 0


def test_time_spent_waiting_is_told(model: Path, reference: Path, samples: Any) -> None:
    batch = batch_of(samples)
    signal = ReferenceScorer(reference).score(batch)

    def slow() -> Signal:
        time.sleep(0.2)
        return signal

    with single_rank(make_config(model, **KL), model) as rank:
        result = rank.step(batch, 1, slow)
    assert 0.2 <= result.waited_s <= result.busy[1] - result.busy[0]


def test_a_burst_tells_what_it_took(
    reference: Path, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = Colocated(reference)
    batch = batch_of(samples)
    first = frozen.burst(batch)
    assert frozen.load_s > 0 and frozen.score_s > 0
    loading = frozen.load_s
    again = frozen.burst(batch)
    assert np.array_equal(first.values, again.values)
    assert frozen.load_s < loading / 10 and frozen.swap_s < loading  # small models stay on a CPU
    monkeypatch.setattr("learner.signals.RESIDENT_BYTES", 1)
    large = Colocated(reference)
    for _ in range(2):  # a large one is loaded for each burst: that is its swap
        assert np.array_equal(large.burst(batch).values, first.values)
        assert large.load_s == 0 and large.swap_s > 0.001
        assert large._scorer is None


def test_scores_that_do_not_fit_their_sample_are_refused(samples: Any) -> None:
    batch = batch_of(samples)
    keys = keys_of(samples[0])
    box = ScoreBox()
    box.offer(Scored(keys, tuple(np.zeros(3, np.float32) for _ in keys)))
    with pytest.raises(ValueError, match=r"3 scores for the \d+ tokens of \('t"):
        OfferedSignals(box, batch, keys, 1.0).rows(slice(0, batch.rows))


def test_keys_count_the_rows_of_a_trajectory(samples: Any) -> None:
    one, two = samples[0][0], samples[0][1]
    again = dataclasses.replace(two, trajectory=one.trajectory)
    assert keys_of([one, two, again]) == (("t0", 0), ("t1", 0), ("t0", 1))


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["decoupled", "colocated"]))
def test_ordered_packing_keeps_every_token_and_aligns_the_ranks(ranks: int, rows: int, scoring: str) -> None:
    samples, advantage = make_samples()
    plain = pack(samples, advantage, 64, ranks, rows)
    plan = pack(samples, advantage, 64, ranks, rows, scoring=scoring)
    assert len({batch.splits for batch in plan.ranks}) == 1
    for name in ("weight", "advantage"):
        assert sum(float(getattr(b, name).sum()) for b in plan.ranks) == pytest.approx(
            sum(float(getattr(b, name).sum()) for b in plain.ranks), rel=1e-5
        )
    for index, sample in enumerate(samples):
        held = [b for b in plan.ranks if (b.sample == index).any()]
        assert len(held) == 1
        assert np.array_equal(held[0].ids[held[0].sample == index], sample.ids)
    for batch in plan.ranks:
        assert batch.micro_batches()[-1].stop == batch.rows
        assert all(0 < m.stop - m.start <= rows for m in batch.micro_batches())


# -- the feeder's side ----------------------------------------------------------------------


def group_of(name: str, outputs: Sequence[int] = (2, 3)) -> Any:
    members = [
        in_group(make_trajectory(f"{name}.{i}", [make_call(0, 0, [1, 2], [5] * n)], float(i)), name)
        for i, n in enumerate(outputs)
    ]
    return replace(make_group(members), id=name)


def in_group(trajectory: Any, group: str) -> Any:
    return replace(trajectory, group=group, end=replace(trajectory.end, group=group))


class Scorer:
    """Scores every token with its id; may die, or hold its answers back."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[tuple[Key, ...]] = []
        self.dead = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.restarts = 0

    async def restart(self) -> None:
        self.restarts += 1
        self.gate.set()

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        self.asked.append(tuple(keys))
        if self.dead:
            raise ConnectionError(f"scorer {self.number} is gone")
        await self.gate.wait()
        values = by_sample(Signal(batch.ids.astype(np.float32), batch.mask), batch, keys)
        return Scored(tuple(keys), values, busy=(10.0, 12.0), tokens=8)


async def never(scorer: int, why: str) -> None:
    pytest.fail(f"scorer {scorer} was restarted: {why}")


class Taker:
    """A learner rank that only takes scores."""

    def __init__(self) -> None:
        self.box = ScoreBox()
        self.taken: list[Key] = []

    async def offer(self, scored: Scored) -> None:
        self.taken += scored.keys
        self.box.offer(scored)


def scoring_with(scorers: dict[int, Scorer], mode: str = "decoupled", **options: Any) -> Scoring:
    sections = KL | {"scorer": {"replicas": 0 if mode == "colocated" else 1, "mode": mode} | options}
    config = make_config(Path("/nowhere"), **sections)
    scoring = Scoring(config, scorers.__getitem__, lambda *_: None)
    scoring.assign(list(scorers))
    return scoring


async def test_groups_are_scored_as_they_arrive_and_offered_to_the_ranks_that_train_them() -> None:
    scorers = {5: Scorer(5), 7: Scorer(7)}
    for scorer in scorers.values():
        scorer.gate.clear()
    scoring = scoring_with(scorers)
    groups = [group_of(f"g{i}") for i in range(4)]
    for group in groups[:3]:
        scoring.arrived(group)
        scoring.arrived(group)  # a second time changes nothing
    await asyncio.sleep(0.01)
    assert scoring.waiting() == 3
    for scorer in scorers.values():
        scorer.gate.set()
    await asyncio.sleep(0.01)
    assert scoring.waiting() == 0 and sorted(len(s.asked) for s in scorers.values()) == [1, 2]
    config = make_config(Path("/nowhere"), learner={"ranks": 2}, **KL)
    formed = build(groups, config, 2, "decoupled")
    late = scoring.late(groups, formed.samples)
    assert late == Late("offered", keys_of(formed.samples))  # g3 came before there were scorers
    takers = [Taker(), Taker()]
    await asyncio.wait_for(scoring.deliver(formed, takers), 5)  # type: ignore[arg-type]
    for batch, taker in zip(formed.plan.ranks, takers, strict=True):
        signal = OfferedSignals(taker.box, batch, late.keys, 0.1).rows(slice(0, batch.rows))
        assert np.array_equal(signal.valid, batch.mask)
        assert np.array_equal(signal.values[batch.mask], batch.ids[batch.mask].astype(np.float32))
    spent = scoring.take_spent()
    assert (spent.seconds, spent.tokens) == (8.0, 32) and scoring.take_spent().seconds == 0
    scoring.forget([g.id for g in groups])
    assert scoring.waiting() == 0 and not scoring._asks
    await scoring.stop()


async def test_what_a_lost_scorer_was_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.01)
    scorers = {5: Scorer(5), 7: Scorer(7)}
    scorers[5].dead = True
    scoring = scoring_with(scorers)
    for i in range(4):
        scoring.arrived(group_of(f"g{i}"))
    async with asyncio.timeout(5):
        while scoring.waiting():
            await asyncio.sleep(0.01)
            scorers[5].dead = len(scorers[5].asked) < 5
    assert scorers[5].asked
    await scoring.stop()


async def test_a_scorer_that_hangs_on_whole_rows_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.01)
    scorers = {5: Scorer(5), 7: Scorer(7)}
    scorers[5].gate.clear()
    scoring = scoring_with(scorers, timeout_s=3.0)
    for i in range(4):
        scoring.arrived(group_of(f"g{i}"))
    async with asyncio.timeout(3.0):  # within the deadline of the rank that waits for them
        while scoring.waiting():
            await asyncio.sleep(0.01)
    assert scorers[5].asked and scoring.failures >= 1
    await scoring.stop()


async def test_a_scorer_that_works_through_a_queue_is_not_given_up() -> None:
    """Each answer takes less than the patience with a silent one, all together take more."""
    heard = Patience(5.0, lambda: (5, 7), never)
    turn = asyncio.Lock()

    async def served() -> str:
        async with turn:
            await asyncio.sleep(0.3)
        return "scores"

    async with asyncio.timeout(20):
        found = await asyncio.gather(*(heard.answer(5, served()) for _ in range(8)))
    assert found == ["scores"] * 8
    assert heard._longest[5] < 6 * 0.3, "the queue is not its silence: one that hangs later is found in time"


async def test_the_only_scorer_has_all_of_the_deadline_until_it_has_answered() -> None:
    for scorers, share in (((5, 7), ANSWER_SHARE), ((5,), 1.0)):

        async def in_vain(scorers: tuple[int, ...] = scorers) -> None:
            with pytest.raises(TimeoutError, match="scorer 5 answered nobody"):
                await Patience(2.0, lambda: scorers, never).answer(5, asyncio.Event().wait())

        _, spent, slept = await beside(in_vain(), share * 2.0)
        assert share * 2.0 <= spent < slept + 0.6


async def test_a_scorer_that_was_given_up_is_silent_for_the_deadline_or_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    ended: list[int] = []
    monkeypatch.setattr("learner.patience.time", SimpleNamespace(monotonic=lambda: now))

    async def restarted(scorer: int, why: str) -> None:
        ended.append(scorer)

    heard = Patience(0.02, lambda: (5, 7), restarted)

    async def hangs() -> None:
        nonlocal now
        now += 0.02
        await asyncio.Event().wait()

    async def answers() -> str:
        return "scores"

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            await heard.answer(5, hangs())

    await given_up()
    now += 0.019
    assert heard.silent(5) and not heard.silent(7)
    now += 0.002
    assert not heard.silent(5)
    await given_up()
    assert heard.silent(5)
    assert await heard.answer(5, answers()) == "scores" and not heard.silent(5)
    assert not ended, "it may have been starting all the while"
    await given_up()
    await given_up()
    assert ended == [5], "it had answered; the new process may be starting"


async def test_the_only_scorer_is_restarted_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.001)
    scorers = {5: Scorer(5)}
    scoring = scoring_with(scorers, timeout_s=3.0)
    for name in ("g0", "g1"):
        scoring.arrived(group_of(name))
        async with asyncio.timeout(3.0):  # within the deadline of the rank that waits for them
            while scoring.waiting():
                await asyncio.sleep(0.005)
        scorers[5].gate.clear()
    assert (scorers[5].restarts, scoring.failures, len(scorers[5].asked)) == (1, 1, 3)
    await scoring.stop()


async def test_one_that_died_or_is_slow_as_ever_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("learner.patience.time", SimpleNamespace(monotonic=lambda: now))
    heard = Patience(0.1, lambda: (5,), never)

    async def after(seconds: float, answers: bool = True) -> str:
        nonlocal now
        now += seconds
        if not answers:
            raise ConnectionError("it died")
        return "scores"

    async def hangs(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.Event().wait()

    assert await heard.answer(5, after(0.06)) == "scores"
    begun = now
    with pytest.raises(TimeoutError, match=r"nobody for 0\.1 s"):  # twice its longest would be more than that
        await heard.answer(5, hangs(0.1))
    assert now == begun + 0.1
    with pytest.raises(ConnectionError):
        await heard.answer(5, after(0.0, answers=False))
    with pytest.raises(TimeoutError, match=r"nobody for 0\.1 s"):
        await heard.answer(5, hangs(0.1))


async def test_whole_rows_go_to_a_scorer_that_hangs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hang, and are found out one after the other."""
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.001)
    monkeypatch.setattr("learner.patience.ANSWER_SHARE", 0.001)
    scorers = {number: Scorer(number) for number in (5, 6, 7)}
    scorers[5].gate.clear()
    scorers[6].gate.clear()
    scoring = scoring_with(scorers, timeout_s=60.0)
    for number in range(4):
        scoring.arrived(group_of(f"g{number}"))
        async with asyncio.timeout(30):
            while scoring.waiting():
                await asyncio.sleep(0.005)
    assert [len(scorer.asked) for scorer in scorers.values()] == [1, 1, 4]
    await scoring.stop()


async def test_the_last_scorer_that_is_not_silent_has_all_of_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both need longer than the patience with one of two: neither would ever be heard out."""
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.001)
    monkeypatch.setattr("learner.patience.ANSWER_SHARE", 0.001)

    class Slow(Scorer):
        async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
            await asyncio.sleep(0.2)
            return await super().score(batch, keys)

    scorers: dict[int, Scorer] = {5: Slow(5), 7: Slow(7)}
    scoring = scoring_with(scorers, timeout_s=60.0)
    scoring.arrived(group_of("g0"))
    async with asyncio.timeout(30):
        while scoring.waiting():
            await asyncio.sleep(0.005)
    assert scoring.failures == 1
    await scoring.stop()


async def test_whole_rows_are_asked_for_a_micro_batch_at_a_time() -> None:
    """A full one has 64 x 2 tokens; so a scorer that is busy answers often enough to be known to work."""
    scorer = Scorer(5)
    config = make_config(Path("/nowhere"), learner={"row_tokens": 64, "micro_rows": 2}, **KL)
    scoring = Scoring(config, lambda _: scorer, lambda *_: None)
    scoring.assign([5])
    group = group_of("g0", [40] * 7)  # 42 tokens a row
    scoring.arrived(group)
    async with asyncio.timeout(5):
        while scoring.waiting():
            await asyncio.sleep(0.001)
    formed = build([group], scoring.config, 1, "decoupled")
    assert [len(keys) for keys in scorer.asked] == [3, 3, 1]
    assert tuple(key for keys in scorer.asked for key in keys) == keys_of(formed.samples)
    scored = await scoring._asks["g0"].scores
    values = dict(zip(scored.keys, scored.values, strict=True))
    for key, sample in zip(keys_of(formed.samples), formed.samples, strict=True):
        assert np.array_equal(values[key][sample.mask], sample.ids[sample.mask])
    await scoring.stop()


def test_portions() -> None:
    assert list(portions([], 10)) == []
    assert list(portions([4, 6, 1, 20, 3, 3], 10)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]


async def test_a_call_that_ends_cancelled_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cancelled who waits for it."""
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.001)

    class Cancelled(Scorer):
        async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
            if not self.asked:
                self.asked.append(tuple(keys))
                raise asyncio.CancelledError
            return await super().score(batch, keys)

    scoring = scoring_with({5: Cancelled(5)})
    scoring.arrived(group_of("g0"))
    async with asyncio.timeout(5):
        while scoring.waiting():
            scoring.check()
            await asyncio.sleep(0.001)
    assert scoring.failures == 1
    await scoring.stop()


async def test_who_waits_for_a_scorer_can_be_cancelled() -> None:
    asked = asyncio.create_task(Patience(60.0, lambda: (5,), never).answer(5, asyncio.Event().wait()))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asked, 5)


async def test_a_scorer_whose_clock_stepped_back_took_no_time() -> None:
    class Back(Scorer):
        async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
            return dataclasses.replace(await super().score(batch, keys), busy=(11.0, 9.5))

    scoring = scoring_with({5: Back(5)})
    scoring.arrived(group_of("g0"))
    async with asyncio.timeout(5):
        while scoring.waiting():
            await asyncio.sleep(0.001)
    spent = scoring.take_spent()
    assert (spent.seconds, spent.tokens) == (0.0, 8)
    await scoring.stop()


def test_a_busy_interval_is_as_long_as_a_clock_says_that_never_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, steady = iter([1000.0, 400.0]), iter([5.0, 7.5])
    clocks = SimpleNamespace(time=lambda: next(wall), monotonic=lambda: next(steady))
    monkeypatch.setattr("learner.clock.time", clocks)
    assert Busy().told() == (1000.0, 1002.5)


async def test_scorers_that_change_their_role_hand_their_work_on() -> None:
    """A rank that stops scoring may never answer: its groups go to the others, at once."""
    scorers = {5: Scorer(5), 7: Scorer(7)}
    scorers[5].gate.clear()
    scoring = scoring_with({5: scorers[5]})
    scoring._port_of = scorers.__getitem__
    scoring.arrived(group_of("g0"))
    await asyncio.sleep(0.01)
    assert scoring.waiting() == 1
    scoring.assign([])
    assert scoring.mode == "colocated"
    scoring.assign([7])
    await asyncio.sleep(0.02)
    assert scoring.waiting() == 0 and len(scorers[7].asked) == 1
    await scoring.stop()


async def test_colocated_asks_nobody_and_auto_follows_the_barrier() -> None:
    colocated = scoring_with({}, "colocated")
    assert colocated.late([], []) == Late("here")
    scorer = Scorer(5)
    auto = scoring_with({5: scorer}, "auto")
    assert auto.mode == "decoupled"
    auto.assign([5], "colocated")
    auto.arrived(group_of("g0"))
    assert auto.late([], []) == Late("here") and not scorer.asked
    auto.assign([5], "decoupled")
    auto.arrived(group_of("g0"))
    await asyncio.sleep(0.01)
    assert len(scorer.asked) == 1
    auto.assign([])
    assert auto.mode == "colocated"
    await auto.stop()


async def test_without_a_penalty_nothing_is_scored() -> None:
    scoring = Scoring(make_config(Path("/nowhere")), {}.__getitem__, lambda *_: None)
    scoring.arrived(group_of("g0"))
    assert scoring.late([], []) is None and scoring.waiting() == 0


async def test_members_without_a_score_are_left_out_as_in_training() -> None:
    scorer = Scorer(5)
    scoring = scoring_with({5: scorer})
    whole = group_of("g0", (2, 3, 4))
    bad = replace(whole.members[1], end=replace(whole.members[1].end, outcome=None))
    group = replace(whole, members=(whole.members[0], bad, whole.members[2]))
    scoring.arrived(group)
    await asyncio.sleep(0.01)
    formed = build([group], scoring.config, 1, "decoupled")
    assert scorer.asked == [keys_of(formed.samples)]
    await scoring.stop()


def test_scoring_configuration() -> None:
    kl = {"kl_coef": 0.1}
    for mode in ("colocated", "auto"):
        make_config(Path("/nowhere"), objective=kl, scorer={"mode": mode})
    with pytest.raises(ConfigError, match=r"scorer\.mode"):
        make_config(Path("/nowhere"), objective=kl, scorer={"mode": "decoupled"})
    with pytest.raises(ConfigError, match="does nothing while"):
        make_config(Path("/nowhere"), objective=kl, scorer={"mode": "colocated", "replicas": 1})


def test_seconds_per_micro_batch() -> None:
    assert per_micro_batch(6.0, 300, 100, 2) == 4.0 and per_micro_batch(1.0, 0, 100, 2) is None
