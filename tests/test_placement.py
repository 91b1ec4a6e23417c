"""Ranks and workers are dealt to nodes without overbooking, learners stay together, nodes come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from deploy.nodes import difference, keep_residents, numbers, short_of
from deploy.placement import Node, Seat, nodes_of, plan

RANKS = [0, 1, 2, 3, 4]


def test_one_node_takes_all() -> None:
    seats = plan(RANKS, ["worker-0"], [Node("n", 8)], gpus=False)
    assert seats == [Seat(name, "n") for name in [*RANKS, "worker-0"]]


def test_the_largest_node_is_filled_first() -> None:
    seats = plan(RANKS, [], [Node("a", 2), Node("b", 3)], gpus=False)
    assert seats == [Seat(0, "b"), Seat(1, "b"), Seat(2, "b"), Seat(3, "a"), Seat(4, "a")]


def test_workers_stay_with_the_driver_as_far_as_there_is_room() -> None:
    seats = plan([0], ["worker-0", "worker-1"], [Node("home", 1), Node("b", 3)], gpus=False)
    assert {seat.name: seat.node for seat in seats} == {0: "b", "worker-0": "home", "worker-1": "b"}


def test_on_cuda_workers_take_cores_beside_the_devices() -> None:
    seats = plan([0, 1], ["worker-0"], [Node("home", 0, 1), Node("b", 2, 6)], gpus=True)
    assert {seat.name: seat.node for seat in seats} == {0: "b", 1: "b", "worker-0": "home"}
    with pytest.raises(ConfigError, match=r"env.workers = 3: the cluster has 2 free cores"):
        plan([0], ["worker-0", "worker-1", "worker-2"], [Node("home", 1, 2)], gpus=True)


def test_too_few_slots_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 5 ranks .* has 4 free slots on 2 nodes$"):
        plan(RANKS, [], [Node("a", 2), Node("b", 2)], gpus=False)
    with pytest.raises(ConfigError, match=r"needs 5 ranks .* has 4 free slots on 2 nodes beside 1 env"):
        plan(RANKS, ["worker-0"], [Node("a", 3), Node("b", 2)], gpus=False)


@given(
    ranks=st.integers(0, 12),
    workers=st.integers(0, 6),
    nodes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    gpus=st.booleans(),
)
def test_a_plan_seats_everyone_once_and_never_overbooks(
    ranks: int, workers: int, nodes: list[tuple[int, int]], gpus: bool
) -> None:
    there = [Node(f"n{i}", slots, cores if gpus else 0) for i, (slots, cores) in enumerate(nodes)]
    names = [f"worker-{i}" for i in range(workers)]
    slots, cores = sum(n.slots for n in there), sum(n.cores for n in there)
    fits = (ranks <= slots and workers <= cores) if gpus else ranks + workers <= slots
    try:
        seats = plan(range(ranks), names, there, gpus)
    except ConfigError:
        assert not fits
        return
    assert fits
    assert sorted(map(str, (seat.name for seat in seats))) == sorted(map(str, [*range(ranks), *names]))
    for node in there:
        here = [seat.name for seat in seats if seat.node == node.id]
        held = sum(isinstance(name, int) for name in here)
        assert held <= node.slots and len(here) - held <= (node.cores if gpus else node.slots - held)


CLUSTER = [
    {"NodeID": "a", "Alive": True, "NodeManagerAddress": "m1", "Resources": {"CPU": 4.0}},
    {"NodeID": "b", "Alive": False, "NodeManagerAddress": "m1", "Resources": {"CPU": 4.0}},
    {"NodeID": "c", "Alive": True, "NodeManagerAddress": "m1", "Resources": {"CPU": 6.0, "GPU": 2.0}},
]


def test_dead_nodes_do_not_count_and_the_drivers_keeps_two_cores() -> None:
    assert nodes_of(CLUSTER, gpus=False, home="c") == [Node("c", 4, 0, "m1"), Node("a", 4, 0, "m1")]
    assert nodes_of(CLUSTER, gpus=True, home="a") == [Node("a", 0, 2, "m1"), Node("c", 2, 4, "m1")]


def test_what_others_hold_does_not_count_and_an_unknown_node_is_full() -> None:
    free = {"a": {"CPU": 1.0}}
    assert nodes_of(CLUSTER, gpus=False, free=free) == [Node("a", 1, 0, "m1"), Node("c", 0, 0, "m1")]


def test_a_device_without_a_core_is_no_slot() -> None:
    entry = CLUSTER[2] | {"Resources": {"CPU": 1.0, "GPU": 4.0}}
    assert nodes_of([entry], gpus=True) == [Node("c", 1, 0, "m1")]


# -- while the job runs -------------------------------------------------------------------------------


def test_missing_ranks_are_replaced_and_elastic_jobs_take_all_that_joins() -> None:
    assert short_of(wanted=3, living=2, joined_slots=4, elastic=False) == 1
    assert short_of(wanted=3, living=3, joined_slots=4, elastic=False) == 0
    assert short_of(wanted=3, living=2, joined_slots=4, elastic=True) == 4
    assert short_of(wanted=3, living=5, joined_slots=0, elastic=True) == 0


def test_numbers_of_lost_ranks_are_used_again() -> None:
    assert numbers(1, {0, 2}) == [1]
    assert numbers(3, {0, 2}) == [1, 3, 4]
    assert numbers(2, {0, 1, 2, 7}) == [3, 4]
    assert numbers(0, {0}) == []


def test_members_stay_idle_where_memory_allows_and_surplus_workers_go() -> None:
    have = ["controller", "feeder", "generator-0", "generator-1", "learner-0", "worker-0", "worker-1"]
    wanted = ["generator-0", "learner-0", "learner-1", "worker-0"]
    assert difference(wanted, have, residents=True) == (["learner-1"], ["worker-1"])
    assert difference(wanted, have, residents=False) == (["learner-1"], ["generator-1", "worker-1"])
    assert keep_residents(gpus=False, available=0.5)
    assert not keep_residents(gpus=True, available=0.5)
    assert not keep_residents(gpus=False, available=0.1)
