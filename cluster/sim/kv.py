"""Prefix cache of one generator rank: which sessions' contexts still lie in its KV memory. Pure.

What running sequences hold is *pinned* and counted by the caller; this cache holds the rest, in blocks,
least recently used first. A session that is cut loses its newest blocks first, as vLLM frees a
sequence's blocks in reverse order: what remains of a prefix is always a prefix. Members of a group
share the blocks of their first prompt (their *root*): these lie there once, are pinned while any member
runs, and were touched last whenever a member ended, so that they go after the members' own blocks.

Every entry belongs to a salt (the weights that computed it); another salt never hits it. Blocks under an
outdated salt are dropped at once at a weight sync: they can never be hit again and are the oldest anyway.

All operations are O(1), ``evict`` is O(1) per entry that it touches. Sizes are in blocks of ``block`` tokens.
"""

from collections import OrderedDict
from collections.abc import Hashable


class Root:
    """The shared first prompt of a group: ``blocks`` of it lie in memory, ``pins`` running members use it."""

    __slots__ = ("blocks", "key", "pins")

    def __init__(self, key: tuple[Hashable, int], blocks: int) -> None:
        self.key = key
        self.blocks = blocks
        self.pins = 0


class PrefixCache:
    """Unpinned blocks of one rank. Keys of sessions and groups must not collide with each other."""

    __slots__ = ("_lru", "_roots", "blocks")

    def __init__(self) -> None:
        self.blocks = 0  # cached and not pinned
        self._lru: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # session -> (own blocks, salt)
        self._roots: dict[tuple[Hashable, int], Root] = {}  # pinned or not; unpinned ones are in the LRU too

    def root(self, group: Hashable, salt: int) -> Root | None:
        """The group's root, if any of it lies in memory, pinned or not."""
        return self._roots.get((group, salt))

    def take(self, session: Hashable, salt: int) -> int:
        """The session begins to run: its blocks beyond its group's root leave the cache (the caller pins
        them). 0 if another salt computed them."""
        entry = self._lru.pop(session, None)
        if entry is None:
            return 0
        self.blocks -= entry[0]
        return entry[0] if entry[1] == salt else 0

    def store(self, session: Hashable, salt: int, blocks: int) -> None:
        """The session stops running: its own blocks become the most recently used."""
        lru = self._lru
        if session in lru:
            self.blocks -= lru.pop(session)[0]
        if blocks > 0:
            lru[session] = (blocks, salt)
            self.blocks += blocks

    def pin_root(self, group: Hashable, salt: int, blocks: int) -> Root:
        """A member begins to run. If none does yet, the root is whole (``blocks``) from now on."""
        key = (group, salt)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key, blocks)
        elif root.pins == 0:
            del self._lru[key]
            self.blocks -= root.blocks
            root.blocks = blocks
        root.pins += 1
        return root

    def unpin(self, root: Root, keep: bool = True) -> int:
        """A member stops running; returns the blocks no longer pinned. ``keep``: they stay cached."""
        root.pins -= 1
        if root.pins:
            return 0
        if keep and root.blocks > 0:
            self._lru[root.key] = (root.blocks, root.key[1])
            self.blocks += root.blocks
        else:
            del self._roots[root.key]
        return root.blocks

    def evict(self, limit: int) -> None:
        """Drop the least recently used blocks until at most ``limit`` are left."""
        excess = self.blocks - limit
        lru = self._lru
        while excess > 0 and lru:
            key, (blocks, salt) = next(iter(lru.items()))
            cut = blocks if blocks <= excess else excess
            if cut == blocks:
                del lru[key]
            else:
                lru[key] = (blocks - cut, salt)  # keeps its place
            if key.__class__ is tuple and key in self._roots:
                root = self._roots[key]
                root.blocks -= cut
                if root.blocks == 0:
                    del self._roots[key]
            excess -= cut
            self.blocks -= cut

    def drop(self, session: Hashable) -> None:
        """Forget a session: its task ended, or gave its place up."""
        entry = self._lru.pop(session, None)
        if entry is not None:
            self.blocks -= entry[0]

    def drop_root(self, group: Hashable, salt: int) -> None:
        """Forget an unpinned root: the group has ended."""
        key = (group, salt)
        root = self._roots.get(key)
        if root is not None and root.pins == 0:
            self.drop(key)
            del self._roots[key]

    def clear(self) -> None:
        """Weight sync: nothing that is not pinned can be hit any more."""
        self._lru.clear()
        self._roots = {key: root for key, root in self._roots.items() if root.pins}
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._lru)
