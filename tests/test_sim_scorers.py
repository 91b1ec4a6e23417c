"""Scorer ranks of the simulator: what is run, when, and that no group is left without scores."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sim.profile import Profile
from cluster.sim.scenario import Split
from cluster.sim.scorers import Scorers, makespan
from cluster.sim.tasks import Group
from cluster.sim.world import World
from tests.test_sim_world import PROFILE, Growing, policy, scenario

TOKEN_S = 0.001


class Play:
    """Scorers with a clock; one group member's turn is ``turn(group, tokens)``."""

    def __init__(self, ranks: int = 2, room: int = 1_000_000, limit: int = 100) -> None:
        self.heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.serial = count()
        self.now = 0.0
        self.told: list[str] = []
        self.done: list[int] = []
        self.scorers = Scorers(
            scenario(profile=profile_with(room, limit)), ranks, self.after,
            lambda _, cause: self.told.append(cause), self.scored,
        )  # fmt: skip
        self.scorers.start(0.0, [])

    def after(self, t: float, handler: Callable[[float, Any], None], argument: Any) -> None:
        heappush(self.heap, (t, next(self.serial), handler, argument))

    def scored(self, now: float, group: Group) -> None:
        assert group.left == 0 and group.unscored == 0
        self.done.append(group.number)

    def turn(self, group: Group, tokens: int, last: bool = False) -> None:
        group.rows.append(tokens)
        self.scorers.turned(self.now, group, tokens)
        if last:
            group.left = 0
            group.train_tokens = sum(group.rows)
            self.scorers.ready(self.now, group)

    def settle(self) -> None:
        while self.heap:
            self.now, _, handler, argument = heappop(self.heap)
            handler(self.now, argument)


def profile_with(room: int, limit: int) -> Profile:
    """A profile whose scorers take ``TOKEN_S`` a token and hold ``room`` tokens of prefixes."""
    change = msgspec.structs.replace
    return change(
        PROFILE,
        generator=change(PROFILE.generator, kv_tokens=room),
        learner=change(PROFILE.learner, micro_tokens=limit),
        scorer=change(PROFILE.scorer, forward_tok_s=1 / TOKEN_S, passes=1),
    )


def group(number: int) -> Group:
    return Group(number, 4, 0.0, False)


def test_segments_are_scored_before_the_group_is_ready() -> None:
    play, one = Play(), group(1)
    play.turn(one, 80)
    play.settle()
    assert (one.unscored, play.done) == (0, []) and play.now == pytest.approx(40 * TOKEN_S)
    play.turn(one, 20, last=True)
    play.settle()
    assert play.done == [1] and play.now == pytest.approx(50 * TOKEN_S)
    assert play.scorers.busy_s == pytest.approx(100 * TOKEN_S)
    assert play.told[-1] == "data" and play.scorers.idle


def test_a_ready_group_goes_before_segments() -> None:
    play = Play(ranks=1)
    made = [group(n) for n in range(4)]
    for one in made:
        play.turn(one, 100)
    made[3].left = 0
    made[3].train_tokens = 100
    play.scorers.ready(play.now, made[3])
    play.settle()
    assert play.done == [3] and play.now == pytest.approx(0.4)
    assert play.scorers.busy_s == pytest.approx(0.4), "nothing is run twice"


def test_without_room_a_group_is_run_whole_when_it_is_ready() -> None:
    play = Play(ranks=1, room=100)
    first, second = group(3), group(2)
    play.turn(group(1), 100, last=True)
    play.settle()  # now the scorers know how long a group may get
    play.turn(first, 60)
    play.turn(second, 60)
    play.settle()
    assert (first.unscored, second.unscored) == (0, 60)
    play.turn(second, 40, last=True)
    play.settle()
    assert play.done == [1, 2]


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["turn", "last", "settle", "pause", "start", "resize", "forget"]),
            st.integers(0, 4),
            st.integers(1, 60),
        ),
        max_size=40,
    ),
    room=st.sampled_from([50, 300, 10_000]),
)
def test_every_ready_group_that_is_kept_gets_scores_once(moves: list[Any], room: int) -> None:
    play = Play(room=room)
    groups = {n: group(n) for n in range(5)}
    ready: list[Group] = []
    for what, number, tokens in moves:
        one = groups[number]
        if what in ("turn", "last") and one.left:
            play.turn(one, tokens, last=what == "last")
            ready += [one] if not one.left else []
        elif what == "settle":
            play.settle()
        elif what == "pause":
            play.scorers.pause()
        elif what == "start" and not play.scorers.running:
            play.scorers.start(play.now, [g for g in ready if not g.scored])
        elif what == "resize":
            play.scorers.resize(play.now, tokens % 3)
        elif what == "forget" and one in ready and not one.scored:
            play.scorers.forget(one)
    play.scorers.resize(play.now, 2)
    if not play.scorers.running:
        play.scorers.start(play.now, [g for g in ready if not g.scored])
    play.settle()
    assert all(one.scored for one in ready)
    assert len(set(play.done)) == len(play.done)


class Closed(Scorers):
    """Room for nobody's prefix: whole groups are scored, when they are ready."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = -1


def test_segments_scored_in_time_leave_learners_less_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = msgspec.structs.replace(PROFILE.scorer, forward_tok_s=6_000.0)
    profile = msgspec.structs.replace(PROFILE, scorer=scorer)
    job = scenario(
        workload=Growing(), split=Split(6, 2, 1), policy=policy(scoring="decoupled"), gated=True,
        profile=profile,
    )  # fmt: skip

    def play() -> tuple[float, float]:
        """(seconds that learners waited for scores, mean share of a batch scored ahead)"""
        world, ahead = World(job), []
        close = world.trainer.close

        def closing() -> list[Group]:
            batch = close()
            ahead.append(world.trainer.scored_ahead)
            return batch

        world.trainer.close = closing  # type: ignore[method-assign]
        waits = sum(step.twt_s.get("signal", 0.0) for step in world.run().steps)
        return waits, fmean(share for share in ahead if share is not None)

    streamed, ahead = play()
    monkeypatch.setattr("cluster.sim.trainer.Scorers", Closed)
    whole, behind = play()
    assert streamed < 0.5 * whole
    assert 0.0 < behind < ahead <= 1.0


def test_makespan_is_that_of_the_fullest_rank() -> None:
    assert makespan([5, 4, 3], 2) == 7
    assert makespan([5], 3) == 5
    assert makespan([], 2) == 0
