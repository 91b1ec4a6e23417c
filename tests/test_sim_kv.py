"""The prefix cache against a plain model of it, and its corner cases."""

from collections.abc import Hashable
from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from cluster.sim.kv import PrefixCache


def own(cache: PrefixCache, *sessions: Hashable) -> list[int]:
    """What each would hit under salt 0 if it ran now."""
    return [deepcopy(cache).take(session, 0) for session in sessions]


def test_least_recently_used_goes_first_and_loses_its_newest_blocks() -> None:
    cache = PrefixCache()
    for session, blocks in (("a", 4), ("b", 3), ("c", 2)):
        cache.store(session, 0, blocks)
    cache.evict(7)
    assert own(cache, "a", "b", "c") == [2, 3, 2]
    cache.store("a", 0, cache.take("a", 0))  # used again: the newest now
    cache.evict(3)
    assert own(cache, "a", "b", "c") == [2, 0, 1]
    assert cache.blocks == 3


def test_another_salt_never_hits() -> None:
    cache = PrefixCache()
    cache.store("a", 1, 5)
    assert cache.take("a", 2) == 0
    assert cache.blocks == 0


def test_the_first_prompt_of_a_group_lies_there_once() -> None:
    cache = PrefixCache()
    root = cache.pin_root("g", 0, 10)
    assert cache.pin_root("g", 0, 10) is root
    assert cache.unpin(root) == 0  # a member still runs
    assert cache.blocks == 0
    assert cache.unpin(root) == 10
    assert cache.blocks == 10
    cache.store("g.0", 0, 3)
    cache.evict(8)  # the root was used before g.0's own blocks were stored
    assert cache.root("g", 0) is root and root.blocks == 5
    assert cache.pin_root("g", 0, 10) is root
    assert (root.blocks, root.pins, cache.blocks) == (10, 1, 3)


def test_a_sync_clears_all_that_is_not_pinned() -> None:
    cache = PrefixCache()
    root = cache.pin_root("g", 0, 4)
    cache.unpin(cache.pin_root("h", 0, 4))
    cache.store("h.1", 0, 2)
    cache.clear()
    assert (cache.blocks, cache.root("g", 0), root.blocks, cache.root("h", 0)) == (0, root, 4, None)
    assert cache.take("h.1", 0) == 0
    assert cache.unpin(root, keep=False) == 4
    assert cache.root("g", 0) is None


def test_an_ended_group_gives_its_root_back() -> None:
    cache = PrefixCache()
    root = cache.pin_root("g", 0, 4)
    cache.drop_root("g", 0)  # pinned: stays
    assert cache.root("g", 0) is root
    cache.unpin(root)
    cache.drop_root("g", 0)
    assert (cache.blocks, cache.root("g", 0), len(cache)) == (0, None, 0)


Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "take", "drop", "evict"]),
        st.integers(0, 5),
        st.integers(0, 9),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(steps)
def test_like_a_plain_list(todo: list[Step]) -> None:
    cache = PrefixCache()
    plain: list[list[int]] = []  # [session, blocks, salt], oldest first
    for what, session, blocks, salt in todo:
        mine = [entry for entry in plain if entry[0] == session]
        if what == "evict":
            cache.evict(blocks)
            while sum(entry[1] for entry in plain) > blocks:
                plain[0][1] -= 1
                plain = [entry for entry in plain if entry[1]]
            continue
        plain = [entry for entry in plain if entry[0] != session]
        if what == "store":
            cache.store(session, salt, blocks)
            plain += [[session, blocks, salt]] if blocks else []
        elif what == "take":
            assert cache.take(session, salt) == sum(entry[1] for entry in mine if entry[2] == salt)
        else:
            cache.drop(session)
        assert cache.blocks == sum(entry[1] for entry in plain)
    assert [cache.take(session, salt) for session, _, salt in plain] == [blocks for _, blocks, _ in plain]
