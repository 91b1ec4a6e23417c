"""Segments on their way to scorers and back: affinity, order, room, failures, and what is left to groups."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.errors import StreamFailed
from cluster.memory import MemoryQueue
from cluster.types import End, EndKind, Group, Order, Segment, Task, Trajectory
from learner.batch import RankBatch
from learner.form import build
from learner.late import Key, OfferedSignals, ScoreBox, Scored, Signal, by_sample
from learner.scoring import Scoring
from learner.segments import Ask, Told
from learner.signals import Colocated, ReferenceScorer
from learner.streams import Lanes, Stream
from tests.learner_tiny import (
    make_call,
    make_config,
    make_group,
    make_model,
    make_trajectory,
    single_rank,
)
from tests.test_scoring import KL, Taker, gradients, worst

NOWHERE = Path("/nowhere")
ROOMY = 10_000


class Scorer:
    """Scores every token with its id and says what a cache without bound would have run."""

    def __init__(self, number: int, room: int = ROOMY) -> None:
        self.number = number
        self.room = room
        self.requests: list[list[str]] = []
        self.done: list[str] = []
        self.whole: list[Key] = []
        self.dead = False
        self.waste = 1  # times the tokens that are new
        self.gate = asyncio.Event()
        self.gate.set()
        self.known: dict[str, int] = {}

    async def restart(self) -> None:
        self.gate.set()

    async def score_segments(self, asks: Sequence[Ask], done: Sequence[str]) -> Told:
        self.requests.append([ask.trajectory for ask in asks])
        self.done += done
        if self.dead:
            raise ConnectionError(f"scorer {self.number} is gone")
        await self.gate.wait()
        values = [
            np.concatenate([c.ids[c.targets] for c in ask.contexts]).astype(np.float32) for ask in asks
        ]
        tokens = [self.waste * self._new(ask) for ask in asks]
        return Told(tuple(values), tuple(tokens), (10.0, 11.0), self.room)

    def _new(self, ask: Ask) -> int:
        length = len(ask.contexts[-1].ids)
        before, self.known[ask.trajectory] = self.known.get(ask.trajectory, 0), length
        return max(1, length - before)

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        if self.dead:
            raise ConnectionError(f"scorer {self.number} is gone")
        self.whole += keys
        values = by_sample(Signal(batch.ids.astype(np.float32), batch.mask), batch, keys)
        return Scored(tuple(keys), values, busy=(10.0, 12.0), tokens=8)


class Play:
    """A training side on scorer fakes, and the trajectories that are told to it."""

    def __init__(self, *numbers: int, room: int = ROOMY, **sections: Any) -> None:
        self.scorers = {n: Scorer(n, room) for n in numbers}
        self.traced: list[tuple[str, dict[str, Any]]] = []
        scorer = {"replicas": 1, "mode": "auto"} | sections.pop("scorer", {})
        self.config = make_config(NOWHERE, **KL | {"scorer": scorer} | sections)
        self.scoring = Scoring(self.config, self.scorers.__getitem__, self.trace)
        self.scoring.assign(numbers, "decoupled")

    def trace(self, event: str, fields: dict[str, Any]) -> None:
        self.traced.append((event, fields))

    def hear(self, one: Trajectory, *turns: int, end: bool = False) -> None:
        for turn in turns:
            self.scoring.heard(
                Segment(trajectory=one.id, group=one.group, attempt=one.attempt, turn=one.turns[turn])
            )
        if end:
            self.scoring.heard(one.end)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def scores(self, group: Group) -> dict[Key, np.ndarray]:
        """What the ranks would be offered, when it is there; checked against the ids."""
        formed = build([group], self.config, 1, "decoupled")
        late = self.scoring.late([group], formed.samples)
        assert late is not None and late.mode == "offered"
        taker = Taker()
        await asyncio.wait_for(self.scoring.deliver(formed, [taker]), 5)  # type: ignore[list-item]
        (batch,) = formed.plan.ranks
        signal = OfferedSignals(taker.box, batch, late.keys, 0.1).rows(slice(0, batch.rows))
        assert np.array_equal(signal.valid, batch.mask)
        assert np.array_equal(signal.values[batch.mask], batch.ids[batch.mask].astype(np.float32))
        return dict(taker.box._values)

    @property
    def requests(self) -> list[list[str]]:
        return [request for scorer in self.scorers.values() for request in scorer.requests]

    @property
    def whole(self) -> list[Key]:
        return [key for scorer in self.scorers.values() for key in scorer.whole]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.traced if event == name]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def member(name: str, turns: int = 3, cut: int = -1, attempt: int = 0, outcome: float = 1.0) -> Trajectory:
    """Five tokens a turn, two of them sampled; at turn ``cut`` all but two ids are evicted."""
    calls, length = [], 0
    for turn in range(turns):
        keep = 2 if turn == cut else length
        calls.append(make_call(turn, keep, [1, 2, 3 + turn], [10 + turn, 20 + turn]))
        length = keep + 5
    made = make_trajectory(name, calls, outcome)
    group = name.partition(".")[0]
    end = replace(made.end, group=group, attempt=attempt)
    return replace(made, group=group, attempt=attempt, end=end)


def group_of(*members: Trajectory) -> Group:
    return replace(make_group(list(members)), id=members[0].group)


async def test_only_the_last_turn_is_open_when_the_group_is_claimed() -> None:
    play = Play(5)
    one, two = member("g.0"), member("g.1", cut=2)
    for turn in range(2):
        play.hear(one, turn)
        play.hear(two, turn)
        await play.settle()
    assert play.requests == [["g.0", "g.1"], ["g.0", "g.1"]]
    play.scorers[5].gate.clear()
    play.hear(one, 2, end=True)
    await play.settle()
    group = group_of(one, two)
    play.scoring.arrived(group)
    await play.settle()
    assert play.scoring.waiting() == 1
    play.scorers[5].gate.set()
    scores = await play.scores(group)
    assert sorted(scores) == [("g.0", 0), ("g.1", 0), ("g.1", 1)]
    assert play.requests[2:] == [["g.0"], ["g.1"]]  # the turn that was not heard of came with the group
    assert not play.whole and play.scoring.scored_ahead == 8 / 12
    spent = play.scoring.take_spent()
    assert spent.seconds == 4.0 and spent.tokens == 15 + 11
    await play.scoring.stop()


async def test_what_comes_meanwhile_goes_into_one_request_and_the_claimed_first() -> None:
    play = Play(5)
    play.scorers[5].gate.clear()
    made = [member(f"g{i}.0") for i in range(4)]
    play.hear(made[0], 0)
    await play.settle()
    for one in made:
        play.hear(one, *([1] if one is made[0] else [0, 1]))
    play.scoring.arrived(group_of(made[3]))
    await play.settle()
    assert play.requests == [["g0.0"]]  # one under way
    play.scorers[5].gate.set()
    await play.settle()
    assert play.requests[1:] == [["g3.0", "g1.0", "g2.0", "g0.0"]]
    await play.scoring.stop()


async def test_a_trajectory_stays_with_its_scorer_and_scorers_share() -> None:
    play = Play(5, 7)
    made = [member(f"g{i}.0") for i in range(6)]
    for turn in range(3):
        for one in made:
            play.hear(one, turn)
            await play.settle()
    for scorer in play.scorers.values():
        names = [name for request in scorer.requests for name in request]
        assert len(set(names)) == 3 and len(names) == 9
    await play.scoring.stop()


async def test_a_request_to_a_new_scorer_counts_the_prefixes_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.01)
    play = Play(5, learner={"row_tokens": 64, "micro_rows": 1})
    made = [member(f"g{i}.0", turns=6) for i in range(8)]
    for one in made:
        play.hear(one, 0, 1, 2, 3, 4)
        await play.settle()
    before = len(play.requests)
    play.scorers[7] = Scorer(7)
    play.scoring.assign([7], "decoupled")  # nothing of theirs is there
    play.scorers[7].gate.clear()
    for one in made:
        play.hear(one, 5)
    play.scorers[7].gate.set()
    await until(lambda: sum(len(request) for request in play.requests[before:]) == 8)
    assert max(len(request) for request in play.requests[before:]) <= 3, "25 tokens of prefix each"
    await play.scoring.stop()


async def test_a_request_is_bounded() -> None:
    play = Play(5, learner={"row_tokens": 64, "micro_rows": 1})
    play.scorers[5].gate.clear()
    made = [member(f"g{i}.0") for i in range(11)]
    play.hear(made[0], 0)
    await play.settle()
    for one in made[1:]:
        play.hear(one, 0, 1, 2)
    play.scorers[5].gate.set()
    await play.settle()
    assert [len(request) for request in play.requests] == [1, 5, 5]  # 15 new tokens each
    await play.scoring.stop()


async def test_a_lost_scorer_hands_on_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.01)
    play = Play(5, 7)
    made = [member(f"g.{i}") for i in range(4)]
    for one in made:
        play.hear(one, 0)
    await play.settle()
    play.scorers[5].dead = True
    for one in made:
        play.hear(one, 1, 2, end=True)
    group = group_of(*made)
    scores = await play.scores(group)
    assert len(scores) == 4 and not play.whole
    assert play.scoring.failures >= 1 and play.events("segments_asked_again")
    assert {name for request in play.scorers[7].requests for name in request} == {one.id for one in made}
    await play.scoring.stop()


async def test_a_scorer_that_is_back_gets_its_trajectories_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.01)
    play = Play(5)
    one = member("g.0")
    play.scorers[5].dead = True
    play.hear(one, 0, 1, 2)
    await until(lambda: len(play.requests) > 1)
    play.scorers[5].dead = False
    assert len(await play.scores(group_of(one))) == 1 and not play.whole
    await play.scoring.stop()


async def test_what_keeps_failing_is_left_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.001)
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.001)
    play = Play(5)
    one = member("g.0")
    play.scorers[5].dead = True
    play.hear(one, 0)
    await until(lambda: play.events("segments_left"))
    assert len(play.requests) == 10
    play.scorers[5].dead = False
    play.hear(one, 1, 2)
    assert len(await play.scores(group_of(one))) == 1 and play.whole == [("g.0", 0)]
    assert play.scoring.scored_ahead == 0.0
    await play.scoring.stop()


async def test_a_scorer_that_hangs_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.01)
    play = Play(5, 7, scorer={"timeout_s": 2.0})
    play.scorers[5].gate.clear()
    one = member("g.0")
    play.hear(one, 0, 1, 2)
    assert len(await play.scores(group_of(one))) == 1
    assert len(play.scorers[7].requests) == 1
    await play.scoring.stop()


async def test_a_scorer_that_hung_gets_no_trajectories_for_the_whole_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.001)
    monkeypatch.setattr("learner.streaming.REST_S", 0.0)
    monkeypatch.setattr("learner.patience.ANSWER_SHARE", 0.001)
    play = Play(5, 7, scorer={"timeout_s": 60.0})
    play.scorers[5].gate.clear()
    for number in range(4):
        one = member(f"g{number}.0")
        play.hear(one, 0, 1, 2)
        stream = play.scoring._streaming._streams[one.id]
        await until(lambda stream=stream: len(stream.scores) == 3)
    assert [len(scorer.requests) for scorer in play.scorers.values()] == [1, 4]
    await play.scoring.stop()


async def test_a_request_that_ends_cancelled_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cancelled who waits for it."""
    monkeypatch.setattr("learner.streaming.RETRY_S", 0.001)
    play = Play(5)
    real, asked = play.scorers[5].score_segments, []

    async def cancelled_once(asks: Sequence[Ask], done: Sequence[str]) -> Told:
        asked.append(asks)
        if len(asked) == 1:
            raise asyncio.CancelledError
        return await real(asks, done)

    play.scorers[5].score_segments = cancelled_once  # type: ignore[method-assign]
    one = member("g.0")
    play.hear(one, 0, 1, 2, end=True)
    assert len(await play.scores(group_of(one))) == 1
    assert len(asked) == 2 and not play.whole
    await play.scoring.stop()


