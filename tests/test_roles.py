"""The role map: every way through the life of a move, with ranks that come and go."""

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Config, build
from cluster.messages import RankRow
from cluster.roles import ROLES, RoleMap, member_name, starting_ranks


def config(learners: int = 2, generators: int = 3, scorers: int = 1) -> Config:
    tree: dict[str, Any] = {
        "env": {"name": "coin"},
        "model": {"path": "/nowhere"},
        "learner": {"ranks": learners},
        "generator": {"replicas": generators},
    }
    if scorers:
        tree |= {"scorer": {"replicas": scorers}, "objective": {"kl_coef": 0.1}}
    return build(tree)


def test_a_static_job_has_the_names_of_its_recipe() -> None:
    settings = config()
    roles = RoleMap.first(settings, 1)
    names = {role: [member_name(role, rank, settings) for rank in roles.of(role)] for role in ROLES}
    assert names == {
        "learner": ["learner-0", "learner-1"],
        "generator": ["generator-0", "generator-1", "generator-2"],
        "scorer": ["scorer-0"],
    }


@given(learners=st.integers(1, 9), generators=st.integers(1, 9), scorers=st.integers(0, 4))
def test_every_rank_has_a_name_of_its_own_in_every_role(learners: int, generators: int, scorers: int) -> None:
    settings = config(learners, generators, scorers)
    ranks = range(2 * starting_ranks(settings))
    for role in ROLES:
        assert len({member_name(role, rank, settings) for rank in ranks}) == len(ranks)


def test_a_role_that_no_actor_serves_is_refused() -> None:
    with pytest.raises(ValueError, match="no actor serves role 'spare'"):
        member_name("spare", 0, config())


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["plan", "cancel", "commit", "finish", "undo", "lose", "join"]),
        st.integers(0, 9),
        st.sampled_from([*ROLES, "spare"]),
    ),
    max_size=60,
)


def apply(roles: RoleMap, event: tuple[str, int, str]) -> RoleMap:
    name, rank, role = event
    epoch, move = roles.epoch + 1, roles.moves - 1
    if name == "plan":
        return roles.plan(rank, role, "why", 1.5, 2.0)
    if name == "commit":
        return roles.commit(move, epoch)
    if name == "undo":
        return roles.undo(move, epoch)
    if name == "lose":
        return roles.lose([rank], epoch)
    if name == "join":
        return roles.join([RankRow(rank, "learner", "node")], epoch)
    return roles.cancel(move) if name == "cancel" else roles.finish(move)


@settings(max_examples=200)
@given(events=EVENTS)
def test_every_reachable_state_is_sound_and_survives_the_journal(events: list[tuple[str, int, str]]) -> None:
    roles = RoleMap.first(config(), 1)
    used = {roles.epoch}
    roles_before: dict[int, str] = {}  # when the move under way was planned
    for event in events:
        try:
            after = apply(roles, event)
        except ValueError:
            continue
        if event[0] == "plan":
            roles_before = {row.rank: row.role for row in roles.ranks}
        if event[0] == "join":  # a move may be under way: it is another rank's
            roles_before[event[1]] = "spare"
        if event[0] in ("cancel", "undo"):
            assert [r.role for r in after.ranks] == [roles_before.get(r.rank, r.role) for r in after.ranks]
        if after.epoch != roles.epoch:
            assert after.epoch > roles.epoch and after.epoch not in used
            used.add(after.epoch)
        else:
            assert [r.role for r in after.ranks] == [r.role for r in roles.ranks], (
                "roles change with the epoch"
            )
        roles = after
        numbers = [row.rank for row in roles.ranks]
        assert numbers == sorted(set(numbers)), "exactly one role per rank"
        assert sum(roles.counts().values()) == sum(not row.lost for row in roles.ranks)
        assert (roles.move is None) == (roles.phase == "settled")
        if roles.move is not None:
            held = roles.row(roles.move.rank)
            assert held.role == (roles.move.target if roles.phase == "committed" else roles.move.source)
            assert not held.lost
        assert RoleMap.decode(roles.encode()) == roles
        assert msgpack.unpackb(roles.encode()[1:])["epoch"] == roles.epoch


@settings(max_examples=200)
@given(events=EVENTS, late=st.integers(0, 30))
def test_only_the_move_under_way_can_end(events: list[tuple[str, int, str]], late: int) -> None:
    """A report that names a move which ended, in whatever way, changes nothing; ids are never used twice."""
    roles = RoleMap.first(config(), 1)
    seen: list[int] = []
    for event in events:
        with suppress(ValueError):
            after = apply(roles, event)
            if after.move is not None and roles.move is None:
                assert after.move.id not in seen
                seen.append(after.move.id)
            roles = after
        waits = roles.move.id if roles.move is not None and roles.phase == "committed" else None
        for move in {late, *seen, *(i + 1 for i in seen)}:
            assert (roles.refuses(move) == "") is (move == waits)
            if roles.move is not None and roles.move.id != move:
                refused = f"move {move} is not under way: move {roles.move.id} is"
                plain, other = {"planned": ("cancel", "commit"), "committed": ("finish", "undo")}[roles.phase]
                with pytest.raises(ValueError, match=refused):
                    getattr(roles, plain)(move)
                with pytest.raises(ValueError, match=refused):
                    getattr(roles, other)(move, roles.epoch + 1)


def test_undo_restores_and_a_committed_rank_serves_nobody() -> None:
    first = RoleMap.first(config(), 5)
    committed = first.plan(1, "generator").commit(0, 6)
    assert committed.of("generator") == [1, 2, 3, 4]
    assert committed.serving("generator") == [2, 3, 4], "not before it is finished"
    assert committed.serving("learner") == [0]
    assert committed.touches_learners
    assert committed.undo(0, 7).ranks == first.ranks
    assert committed.finish(0).serving("generator") == [1, 2, 3, 4]
    assert first.plan(1, "generator").cancel(0).ranks == first.ranks


def test_a_lost_rank_takes_its_move_with_it_and_comes_back_as_a_spare() -> None:
    first = RoleMap.first(config(), 1)
    for half in (first.plan(1, "generator"), first.plan(1, "generator").commit(0, 2)):
        gone = half.lose([1, 5], 9)
        assert (gone.move, gone.epoch) == (None, 9)
        assert gone.counts() == {"generator": 3, "scorer": 0, "learner": 1, "spare": 0}
        assert gone.row(1) == RankRow(1, "learner", "", True), "its role is remembered"
    back = gone.join([RankRow(1, "spare", "b"), RankRow(6, "spare", "b")], 10)
    assert back.of("spare") == [1, 6]
    with pytest.raises(ValueError, match="rank 0 is a live learner"):
        back.join([RankRow(0, "spare", "b")], 11)
    other = first.plan(2, "learner").lose([1], 2)
    assert other.move is not None, "another rank's loss does not end a move"


def test_what_cannot_be_is_refused_by_name() -> None:
    roles = RoleMap.first(config(), 1)
    with pytest.raises(ValueError, match="rank 0 is a learner already"):
        roles.plan(0, "learner")
    with pytest.raises(ValueError, match="did you mean 'learner'"):
        roles.plan(0, "learners")
    with pytest.raises(ValueError, match="no rank 17"):
        roles.plan(17, "learner")
    with pytest.raises(ValueError, match="move 0 of rank 0 is under way"):
        roles.plan(0, "generator").plan(1, "generator")
    with pytest.raises(ValueError, match="no move is committed: the map is planned"):
        roles.plan(0, "generator").finish(0)
    with pytest.raises(ValueError, match="epoch 1 is not newer than 1"):
        roles.plan(0, "generator").commit(0, 1)
