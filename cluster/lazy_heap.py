"""Priority queues whose entries may become void: they are skipped when met and swept when they pile up."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Stamped(Protocol):
    """Something whose entries hold only while ``stamp`` stays the same."""

    stamp: int


T = TypeVar("T", bound=Stamped)


class LazyHeap(Generic[T]):
    """Smallest key first, older entries first among equals. All operations are O(log n) amortised."""

    __slots__ = ("_entries", "_serial", "_sweep")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, T]] = []  # (key, serial, stamp, item)
        self._serial = 0
        self._sweep = 64

    def push(self, key: float, item: T) -> None:
        """Enter an item under its present stamp."""
        self._serial += 1
        heappush(self._entries, (key, self._serial, item.stamp, item))
        if len(self._entries) > self._sweep:
            self._entries = [entry for entry in self._entries if entry[3].stamp == entry[2]]
            heapify(self._entries)
            self._sweep = 2 * len(self._entries) + 64

    def first(self) -> T | None:
        """The valid item with the smallest key; it stays."""
        entries = self._entries
        while entries:
            entry = entries[0]
            if entry[3].stamp == entry[2]:
                return entry[3]
            heappop(entries)
        return None

    def due(self, key: float) -> T | None:
        """``first()``, if its key is not above ``key``."""
        item = self.first()
        return item if item is not None and self._entries[0][0] <= key else None

    def first_key(self) -> float:
        """Key of ``first()``, which must have found one."""
        return self._entries[0][0]

    def pop(self) -> T | None:
        """Take the first valid item out."""
        item = self.first()
        if item is not None:
            heappop(self._entries)
        return item

    def __len__(self) -> int:
        """Entries that are kept, void ones too."""
        return len(self._entries)

    def __bool__(self) -> bool:
        return self.first() is not None

    def __iter__(self) -> Iterator[T]:
        """The valid items, in no order."""
        return (entry[3] for entry in self._entries if entry[3].stamp == entry[2])


class LateHeap(LazyHeap[T]):
    """The same for a queue that is seldom looked at: entries are put in order when somebody does.

    Most are void by then. A look costs O(k log n) after ``k`` new entries, so O(log n) for each of them.
    """

    __slots__ = ("_fresh",)

    def __init__(self) -> None:
        super().__init__()
        self._fresh: list[tuple[float, int, T]] = []  # (key, stamp, item), oldest first

    def push(self, key: float, item: T) -> None:
        self._fresh.append((key, item.stamp, item))
        if len(self._fresh) > self._sweep:
            self._fresh = [entry for entry in self._fresh if entry[2].stamp == entry[1]]
            self._sweep = 2 * len(self._fresh) + 64

    def _take_in(self) -> None:
        fresh, self._fresh = self._fresh, []
        for key, stamp, item in fresh:
            if item.stamp == stamp:
                super().push(key, item)

    def first(self) -> T | None:
        if self._fresh:
            self._take_in()
        return super().first()

    def __len__(self) -> int:
        return len(self._entries) + len(self._fresh)

    def __iter__(self) -> Iterator[T]:
        self._take_in()
        return super().__iter__()
