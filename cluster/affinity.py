"""Where a turn without a prefix of its own is asked for. Pure; used by the live router and the simulator.

The least busy generator that has room for the task: room decides only where memory is short, because tasks
sent to whoever has most of it pile up there until the next report. A group's members share their first
prompt, so they go where the group is while that is not clearly busier and has room too.
"""

from collections.abc import Sequence

GROUP_SLACK = 4
"""Open requests by which a group's generator may be busier than the best other one."""


def place(loads: Sequence[int], rooms: Sequence[int] | None, need: int, home: int = -1) -> int:
    """Index of the generator to ask.

    ``loads``: open requests of each; ``rooms``: tokens that its ledger could still promise (None: it keeps
    none); ``need``: tokens of the turn; ``home``: where the group is, -1 for nowhere. If the turn fits
    nowhere, whoever has least to do will have it. Raises ValueError if there is no generator.
    """
    at = loads.index(min(loads))
    scarce = rooms is not None and rooms[at] < need and max(rooms) >= need
    if scarce and rooms is not None:
        at = min((i for i, room in enumerate(rooms) if room >= need), key=loads.__getitem__)
    if home < 0 or loads[home] > loads[at] + GROUP_SLACK:
        return at
    if rooms is not None and rooms[home] < need <= rooms[at]:
        return at
    return home
