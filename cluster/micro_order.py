"""Which rows make which micro-batch, and in what order they are trained. Pure.

Early micro-batches are filled until compute saturates; the last is kept tiny, since nothing overlaps with the
last backward pass (TideRL, arXiv:2608.10402).
"""

from collections.abc import Sequence

TAIL_SHARE = 0.125
"""Largest size of the last micro-batch, as a share of a full one: it bounds the flush of the pipeline."""

Micro = tuple[tuple[int, ...], ...]
"""One micro-batch: for each learner rank, the indices of its items."""


def order(
    lengths: Sequence[int],
    micro_tokens: int,
    mode: str,
    ranks: int,
    max_items: int | None = None,
    tail_share: float = TAIL_SHARE,
) -> list[Micro]:
    """Deal items (rows or samples, by length in tokens) to micro-batches and ranks; each item once.

    A micro-batch holds at most ``micro_tokens`` tokens (and ``max_items`` items) per rank; an item longer
    than that has one to itself. Early ones are filled until compute saturates, the last is kept tiny (at
    most ``tail_share`` of a full one, if short items allow): nothing overlaps with the last backward
    pass. ``decoupled``: longest items first, the shortest at the tail. ``colocated``: longest-first zig-zag
    over the ranks, which evens out their loads, since all end a burst together. Deterministic.
    Raises ValueError for non-positive sizes.
    """
    if micro_tokens < 1 or ranks < 1 or (max_items is not None and max_items < 1):
        raise ValueError(
            f"micro_tokens = {micro_tokens}, ranks = {ranks}, max_items = {max_items}: must be at least 1"
        )
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {min(lengths)}")
    if mode not in ("decoupled", "colocated"):
        raise ValueError(f"mode {mode!r} is unknown (valid: decoupled, colocated)")
    longest = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    body, tail = _split_tail(longest, lengths, micro_tokens, ranks, max_items, tail_share)
    deal = _stream if mode == "decoupled" else _zigzag
    batches = deal(body, lengths, micro_tokens, ranks, max_items)
    if tail:
        batches.append(tuple(tuple(tail[rank::ranks]) for rank in range(ranks)))
    return batches


def _split_tail(
    longest: list[int],
    lengths: Sequence[int],
    micro_tokens: int,
    ranks: int,
    max_items: int | None,
    share: float,
) -> tuple[list[int], list[int]]:
    """The shortest item of each rank makes the tail, if there is more than one micro-batch's work."""
    per_rank = max_items if max_items is not None else len(longest)
    one_is_enough = sum(lengths) <= micro_tokens * ranks and len(longest) <= per_rank * ranks
    if one_is_enough or len(longest) <= ranks:
        return longest, []
    tail = [i for i in longest[-ranks:] if lengths[i] <= share * micro_tokens]
    return longest[: len(longest) - len(tail)], tail


def _stream(
    items: list[int], lengths: Sequence[int], micro_tokens: int, ranks: int, max_items: int | None
) -> list[Micro]:
    """In order: an item goes to the least loaded rank of the open micro-batch, else a new one opens."""
    batches: list[list[list[int]]] = []
    load: list[int] = []
    for item in items:
        room = [
            rank
            for rank in range(ranks)
            if batches
            and (
                not batches[-1][rank]
                or (
                    load[rank] + lengths[item] <= micro_tokens
                    and (max_items is None or len(batches[-1][rank]) < max_items)
                )
            )
        ]
        if not room:
            batches.append([[] for _ in range(ranks)])
            load = [0] * ranks
            room = list(range(ranks))
        rank = min(room, key=lambda r: (load[r], r))
        batches[-1][rank].append(item)
        load[rank] += lengths[item]
    return [tuple(tuple(part) for part in batch) for batch in batches]


def _zigzag(
    items: list[int], lengths: Sequence[int], micro_tokens: int, ranks: int, max_items: int | None
) -> list[Micro]:
    """Rank 0 1 2 2 1 0 0 1 2 ..., longest first; each rank then cuts its own list into micro-batches."""
    own: list[list[int]] = [[] for _ in range(ranks)]
    for number, item in enumerate(items):
        lap, at = divmod(number, ranks)
        own[at if lap % 2 == 0 else ranks - 1 - at].append(item)
    cut = [_cut(part, lengths, micro_tokens, max_items) for part in own]
    count = max((len(part) for part in cut), default=0)
    return [tuple(part[j] if j < len(part) else () for part in cut) for j in range(count)]


def _cut(
    items: list[int], lengths: Sequence[int], micro_tokens: int, max_items: int | None
) -> list[tuple[int, ...]]:
    parts: list[list[int]] = []
    load = 0
    for item in items:
        full = max_items is not None and parts and len(parts[-1]) >= max_items
        if not parts or full or load + lengths[item] > micro_tokens:
            parts.append([])
            load = 0
        parts[-1].append(item)
        load += lengths[item]
    return [tuple(part) for part in parts]