async def test_pausing_and_changing_scorers_lose_nothing() -> None:
    play = Play(5)
    play.scorers[7] = Scorer(7)
    made = [member("g.0"), member("g.1")]
    play.scorers[5].gate.clear()
    play.hear(made[0], 0)
    await play.settle()
    play.scoring.assign([5], "colocated")
    play.hear(made[0], 1)  # nobody listens
    play.hear(made[1], 0, 1, 2)
    await play.settle()
    assert play.scoring.mode == "colocated" and play.requests == [["g.0"]]
    play.scoring.assign([7], "decoupled")
    play.hear(made[0], 2)  # after a gap
    await play.settle()
    assert play.scorers[7].requests == [["g.0"]]
    group = group_of(*made)
    scores = await play.scores(group)
    assert len(scores) == 2 and play.whole == [("g.1", 0)]
    assert play.scorers[7].requests == [["g.0"], ["g.0"]]
    await play.scoring.stop()


async def test_a_group_that_waits_for_segments_outlives_a_change_of_scorers() -> None:
    play = Play(5)
    play.scorers[7] = Scorer(7)
    play.scorers[5].gate.clear()
    one = member("g.0")
    play.hear(one, 0)
    await play.settle()
    group = group_of(one)
    play.scoring.arrived(group)
    await play.settle()
    play.scoring.assign([])
    assert play.scoring.mode == "colocated"
    play.scoring.assign([7], "decoupled")
    assert len(await play.scores(group)) == 1 and not play.whole
    await play.scoring.stop()


