"""Segments scored one by one, each after the prefix that was kept, against whole rows scored at once."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import Call, Trajectory
from learner.batch import compile_trajectory, pack
from learner.late import by_sample, keys_of
from learner.model import load_model
from learner.segment_scorer import SegmentScorer, kv_bytes
from learner.segments import Ask, Context, KeptContexts, unfold
from learner.signals import ReferenceScorer
from tests.learner_tiny import VOCAB, make_call, make_model, make_trajectory

MOST = 64


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def scorer_of(path: Path, room: int = 10_000) -> SegmentScorer:
    return SegmentScorer(load_model(path).eval(), torch.device("cpu"), room)


def some(rng: np.random.Generator, count: int) -> list[int]:
    return [int(n) for n in rng.integers(0, VOCAB, count)]


def episode(seed: int, cuts: Sequence[int | None], added: int = 9, output: int = 5) -> Trajectory:
    """A call per entry: None appends, ``n`` keeps the first ``n`` ids only."""
    rng = np.random.default_rng(seed)
    calls: list[Call] = []
    length = 0
    for number, cut in enumerate(cuts):
        keep = length if cut is None else min(cut, length)
        calls.append(make_call(number, keep, some(rng, added), some(rng, output), temperature=0.7))
        length = keep + added + output
    return make_trajectory(f"t{seed}", calls)


APPENDED = episode(1, [None] * 5)
CUT = episode(2, [None, None, 7, None, 20, None, 0, None])
EPISODES = [APPENDED, CUT, episode(3, [None, None, None], added=1, output=1)]


def whole(path: Path, trajectory: Trajectory) -> np.ndarray:
    """Scores of the sampled tokens in order, by whole rows."""
    rows = compile_trajectory(trajectory, "g0")
    blank = [np.zeros(len(row.ids), np.float32) for row in rows]
    batch = pack(rows, blank, 128, 1, 4).ranks[0]
    scored = by_sample(ReferenceScorer(path).score(batch), batch, keys_of(rows))
    return np.concatenate([values[np.isfinite(values)] for values in scored])


class Stream:
    """One trajectory's calls as they come."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.name = trajectory.id
        self.calls = [call for turn in trajectory.turns for call in turn.calls]
        self.base = np.empty(0, np.int32)
        self.scores: list[np.ndarray] = []
        self.tokens: list[int] = []
        self.rows = 0

    def ask(self, count: int = 1) -> Ask:
        found = unfold(self.base, self.calls[:count])
        self.calls, self.base, self.rows = self.calls[count:], found.reached, self.rows + found.rows
        return Ask(self.name, found.contexts)

    def all(self) -> np.ndarray:
        return np.concatenate(self.scores)


def play(scorer: SegmentScorer, streams: Sequence[Stream], count: int = 1) -> None:
    """Round by round, ``count`` calls of each."""
    while live := [stream for stream in streams if stream.calls]:
        told = scorer.score([stream.ask(count) for stream in live], MOST)
        for stream, values, tokens in zip(live, told.values, told.tokens, strict=True):
            stream.scores.append(values)
            stream.tokens.append(tokens)


@pytest.mark.parametrize("count", [1, 2, 99])
def test_segments_score_as_whole_rows_do(path: Path, count: int) -> None:
    """Appended and cut contexts, several trajectories in a pass, one call or several at a time."""
    streams = [Stream(one) for one in EPISODES]
    play(scorer_of(path), streams, count)
    for stream, one in zip(streams, EPISODES, strict=True):
        expected = whole(path, one)
        assert len(stream.all()) == len(expected)
        assert np.abs(stream.all() - expected).max() < 1e-5


def test_an_appended_segment_costs_its_new_tokens_only(path: Path) -> None:
    streams = [Stream(APPENDED), Stream(CUT)]
    play(scorer_of(path), streams)
    assert streams[0].tokens == [14] * 5 and streams[0].rows == sum(streams[0].tokens)
    assert streams[1].tokens == [14] * 8  # a cut keeps the prefix too
    assert streams[1].rows == 8 * 14 + 7 + 20  # whole rows run kept ids again


@pytest.mark.parametrize("room", [0, 64, 100])
def test_what_was_evicted_is_computed_again(path: Path, room: int) -> None:
    scorer = scorer_of(path, room)
    streams = [Stream(one) for one in (APPENDED, CUT)]
    play(scorer, streams)
    for stream, one in zip(streams, (APPENDED, CUT), strict=True):
        assert np.abs(stream.all() - whole(path, one)).max() < 1e-5
    assert sum(sum(stream.tokens) for stream in streams) > 13 * 14
    assert scorer.kept.used <= room


