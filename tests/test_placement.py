"""Ranks are dealt to nodes without overbooking, learners stay together."""

import pytest

from cluster.errors import ConfigError
from deploy.placement import Node, Seat, nodes_of, plan

RANKS = ["learner-0", "learner-1", "generator-0", "generator-1", "scorer-0"]


def test_one_node_takes_all() -> None:
    seats = plan(RANKS, [Node("10.0.0.1", 8)])
    assert seats == [Seat(rank, "10.0.0.1", i) for i, rank in enumerate(RANKS)]


def test_the_largest_node_is_filled_first_and_bundles_are_distinct() -> None:
    seats = plan(RANKS, [Node("a", 2), Node("b", 3)])
    assert [seat.address for seat in seats] == ["b", "b", "b", "a", "a"]
    assert len({(seat.address, seat.bundle) for seat in seats}) == len(RANKS)
    assert [seat.rank for seat in seats] == RANKS


def test_too_few_slots_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 5 ranks .* has 4 free slots"):
        plan(RANKS, [Node("a", 2), Node("b", 2)])


def test_dead_nodes_and_reserved_cores_do_not_count() -> None:
    cluster = [
        {"Alive": True, "NodeManagerAddress": "a", "Resources": {"CPU": 4.0}},
        {"Alive": False, "NodeManagerAddress": "b", "Resources": {"CPU": 4.0}},
        {"Alive": True, "NodeManagerAddress": "c", "Resources": {"CPU": 2.0, "GPU": 2.0}},
    ]
    assert nodes_of(cluster, gpus=False, reserved=5) == [Node("a", 0), Node("c", 1)]
    assert nodes_of(cluster, gpus=True, reserved=5) == [Node("a", 0), Node("c", 2)]