async def test_another_attempt_begins_anew_and_the_old_one_counts_for_nothing() -> None:
    play = Play(5)
    old, new = member("g.0"), member("g.0", turns=2, attempt=1)
    play.hear(old, 0, 1)
    await play.settle()
    play.hear(new, 0)
    play.hear(old, 2)
    await play.settle()
    scores = await play.scores(group_of(new))
    assert len(scores) == 1 and not play.whole
    assert play.scoring.scored_ahead == 0.5
    stale = Play(5)  # news of the second attempt were missed
    stale.hear(old, 0, 1)
    await stale.settle()
    assert len(await stale.scores(group_of(new))) == 1 and stale.whole == [("g.0", 0)]
    for one in (play, stale):
        await one.scoring.stop()


async def test_what_ends_badly_or_is_dropped_is_forgotten() -> None:
    play = Play(5)
    streaming = play.scoring._streaming
    made = [member(f"g{i}.0") for i in range(3)]
    for one in made:
        play.hear(one, 0)
    await play.settle()
    bad = End(trajectory="g0.0", group="g0", attempt=0, kind=EndKind.FAILED, turns=1, reason="env")
    play.scoring.heard(bad)
    play.scoring.heard(replace(bad, trajectory="never.0"))
    play.scoring.forget(["g1"])
    assert list(streaming._streams) == ["g2.0"]
    play.hear(made[2], 1)
    await play.settle()
    assert sorted(play.scorers[5].done) == ["g0.0", "g1.0"]
    for i in range(500):  # failed where nobody says so
        play.hear(member(f"x{i}.0"), 0)
    assert len(streaming._streams) <= 2 * play.config.capacity * play.config.run.group_size
    await play.scoring.stop()


