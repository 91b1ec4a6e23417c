"""The readiness queue in plain Python: for tests, the simulator and runs without a server.

Same meaning as ``cluster.stream.RedisQueue``, including the bytes (records pass through the codec);
nothing survives the process. One event loop; every change happens between two awaits.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cluster import assemble, codec
from cluster.types import End, Group, Ledger, Order, Segment, StepRecord


@dataclass
class _Member:
    group: str
    state: str = "pending"
    reason: str = ""
    fields: dict[str, bytes] = field(default_factory=dict)


@dataclass
class _Group:
    order: Order
    state: str = ""  # one of assemble.GROUP_STATES
    was_ready: bool = False
    since: float = 0.0  # when it became ready, monotonic seconds


def _name(state: str, reason: str) -> str:
    return state if state in ("pending", "trained") else f"{state}:{reason}"


class MemoryQueue:
    """``cluster.ports.Queue`` without a server. Raises as ``RedisQueue`` does, but StreamFailed."""

    def __init__(self, notices: bool = False) -> None:
        self._groups: dict[str, _Group | None] = {}  # None: payload deleted
        self._members: dict[str, _Member] = {}
        self._gone: dict[str, str] = {}  # deleted trajectory -> name of its final state
        self._counts: Counter[str] = Counter()  # the ledger
        self._tally: Counter[str] = Counter()  # groups by state
        self._ready: list[str] = []  # ready groups, oldest first
        self._claimed: list[str] = []  # claimed groups, oldest first
        self._arrival = asyncio.Condition()
        self._notices: deque[tuple[int, str, str]] = deque(maxlen=assemble.NOTICES if notices else 0)
        self._noticed = 0
        self._news = asyncio.Condition()
        self._steps: dict[int, StepRecord] = {}
        self._committed: set[int] = set()
        self._released = 0
        self._facts: dict[str, bytes] = {}

    async def connect(self) -> None:
        """Nothing to connect to."""

    def _known(self, group: str, attempt: int = 0) -> _Group | None:
        if group not in self._groups:
            raise KeyError(f"group {group} attempt {attempt} was never ordered")
        return self._groups[group]

    def _move(self, name: str, state: str, reason: str) -> int:
        member = self._members[name]
        if member.state != "pending":
            return 0
        member.state, member.reason = state, reason
        self._counts["pending"] -= 1
        self._counts[_name(state, reason)] += 1
        return 1

    def _enter(self, held: _Group, state: str) -> None:
        self._tally[held.state] -= 1
        self._tally[state] += 1
        held.state = state

    def _acknowledge(self, group: str) -> None:
        for names in (self._ready, self._claimed):
            if group in names:
                names.remove(group)

    def _erase(self, group: str) -> None:
        held = self._groups[group]
        assert held is not None
        for name in held.order.members:
            member = self._members.pop(name)
            self._gone[name] = _name(member.state, member.reason)
        self._groups[group] = None

    def _discard(self, group: str, state: str, reason: str) -> int:
        held = self._groups[group]
        assert held is not None
        moved = sum(self._move(name, state, reason) for name in held.order.members)
        self._acknowledge(group)
        self._enter(held, "lost")
        self._erase(group)
        return moved

    async def admit(self, order: Order) -> bool:
        """Enter a group and its members; ValueError if a member belongs to another group."""
        assemble.check_order(order)
        order = codec.decode(assemble.encode_clean(order), Order)
        if order.group in self._groups:
            return False
        for name in order.members:
            if name in self._members or name in self._gone:
                raise ValueError(f"member {name} of group {order.group} belongs to another group")
        self._groups[order.group] = held = _Group(order)
        self._enter(held, "open")
        for name in order.members:
            self._members[name] = _Member(order.group)
        self._counts["admitted"] += len(order.members)
        self._counts["pending"] += len(order.members)
        return True

    async def reorder(self, order: Order) -> bool:
        """Start a newer attempt of an open group; ValueError if its members changed."""
        assemble.check_order(order)
        order = codec.decode(assemble.encode_clean(order), Order)
        held = self._known(order.group, order.attempt)
        if held is None or held.state != "open" or order.attempt <= held.order.attempt:
            return False
        if held.order.members != order.members:
            raise ValueError(
                f"attempt {order.attempt} of group {order.group} names other members than before"
            )
        held.order = order
        for name in order.members:
            if self._members[name].state == "pending":
                self._members[name].fields.clear()
        return True

    async def orders(self) -> list[Order]:
        """Latest orders of the open groups, by order of admission."""
        return [g.order for g in self._groups.values() if g is not None and g.state == "open"]

    async def append(self, segments: Sequence[Segment]) -> int:
        """Store segments. What can be written is, before KeyError (order unknown) or ValueError."""
        return await self._store(segments)

    async def news(self, after: str, count: int, wait_s: float) -> tuple[str, list[Segment | End]]:
        """Segments and ends in the order they were recorded; see ``cluster.ports.Queue``."""
        place = int(after or 0)
        try:
            async with asyncio.timeout(max(0.0, wait_s)), self._news:
                await self._news.wait_for(lambda: self._notices and self._notices[-1][0] > place)
        except TimeoutError:
            pass  # an empty answer is an answer
        notices = [notice for notice in self._notices if notice[0] > place][:count]
        found = []
        for _, name, part in notices:
            member = self._members.get(name)
            if member is not None:
                where = f"trajectory:{name} {part}"
                found.append(assemble.told(part, member.state, member.fields.get(part), where))
        reached = str(notices[-1][0]) if notices else after
        return reached, [record for record in found if record is not None]

    async def end(self, ends: Sequence[End]) -> int:
        """Record ends. What can be written is, before KeyError (order unknown) or ValueError."""
        return await self._store(ends)

    async def _store(self, records: Sequence[Segment | End]) -> int:
        good, bad = assemble.encode_all(records)
        new = 0
        unordered: set[str] = set()
        for record, raw in good:
            held = self._groups.get(record.group)
            if record.group not in self._groups or (held and record.attempt > held.order.attempt):
                unordered.add(f"{record.group} attempt {record.attempt}")
            elif held is not None and record.attempt == held.order.attempt:
                new += self._store_one(record, raw)
        async with self._news:
            self._news.notify_all()
        if unordered:
            raise KeyError(f"never ordered: group {', '.join(sorted(unordered))}")
        if bad:
            raise ValueError(f"{len(bad)} of {len(records)} records cannot be written: {bad[0]}")
        return new

    def _store_one(self, record: Segment | End, raw: bytes) -> int:
        member = self._members.get(record.trajectory)
        name = assemble.field_of(record)
        if member is None or member.group != record.group or member.state != "pending":
            return 0
        if name in member.fields:
            return 0
        member.fields[name] = raw
        state, reason = assemble.final_state(record)
        if state:
            self._move(record.trajectory, state, reason)
            member.fields = {name: raw}  # nobody will train on its turns
        self._noticed += 1
        self._notices.append((self._noticed, record.trajectory, name))
        return 1

    async def ready(self, group: str, attempt: int, min_members: int) -> bool:
        """Mark an open group ready; ValueError while a member has not ended."""
        held = self._known(group, attempt)
        if held is None or held.state != "open":
            return held is not None and held.was_ready
        if attempt > held.order.attempt:
            raise KeyError(f"group {group} attempt {attempt} was never ordered")
        if attempt < held.order.attempt:
            return False
        valid = 0
        for name in held.order.members:
            if self._members[name].state == "pending":
                if f"end:{attempt}" not in self._members[name].fields:
                    raise ValueError(f"member {name} of group {group} has not ended")
                valid += 1
        if valid < min_members:
            self._discard(group, "dropped", "too_few_members")
            return False
        self._enter(held, "ready")
        held.was_ready, held.since = True, time.monotonic()
        self._ready.append(group)
        async with self._arrival:
            self._arrival.notify_all()
        return True

    async def claim(self, consumer: str, count: int, wait_s: float) -> list[str]:
        """Take ready groups, oldest first."""
        if count < 1:
            raise ValueError(f"count = {count} must be at least 1")
        try:
            async with asyncio.timeout(max(0.0, wait_s)), self._arrival:
                await self._arrival.wait_for(lambda: self._ready)
        except TimeoutError:
            pass  # an empty answer is an answer
        taken, self._ready = self._ready[:count], self._ready[count:]
        for name in taken:
            held = self._groups[name]
            assert held is not None
            self._enter(held, "claimed")
        self._claimed += taken
        return taken

    async def reclaim(self, consumer: str) -> list[str]:
        """All claimed groups, oldest first: for a consumer that starts."""
        return list(self._claimed)

    async def load(self, groups: Sequence[str]) -> list[Group]:
        """Read groups whole; KeyError if open or payload is gone, ValueError naming a damaged member."""
        found = []
        for name in groups:
            held = self._groups.get(name)
            if held is None or held.state == "open":
                raise KeyError(f"group {name}: " + ("it is open" if held else "its payload is gone"))
            members = {
                m: {"state": self._members[m].state.encode(), **self._members[m].fields}
                for m in held.order.members
            }
            found.append(assemble.build_group(held.order, held.order.attempt, members))
        return found

    async def close(self, groups: Sequence[str], reason: str) -> int:
        """Drop groups for ``reason`` and delete their payload."""
        return self._give_up(groups, "dropped", reason)

    async def abandon(self, group: str, reason: str) -> int:
        """Give an open group up; it is closed and its payload deleted."""
        return self._give_up([group], "abandoned", reason)

    def _give_up(self, groups: Sequence[str], state: str, reason: str) -> int:
        for name in groups:
            self._known(name)
        moved = 0
        for name in groups:
            held = self._groups[name]
            if held is None or held.state == "trained":
                continue
            if state == "dropped" or held.state == "open":
                moved += self._discard(name, state, codec.clean(reason))
        return moved

    async def plan(self, record: StepRecord) -> None:
        """Write the log entry; ValueError if the step was committed with other groups."""
        assemble.check_step(record)
        if record.step in self._committed:
            assemble.check_replanned(record, self._steps[record.step])
        else:
            self._steps[record.step] = msgspec.structs.replace(record, committed=False)

    async def commit(self, record: StepRecord) -> bool:
        """Trained, acknowledged, closed, version = step. ValueError if one was trained before.

        Other pending members of the groups become dropped(excluded). False if the step was
        committed already; after a rewind the version then still follows the re-executed steps.
        """
        assemble.check_step(record)
        if record.step in self._committed:
            if int(self._facts[assemble.RESERVED_FACT]) == record.step - 1:
                self._facts[assemble.RESERVED_FACT] = str(record.step).encode()
            return False
        held = {name: group for name in record.groups if (group := self._known(name)) is not None}
        inside = {name for group in held.values() for name in group.order.members}
        for name in record.trajectories:
            state = self._members[name].state if name in self._members else self._gone.get(name, "")
            if state == "trained":
                raise ValueError(f"trajectory {name} of step {record.step} was trained by an earlier step")
            if not state or (state == "pending" and name not in inside):
                raise ValueError(f"trajectory {name} of step {record.step} is in none of its groups")
        for name in record.trajectories:
            if name in self._members:
                self._move(name, "trained", "")
        for name, group in held.items():
            for member in group.order.members:
                self._move(member, "dropped", "excluded")
            self._acknowledge(name)
            self._enter(group, "trained")
        self._steps[record.step] = msgspec.structs.replace(record, committed=False)
        self._committed.add(record.step)
        self._facts[assemble.RESERVED_FACT] = str(record.step).encode()
        return True

    async def steps(self, after: int) -> list[StepRecord]:
        """Step log entries beyond ``after``, in order."""
        return [
            msgspec.structs.replace(self._steps[step], committed=step in self._committed)
            for step in sorted(self._steps)
            if step > after
        ]

    async def release(self, upto: int) -> int:
        """Delete the payload of committed steps <= ``upto``; their counts and log entries stay."""
        records = [r for r in await self.steps(self._released) if r.step <= upto and r.committed]
        deleted = 0
        for name in [group for record in records for group in record.groups]:
            held = self._groups[name]
            if held is not None and held.state == "trained":
                self._erase(name)
                deleted += 1
        self._released = max([self._released, *(r.step for r in records)])
        return deleted

    async def rewind(self, step: int) -> None:
        """Version back to ``step``. States and ledger stay: later steps are executed again."""
        self._facts[assemble.RESERVED_FACT] = str(step).encode()

    async def ledger(self) -> Ledger:
        """The counters."""
        return assemble.build_ledger(self._counts)

    async def audit(self) -> Ledger:
        """Counted from each live trajectory's own state and from those deleted."""
        names = [_name(m.state, m.reason) for m in self._members.values()] + list(self._gone.values())
        return assemble.build_ledger({"admitted": len(names), **Counter(names)})

    async def groups(self) -> dict[str, int]:
        """Group counts: open, ready, claimed, trained, lost."""
        return {state: self._tally[state] for state in assemble.GROUP_STATES}

    async def depth(self) -> tuple[int, float]:
        """(ready and unclaimed groups, age of the oldest in seconds)."""
        if not self._ready:
            return 0, 0.0
        oldest = self._groups[self._ready[0]]
        assert oldest is not None
        return len(self._ready), time.monotonic() - oldest.since

    async def get(self, key: str) -> bytes | None:
        """Read a fact; ``version`` is the last committed step, in decimal."""
        return self._facts.get(key)

    async def put(self, key: str, value: bytes) -> None:
        """Write a fact; ValueError for ``version``."""
        assemble.check_fact(key)
        self._facts[key] = bytes(value)

    async def aclose(self) -> None:
        """Nothing to let go of."""