def test_the_same_segments_again_score_the_same(path: Path) -> None:
    """A reply that was lost is asked for again: the token before the first target is run again."""
    scorer = scorer_of(path)
    first = Stream(APPENDED)
    asks = [first.ask() for _ in range(3)]
    once = [scorer.score([ask], MOST).values[0] for ask in asks]
    told = scorer.score([asks[2]], MOST)
    assert told.tokens == (6,) and np.allclose(told.values[0], once[2], atol=1e-6)
    back = scorer.score([asks[0]], MOST)
    assert back.tokens == (6,) and np.allclose(back.values[0], once[0], atol=1e-6)


def test_another_trajectory_of_the_same_name_shares_what_is_equal(path: Path) -> None:
    """A second attempt begins with the same prompt: found by its ids, not by what it claims to be."""
    scorer = scorer_of(path)
    play(scorer, [Stream(APPENDED)])
    other = Stream(make_trajectory("t1", [make_call(0, 0, [*APPENDED_PROMPT[:6], 1, 2, 3], [4, 5])]))
    play(scorer, [other])
    shared = 6 + int(np.array_equal(APPENDED_PROMPT[6:7], [1]))
    assert other.tokens == [11 - shared]


APPENDED_PROMPT = [int(n) for n in np.frombuffer(APPENDED.turns[0].calls[0].added, "<i4")]


def test_a_pass_is_bounded_and_nothing_to_score_is_nothing(path: Path) -> None:
    scorer = scorer_of(path)
    passes: list[int] = []
    scorer._model.register_forward_pre_hook(lambda _, rows: passes.append(rows[0].ids.shape[1]))
    scorer.score([Stream(episode(n, [None])).ask() for n in range(10, 19)], MOST)
    assert passes == [56, 56, 14]
    told = scorer.score([Ask("x", ())], MOST)
    assert told.tokens == (0,) and len(told.values[0]) == 0
    assert scorer.score([], MOST).values == ()


def test_memory_of_a_token(path: Path) -> None:
    assert kv_bytes(load_model(path)) == 2 * 2 * 2 * 16 * 4  # both, layers, heads, size of a head, fp32


# -- without a model ------------------------------------------------------------------------


def test_calls_unfold_as_rows_do() -> None:
    for one in EPISODES:
        found = unfold(np.empty(0, np.int32), [call for turn in one.turns for call in turn.calls])
        rows = compile_trajectory(one, "g0")
        assert len(found.contexts) == len(rows) and found.rows == sum(len(row.ids) for row in rows)
        for context, row in zip(found.contexts, rows, strict=True):
            assert np.array_equal(context.ids, row.ids)
            assert np.array_equal(context.targets, np.flatnonzero(row.mask))
        assert np.array_equal(found.reached, rows[-1].ids)


def test_what_cannot_be_unfolded_is_refused() -> None:
    none = np.empty(0, np.int32)
    with pytest.raises(ValueError, match="call 0 keeps 3 of 0 ids"):
        unfold(none, [make_call(0, 3, [1], [2])])
    with pytest.raises(ValueError, match="the prompt is empty"):
        unfold(none, [make_call(0, 0, [], [2])])
    silent = unfold(none, [make_call(0, 0, [1, 2], [])])
    assert silent.contexts == () and list(silent.reached) == [1, 2]


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 2), min_size=2, max_size=12))),
)
def test_kept_contexts_are_bounded_and_found_by_their_ids(
    room: int, asked: list[tuple[str, list[int]]]
) -> None:
    kept: KeptContexts[list[int]] = KeptContexts(room)
    newest: dict[str, list[int]] = {}
    for name, ids in asked:
        context = Context(np.array(ids, np.int32), np.array([len(ids) - 1], np.int32), np.ones(1, np.float32))
        start, payload = kept.take(name, context)
        if payload is not None:
            assert payload == newest[name]
            assert payload[:start] == ids[:start]
            assert start == len(ids) - 2 or start == len(payload) or payload[start] != ids[start]
        else:
            assert start == 0
        others = set(kept._kept)
        kept.keep(name, context.ids, ids, len(ids))
        newest[name] = ids
        assert len(ids) <= room or set(kept._kept) == others, "what finds no room drives nobody out"
        assert kept.used <= room and kept.used == sum(one.size for one in kept._kept.values())
        assert len(ids) > room or name in kept._kept