async def test_scorers_get_what_they_have_room_for_oldest_first() -> None:
    """Two trajectories of 15 tokens fit into 30; each that ends makes room for the next."""
    play = Play(5, room=30)
    made = [member(f"g{i}.0") for i in range(4)]
    play.hear(made[0], 0, 1, 2)  # before the first answer nobody knows the room
    await play.settle()
    play.hear(made[1], 0, 1, 2)
    play.hear(made[2], 0)
    play.hear(made[3], 0)
    await play.settle()
    assert play.requests == [["g0.0"], ["g1.0"]]
    play.hear(made[0], end=True)
    await play.settle()
    assert play.requests[2:] == [["g2.0"]] and play.scorers[5].done == ["g0.0"]
    group = group_of(made[3])
    assert len(await play.scores(group)) == 1
    assert play.whole == [("g3.0", 0)]  # no room until it was claimed
    play.scoring.forget(["g1"])
    play.hear(made[2], 1, 2)
    await play.settle()
    assert play.requests[-1] == ["g2.0"]
    lane = play.scoring._streaming._lanes.scorers[5]
    assert lane.promised == 15
    await play.scoring.stop()


async def test_one_that_is_longer_than_the_room_does_not_keep_the_others_out() -> None:
    """It ends first, so whole ones seem to take 40 tokens where 30 have room."""
    play = Play(5, room=30)
    long, short = member("g0.0", turns=8), member("g1.0", turns=2)
    play.hear(long, *range(8), end=True)
    await play.settle()
    await play.scores(group_of(long))
    play.scoring.forget(["g0"])
    play.hear(short, 0, 1, end=True)
    await play.settle()
    await play.scores(group_of(short))
    assert play.scoring.scored_ahead == 1.0
    await play.scoring.stop()


