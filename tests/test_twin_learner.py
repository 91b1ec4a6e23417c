"""The timed twins of learner ranks and scorers: the contract of the real ones, and the profile's times."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config import build, dump
from cluster.errors import CheckpointDamaged, LearnerLost
from cluster.sim.catalogue import load_profile
from learner.batch import RankBatch, Sample, pack
from learner.group import FRESH, UNUSABLE, LearnerGroup
from learner.late import Late, keys_of
from learner.manifest import latest_valid, step_of
from learner.scorer_twin import ScorerTwin
from learner.segments import Ask, Context
from learner.twin import LearnerTwin
from tests.clocked import beside

SPEED = 20.0
SLACK_S = 0.3  # beyond what a sleep of the same length took meanwhile; at speed 1 it is far more
TREE: dict[str, Any] = dump(
    build(
        {
            "model": {"maker": "tokens"},
            "env": {"name": "load", "sandbox": "inline"},
            "objective": {"kl_coef": 0.1},
            "scorer": {"replicas": 1, "timeout_s": 2.0},
            "learner": {"row_tokens": 600},
            "run": {"keep_checkpoints": 2},
            "twin": {"profile": "twin", "speed": SPEED},
        }
    )
)
PROFILE = load_profile("twin")


def samples(count: int, tokens: int = 500, version: int = 0) -> list[Sample]:
    mask = np.arange(tokens) >= tokens // 2
    return [
        Sample(
            trajectory=f"t{n}",
            group=f"g{n}",
            ids=np.ones(tokens, np.int32),
            mask=mask,
            behaviour=np.zeros(tokens, np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            turns=np.zeros(tokens, np.int16),
            temperature=1.0,
        )
        for n in range(count)
    ]


def batches(rows: list[Sample], ranks: int = 1, micro_rows: int = 2) -> tuple[RankBatch, ...]:
    blank = [np.zeros(len(row.ids), np.float32) for row in rows]
    return pack(rows, blank, row_tokens=600, ranks=ranks, micro_rows=micro_rows).ranks


async def joined(rank: int = 0, world: int = 1, checkpoint: str = "") -> LearnerTwin:
    twin = LearnerTwin(TREE, "", rank, "run", "")
    assert await twin.info() == (twin.instance, FRESH) and await twin.ready()
    await twin.join("twin", 1, checkpoint, rank, world)
    return twin


async def test_a_step_takes_the_profiles_time_and_is_made_once() -> None:
    twin = await joined()
    (batch,) = batches(samples(6))
    learner = PROFILE.learner
    expected = 3000 / learner.forward_tok_s + 3000 / learner.backward_tok_s + learner.step_fixed_s
    told, spent, slept = await beside(twin.step(batch, None, 1), expected / SPEED)
    assert expected / SPEED <= spent < slept + SLACK_S
    assert told["spent"]["train"] * SPEED == pytest.approx(expected)
    again = await twin.step(batch, None, 1)
    assert again["repeated"] and (await twin.info())[1] == 1
    with pytest.raises(LearnerLost, match="at version 1 and cannot make step 3; it can make step 2"):
        await twin.step(batch, None, 3)
    (ahead,) = batches(samples(2, version=5))
    with pytest.raises(LearnerLost, match="token version 5 is newer"):
        await twin.step(ahead, None, 2)


async def test_a_larger_world_is_as_much_faster_as_the_profile_says() -> None:
    twins = [await joined(rank, 4) for rank in range(4)]
    learner = PROFILE.learner
    each = 1000 * (1 / learner.forward_tok_s + 1 / learner.backward_tok_s) / learner.scaling**2
    expected = (each + learner.step_fixed_s) / SPEED
    steps = asyncio.gather(
        *(t.step(b, None, 1) for t, b in zip(twins, batches(samples(8), ranks=4), strict=True))
    )
    _, spent, slept = await beside(steps, expected)
    assert expected <= spent < slept + SLACK_S


async def test_backward_waits_for_the_scores_of_its_own_micro_batch() -> None:
    twin, scorer = await joined(), ScorerTwin(TREE, "")
    rows = samples(4)
    (batch,) = batches(rows)
    keys = keys_of(rows)
    step = asyncio.create_task(twin.step(batch, Late("offered", keys), 1))
    await asyncio.sleep(0.3)
    assert not step.done(), "trained without scores"
    for row, key in zip(rows, keys, strict=True):
        begun = time.monotonic()
        (alone,) = batches([row])
        scored = await scorer.score(alone, [key])
        assert (time.monotonic() - begun) * SPEED >= 500 / PROFILE.scorer.forward_tok_s
        assert scored.tokens == 500 and len(scored.values[0]) == 500
        await twin.offer(scored)
    told = await step
    assert told["spent"]["signal"] > 0.2


async def test_scores_that_never_come_lose_the_rank() -> None:
    twin = await joined()
    rows = samples(2)
    (batch,) = batches(rows)
    with pytest.raises(LearnerLost, match="no score within"):
        await twin.step(batch, Late("offered", keys_of(rows)), 1)
    assert (await twin.info())[1] == 0


async def test_colocated_scoring_costs_two_swaps_and_the_pass() -> None:
    twin = await joined()
    (batch,) = batches(samples(4))
    told = await twin.step(batch, Late("here"), 1)
    assert told["spent"]["swap"] * SPEED == pytest.approx(2 * PROFILE.scorer.swap_s)
    assert told["spent"]["score"] * SPEED == pytest.approx(2000 / PROFILE.scorer.forward_tok_s)


async def test_checkpoints_are_whole_and_lead_back(tmp_path: Path) -> None:
    twin = await joined()
    (batch,) = batches(samples(2))
    for step in range(1, 4):
        await twin.step(batch, None, step)
        await twin.save(str(tmp_path), {"step": step})
    newest = latest_valid(tmp_path)
    assert newest is not None and step_of(newest) == 3
    assert len(list(tmp_path.iterdir())) == 2, "run.keep_checkpoints"
    other = await joined(checkpoint=str(newest))
    assert (await other.info())[1] == 3
    weights = [await one.publish() for one in (twin, other)]
    assert weights[0] == weights[1] and weights[0] is not None and weights[0].version == 3
    (newest / "twin.json").write_text("{}")
    assert step_of(latest_valid(tmp_path) or Path()) == 2
    with pytest.raises(CheckpointDamaged):
        await joined(checkpoint=str(newest))


async def test_a_resized_group_goes_on_where_the_old_one_was(tmp_path: Path) -> None:
    """2 ranks -> 1 -> 2, by the real ``LearnerGroup``: the digest is that of a world that never changed."""
    config = build(TREE)
    twins: list[Any] = [LearnerTwin(TREE, "", n, "run", "") for n in range(2)]
    group = LearnerGroup(config, twins, tmp_path)
    rows = samples(4)
    fixed = await joined()
    await group.form("")

    async def saved() -> str:
        raise AssertionError("the state goes through memory")

    step = 0
    for numbers in ([0, 1], [1], [0, 1]):
        if step:
            resized = await group.resize([twins[n] for n in numbers], numbers, saved)
            assert resized.ok and {"gather", "regroup", "reshard"} <= set(resized.parts)
        for _ in range(2):
            step += 1
            await group.step(batches(rows, ranks=len(numbers)), [None] * len(numbers), step)
            await fixed.step(batches(rows)[0], None, step)
    told, same = await group.publish(), await fixed.publish()
    assert same is not None and told.checksum == same.checksum and told.version == same.version == 6


async def test_a_step_under_way_ends_with_the_process_and_leaves_no_trace() -> None:
    """Its scores will never come; the fresh one must not wait behind it."""
    twin = await joined()
    rows = samples(2)
    (batch,) = batches(rows)
    old = asyncio.create_task(twin.step(batch, Late("offered", keys_of(rows)), 1))
    await asyncio.sleep(0.1)
    await twin.replace()
    await twin.join("twin", 2, "", 0, 1)
    async with asyncio.timeout(30):
        await twin.step(batch, None, 1)
    with pytest.raises(LearnerLost):
        await old
    assert (await twin.info())[1] == 1


async def test_replacing_gives_a_fresh_process() -> None:
    twin = await joined()
    before = twin.instance
    await twin.replace()
    assert await twin.info() == (twin.instance, FRESH) and twin.instance != before
    with pytest.raises(RuntimeError, match="has not joined"):
        await twin.publish()
    assert UNUSABLE < FRESH


async def test_segments_cost_their_new_tokens_while_there_is_room() -> None:
    scorer = ScorerTwin(TREE, "")
    rate = PROFILE.scorer.forward_tok_s

    def ask(name: str, length: int, sampled: int) -> Ask:
        targets = np.arange(length - sampled, length, dtype=np.int32)
        context = Context(np.arange(length, dtype=np.int32), targets, np.ones(sampled, np.float32))
        return Ask(name, (context,))

    first = await scorer.score_segments([ask("t0", 900, 100), ask("t1", 500, 10)], [])
    assert first.tokens == (900, 500) and [len(v) for v in first.values] == [100, 10]
    assert first.room == PROFILE.generator.kv_tokens
    later, spent, slept = await beside(
        scorer.score_segments([ask("t0", 1000, 50)], []), 100 / rate / SPEED
    )
    assert later.tokens == (100,)
    assert 100 / rate / SPEED <= spent < slept + SLACK_S
    await scorer.score_segments([ask("t2", PROFILE.generator.kv_tokens - 100, 1)], ["t1"])
    again = await scorer.score_segments([ask("t0", 1100, 50), ask("t1", 600, 10)], [])
    assert again.tokens == (1100, 600)  # both prefixes had to go
