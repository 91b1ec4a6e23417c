"""Placement: least busy with room, group-mates together, and somewhere in any case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.affinity import GROUP_SLACK, place


def test_ample_room_goes_to_the_least_busy_not_to_the_roomiest() -> None:
    assert place([3, 1, 2], [900, 500, 999], need=100) == 1


def test_scarce_room_goes_to_the_least_busy_that_has_it() -> None:
    assert place([5, 1, 3], [400, 50, 400], need=100) == 2


def test_no_room_anywhere_goes_to_the_least_busy() -> None:
    assert place([5, 1, 3], [40, 50, 40], need=100) == 1


def test_group_stays_together_while_its_generator_is_not_clearly_busier() -> None:
    assert place([GROUP_SLACK, 0], None, need=10, home=0) == 0
    assert place([GROUP_SLACK + 1, 0], None, need=10, home=0) == 1


def test_group_goes_elsewhere_when_its_generator_has_no_room() -> None:
    assert place([0, 0], [5, 50], need=10, home=0) == 1
    assert place([0, 0], [5, 5], need=10, home=1) == 1  # nobody has: together again


def test_there_must_be_a_generator() -> None:
    with pytest.raises(ValueError, match="empty"):
        place([], None, need=1)


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(-50, 500)), min_size=1, max_size=12),
    need=st.integers(1, 400),
    home=st.integers(-1, 11),
)
def test_whoever_is_chosen_has_room_if_anybody_has(
    rows: list[tuple[int, int]], need: int, home: int
) -> None:
    loads, rooms = [load for load, _ in rows], [room for _, room in rows]
    at = place(loads, rooms, need, min(home, len(rows) - 1))
    if max(rooms) >= need:
        assert rooms[at] >= need
        fitting = [load for load, room in rows if room >= need]
        assert loads[at] <= min(fitting) + GROUP_SLACK