async def test_who_waits_for_room_is_tried_only_while_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many wait, and a batch that is forgotten makes room for a few."""
    play = Play(5, room=30, run={"groups_per_step": 64, "max_lag": 2})
    first = member("f.0")
    for turn in range(3):
        play.hear(first, turn)
        await play.settle()
    play.hear(first, end=True)
    await play.settle()
    for number in range(200):
        play.hear(member(f"g{number}.0"), 0)
    await play.settle()
    lanes = play.scoring._streaming._lanes
    assert len(lanes.outside()) == 198
    tried: list[str] = []
    bind = Lanes._bind

    def counted(lanes: Lanes, stream: Stream) -> bool:
        tried.append(stream.name)
        return bind(lanes, stream)

    monkeypatch.setattr(Lanes, "_bind", counted)
    play.scoring.forget([f"g{number}" for number in range(100)])
    assert tried == ["g100.0", "g101.0"]
    await play.scoring.stop()


async def test_a_prefix_that_is_always_lost_is_not_computed_for_ever() -> None:
    play = Play(5)
    play.scorers[5].waste = 5
    one = member("g.0", turns=4)
    for turn in range(4):
        play.hear(one, turn)
        await play.settle()
    assert play.requests == [["g.0"]] and len(play.events("segments_left")) == 1
    assert len(await play.scores(group_of(one))) == 1 and play.whole == [("g.0", 0)]
    await play.scoring.stop()


async def test_without_room_for_prefixes_groups_are_scored_whole() -> None:
    play = Play(5, scorer={"kv_cache_gb": 0.0})
    one = member("g.0")
    play.hear(one, 0)
    await play.settle()
    assert len(await play.scores(group_of(one))) == 1
    assert play.whole == [("g.0", 0)] and not play.requests
    assert not play.config.streams_scores
    await play.scoring.stop()


# -- from the queue -------------------------------------------------------------------------


async def roll_out(queue: MemoryQueue, group: Group, turns: Sequence[int]) -> None:
    for one in group.members:
        for turn in turns:
            await queue.append(
                [Segment(trajectory=one.id, group=one.group, attempt=0, turn=one.turns[turn])]
            )


async def test_the_feeder_hears_of_segments_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.01)

    class Queue(MemoryQueue):
        away = False

        async def news(self, after: str, count: int, wait_s: float) -> Any:
            if self.away:
                raise StreamFailed("no answer")
            return await super().news(after, count, wait_s)

    queue, play = Queue(notices=True), Play(5)
    group = group_of(member("g.0"), member("g.1", turns=2))
    names = tuple(one.id for one in group.members)
    await queue.admit(Order(group="g", task=Task(id="t", env="coin", seed=0), members=names))
    queue.away = True
    play.scoring.listen(queue)
    await roll_out(queue, group, [0])
    await until(lambda: len(play.events("news_not_heard")) > 1)
    assert not play.requests
    queue.away = False
    await roll_out(queue, group, [1])
    streams = play.scoring._streaming._streams
    await until(lambda: sum(len(stream.scores) for stream in streams.values()) == 4)
    assert {name for request in play.requests for name in request} == set(names)
    assert len(await play.scores(group)) == 2
    assert play.scoring.scored_ahead == 0.8 and not play.whole
    await play.scoring.stop()


async def test_what_ends_the_listener_ends_the_run() -> None:
    class Broken(MemoryQueue):
        async def news(self, after: str, count: int, wait_s: float) -> Any:
            raise ValueError("trajectory:a turn:0:1 is damaged")

    play = Play(5)
    play.scoring.listen(Broken())
    await play.settle()
    with pytest.raises(ValueError, match="is damaged"):
        play.scoring.late([], [])
    await play.scoring.stop()


async def test_an_answer_that_does_not_fit_ends_the_run() -> None:
    play = Play(5)

    async def short(asks: Sequence[Ask], done: Sequence[str]) -> Told:
        return Told((), (), (0.0, 0.0), ROOMY)

    play.scorers[5].score_segments = short  # type: ignore[method-assign]
    play.hear(member("g.0"), 0)
    await play.settle()
    with pytest.raises(ValueError, match="zip"):
        play.scoring.late([], [])
    await play.scoring.stop()


# -- with a model ---------------------------------------------------------------------------


class Local:
    """A real scorer in this process, with so many tokens of room for prefixes."""

    def __init__(self, path: Path, tokens: int) -> None:
        self.model = ReferenceScorer(path, kept_bytes=tokens * 2 * 2 * 2 * 16 * 4)
        self.whole = 0

    async def score_segments(self, asks: Sequence[Ask], done: Sequence[str]) -> Told:
        return self.model.score_segments(asks, 64, done)

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        self.whole += 1
        return self.model.score_samples(batch, keys)


@pytest.mark.parametrize("room", [ROOMY, 64, 0])
async def test_gradients_equal_those_of_whole_rows(tmp_path: Path, room: int) -> None:
    """With room for all prefixes, for some, and for none."""
    model, frozen = make_model(tmp_path / "policy"), make_model(tmp_path / "frozen", "qwen3", tied=True)
    config = make_config(model, **KL)
    group = group_of(*(member(f"g.{i}", turns=3 + i, cut=i or -1, outcome=float(i)) for i in range(4)))
    local = Local(frozen, room)
    scoring = Scoring(config, lambda _: local, lambda *_: None)
    scoring.assign([5])
    for turn in range(6):
        for one in group.members:
            if turn < len(one.turns):
                scoring.heard(Segment(trajectory=one.id, group="g", attempt=0, turn=one.turns[turn]))
                for _ in range(4):
                    await asyncio.sleep(0)
    await until(lambda: not scoring._streaming._tasks)  # all that was heard is scored, or has no room
    formed = build([group], config, 1, "decoupled")
    late = scoring.late([group], formed.samples)
    assert late is not None and (scoring.scored_ahead == 1.0 or room < ROOMY)
    taker = Taker()
    await scoring.deliver(formed, [taker])  # type: ignore[list-item]
    (batch,) = formed.plan.ranks
    box: ScoreBox = taker.box
    with single_rank(config, model) as rank:
        streamed = gradients(rank, batch, OfferedSignals(box, batch, late.keys, 1.0))
        burst = gradients(rank, batch, lambda: Colocated(frozen).burst(batch))
    assert worst(streamed, burst) < 1e-6
    assert local.whole == (room == 0)  # one request for all that found no room
    assert local.model._segments.kept.used <= room
    await scoring.stop()
