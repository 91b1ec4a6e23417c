"""Heaps with entries that become void: the late one gives what the eager one gives, in the same order."""

import random

from cluster.lazy_heap import LateHeap, LazyHeap


class Item:
    def __init__(self, name: int) -> None:
        self.name = name
        self.stamp = 0


def test_late_and_eager_heaps_agree() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        eager: LazyHeap[Item] = LazyHeap()
        late: LateHeap[Item] = LateHeap()
        items = [Item(name) for name in range(30)]
        for _ in range(600):
            item = rng.choice(items)
            what = rng.random()
            if what < 0.7:
                item.stamp += 1
                key = float(rng.randrange(6))  # ties: the older entry goes first
                eager.push(key, item)
                late.push(key, item)
            elif what < 0.8:
                item.stamp += 1  # void in both
            elif what < 0.9:
                assert late.pop() is eager.pop()
            else:
                key = float(rng.randrange(6))
                assert late.due(key) is eager.due(key)
                assert bool(late) == bool(eager)
        assert {item.name for item in late} == {item.name for item in eager}
        assert [late.pop() for _ in range(31)] == [eager.pop() for _ in range(31)]
        assert not late and not eager


def test_void_entries_do_not_pile_up() -> None:
    for heap in (LazyHeap[Item](), LateHeap[Item]()):
        item = Item(0)
        for _ in range(10_000):
            item.stamp += 1
            heap.push(1.0, item)
        assert len(heap) < 200
        assert heap.first() is item
