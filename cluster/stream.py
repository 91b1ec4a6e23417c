"""The readiness queue in Redis or Valkey: durable facts, moved only by atomic Lua scripts.

One hash per trajectory, one per group, streams that carry ids only, counters moved by the same
script that moves the state (``cluster/lua/common.lua`` lists every key). Every order is idempotent,
so a lost reply is answered by sending the order again, and a restarted server is told again what it may have
forgotten (``cluster/link.py``).
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cluster import assemble, codec
from cluster.link import CONSUMERS, SCRIPTS, Command, Link
from cluster.types import End, Group, Ledger, Order, Segment, StepRecord

BLOCK_S = 1.0  # one blocking read waits at most this long, far below the socket timeout
CHUNK_RECORDS = 256  # records in one append call, so that no script holds the server for long
CHUNK_BYTES = 4 << 20


class RedisQueue:
    """``cluster.ports.Queue`` on a Redis 7 or Valkey server.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` (``valkey://`` is accepted). All keys start with
    ``{prefix:run}:``. Every call raises StreamFailed (naming the URL without its password) when the
    server gives no answer for ``deadline_s`` seconds, ``first_s`` if it never did; KeyError for a
    group or attempt that was never ordered; ValueError for an order that contradicts the state.
    An object belongs to one event loop. With ``notices``, readers of ``news`` hear what it records.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "springtide",
        run: str = "run",
        *,
        notices: bool = False,
        replay_s: float = 3.0,
        deadline_s: float = 60.0,
        first_s: float = 4.0,
    ) -> None:
        self._base = f"{{{prefix}:{run}}}:"
        self._notices = assemble.NOTICES if notices else 0
        self._link = Link(url, self._base, replay_s, deadline_s, first_s)
        self._block_s = min(BLOCK_S, deadline_s / 2, first_s / 2)  # waiting is not a lost server
        self._handed: set[str] = set()  # claimed groups that this object gave to its caller
        self._certain: set[str] = set()  # consumers whose every delivery reached this object

    async def connect(self) -> None:
        """Fail early, if the server cannot be used."""
        await self._link.call(lambda client: client.execute_command("PING"))

    def _script(self, name: str, *arguments: Any) -> Command:
        return ("EVALSHA", SCRIPTS[name][0], 1, self._base, *arguments)

    async def _order(self, name: str, *arguments: Any) -> Any:
        return await self._link.order(*self._script(name, *arguments))

    async def _read(self, *command: Any) -> Any:
        return await self._link.call(lambda client: client.execute_command(*command))

    async def admit(self, order: Order) -> bool:
        """Enter a group and its members; ValueError if a member belongs to another group."""
        return await self._admission("admit", order)

    async def reorder(self, order: Order) -> bool:
        """Start a newer attempt of an open group; ValueError if its members changed."""
        return await self._admission("reorder", order)

    async def _admission(self, mode: str, order: Order) -> bool:
        assemble.check_order(order)
        raw = assemble.encode_clean(order)
        return bool(await self._order("admit", mode, order.group, order.attempt, raw, *order.members))

    async def orders(self) -> list[Order]:
        """Latest orders of the open groups, by order of admission."""
        groups = await self._read("ZRANGE", self._base + "active", 0, -1)
        keys = [f"{self._base}group:{name.decode()}" for name in groups]
        rows = await self._pipelined([("HMGET", key, "state", "order") for key in keys])
        return [
            assemble.decode_named(raw, Order, f"{key} order")
            for key, (state, raw) in zip(keys, rows, strict=True)
            if state == b"open"
        ]

    async def _pipelined(self, commands: Sequence[Command], atomic: bool = False) -> list[Any]:
        if not commands:
            return []

        async def send(client: Any) -> list[Any]:
            async with client.pipeline(transaction=atomic) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                rows: list[Any] = await pipeline.execute()
            return rows

        return await self._link.call(send)

    async def append(self, segments: Sequence[Segment]) -> int:
        """Store segments. What can be written is, before KeyError (order unknown) or ValueError."""
        return await self._store(segments)

    async def news(self, after: str, count: int, wait_s: float) -> tuple[str, list[Segment | End]]:
        """Segments and ends in the order they were recorded; see ``cluster.ports.Queue``.

        Raises ValueError naming the field of one that is damaged.
        """
        stream = self._base + "news"
        deadline = time.monotonic() + wait_s
        while True:
            left = deadline - time.monotonic()
            block = ("BLOCK", max(1, int(1000 * min(left, self._block_s)))) if left > 0 else ()
            reply = await self._read("XREAD", "COUNT", count, *block, "STREAMS", stream, after or "0")
            if reply:
                entries = reply[0][1]
                named = [(f[b"trajectory"].decode(), f[b"field"].decode()) for _, f in entries]
                return entries[-1][0].decode(), await self._noticed(named)
            if left <= 0:
                return after, []

    async def _noticed(self, notices: Sequence[tuple[str, str]]) -> list[Segment | End]:
        """The records behind notices; what was discarded since is left out."""
        keys = [f"{self._base}trajectory:{name}" for name, _ in notices]
        fields = [field for _, field in notices]
        rows = await self._pipelined(
            [("HMGET", key, "state", field) for key, field in zip(keys, fields, strict=True)]
        )
        found = (
            assemble.told(field, (state or b"").decode(), raw, f"{key} {field}")
            for key, field, (state, raw) in zip(keys, fields, rows, strict=True)
        )
        return [record for record in found if record is not None]

    async def end(self, ends: Sequence[End]) -> int:
        """Record ends. What can be written is, before KeyError (order unknown) or ValueError."""
        return await self._store(ends)

    async def _store(self, records: Sequence[Segment | End]) -> int:
        good, bad = assemble.encode_all(records)
        new = 0
        unordered: set[bytes] = set()
        for chunk in _chunks(good):
            count, missing = await self._store_chunk(chunk)
            new += count
            unordered.update(missing)
        if unordered:
            raise KeyError(f"never ordered: group {b', '.join(sorted(unordered)).decode()}")
        if bad:
            raise ValueError(f"{len(bad)} of {len(records)} records cannot be written: {bad[0]}")
        return new

    async def _store_chunk(self, chunk: list[Any]) -> tuple[int, list[bytes]]:
        new = 0
        while True:
            count, missing = await self._order("append", self._notices, *chunk)
            new += count
            if not missing or not self._link.settling:
                return new, missing
            await asyncio.sleep(0.1)  # the controller is replaying the admission

    async def ready(self, group: str, attempt: int, min_members: int) -> bool:
        """Mark an open group ready; ValueError while a member has not ended."""
        return bool(await self._order("ready", group, attempt, min_members))

    async def claim(self, consumer: str, count: int, wait_s: float) -> list[str]:
        """Take ready groups. What a lost reply or an earlier process took comes first."""
        if count < 1:
            raise ValueError(f"count = {count} must be at least 1")
        if consumer not in self._certain:
            held = await self._deliver(consumer, "0", ())
            missed = [group for group in held if group not in self._handed]
            if missed:
                if len(missed) <= count:
                    self._certain.add(consumer)
                return self._hand(missed[:count])
        deadline = time.monotonic() + wait_s
        while True:
            left = deadline - time.monotonic()
            block = ("BLOCK", max(1, int(1000 * min(left, self._block_s)))) if left > 0 else ()
            self._certain.discard(consumer)  # until the reply is here
            groups = await self._deliver(consumer, ">", ("COUNT", count, *block))
            self._certain.add(consumer)
            groups = [group for group in groups if group not in self._handed]  # delivered before a restart
            if groups or left <= 0:
                return self._hand(groups)

    async def _deliver(self, consumer: str, after: str, options: Command) -> list[str]:
        stream = self._base + "ready"
        command = ("XREADGROUP", "GROUP", CONSUMERS, consumer, *options, "STREAMS", stream, after)
        reply = await self._read(*command)
        entries = [entry[0] for entry in reply[0][1]] if reply else []
        if not entries:
            return []
        return [name.decode() for name in await self._read(*self._script("take", *entries))]

    def _hand(self, groups: list[str]) -> list[str]:
        self._handed.update(groups)
        return groups

    async def reclaim(self, consumer: str) -> list[str]:
        """Take over all claimed groups, those of this object too: for a consumer that starts."""
        groups = await self._read(*self._script("reclaim", consumer))
        self._certain.add(consumer)
        self._handed.clear()
        return self._hand([name.decode() for name in groups])

    async def load(self, groups: Sequence[str]) -> list[Group]:
        """Read groups whole; KeyError if open or payload is gone, ValueError naming the key if damaged.

        A restarted server may have to be told again by other writers what a claimed group consists of.
        """
        deadline = time.monotonic() + self._link.deadline_s
        while True:
            try:
                return await self._load(groups)
            except KeyError:
                if not self._link.settling or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _load(self, groups: Sequence[str]) -> list[Group]:
        keys = [f"{self._base}group:{name}" for name in groups]
        raws = await self._pipelined([("HGET", key, "order") for key in keys])
        orders: list[Order] = []
        for name, key, raw in zip(groups, keys, raws, strict=True):
            if raw is None:
                raise KeyError(f"group {name}: its payload is gone")
            orders.append(assemble.decode_named(raw, Order, f"{key} order"))
        where = self._base + "trajectory:"
        # With the payload, on one connection: a server restarted in between may not know a group as ready.
        heads: list[Command] = [("HMGET", key, "state", "attempt") for key in keys]
        ids = [member for order in orders for member in order.members]
        rows = await self._pipelined(heads + [("HGETALL", where + member) for member in ids])
        fields = iter(rows[len(heads) :])
        found = []
        for order, (state, attempt) in zip(orders, rows, strict=False):
            if state is None or state == b"open":
                raise KeyError(f"group {order.group}: " + ("it is open" if state else "its payload is gone"))
            members = {member: _text_keys(next(fields)) for member in order.members}
            found.append(assemble.build_group(order, int(attempt), members, where))
        return found

    async def close(self, groups: Sequence[str], reason: str) -> int:
        """Drop groups for ``reason`` and delete their payload."""
        moved = await self._order("discard", "dropped", codec.clean(reason), *groups)
        self._handed.difference_update(groups)
        return int(moved)

    async def abandon(self, group: str, reason: str) -> int:
        """Give an open group up; it is closed and its payload deleted."""
        return int(await self._order("discard", "abandoned", codec.clean(reason), group))

    async def plan(self, record: StepRecord) -> None:
        """Write the log entry; ValueError if the step was committed with other groups."""
        assemble.check_step(record)
        raw = codec.encode(_uncommitted(record))
        committed = await self._order("step", "plan", record.step, raw)
        if committed is not None:
            assemble.check_replanned(record, codec.decode(committed, StepRecord))

    async def commit(self, record: StepRecord) -> bool:
        """Trained, acknowledged, closed, version = step. ValueError if one was trained before.

        Other pending members of the groups become dropped(excluded). False if the step was
        committed already; after a rewind the version then still follows the re-executed steps.
        """
        assemble.check_step(record)
        names = (len(record.groups), *record.groups, *record.trajectories)
        raw = codec.encode(_uncommitted(record))
        done = await self._order("step", "commit", record.step, raw, *names)
        self._handed.difference_update(record.groups)
        return bool(done)

    async def steps(self, after: int) -> list[StepRecord]:
        """Step log entries beyond ``after``, in order."""
        base = self._base
        rows, committed = await self._pipelined(
            [("HGETALL", base + "steps"), ("SMEMBERS", base + "committed")], atomic=True
        )
        done = {int(step) for step in committed}
        fields = sorted((int(step), raw) for step, raw in _pairs(rows) if int(step) > after)
        records = [assemble.decode_named(raw, StepRecord, f"{base}steps {step}") for step, raw in fields]
        return [msgspec.structs.replace(record, committed=record.step in done) for record in records]

    async def release(self, upto: int) -> int:
        """Delete the payload of committed steps <= ``upto``; their counts and log entries stay."""
        before = int(await self._read("HGET", self._base + "stats", "released") or 0)
        records = [r for r in await self.steps(before) if r.step <= upto and r.committed]
        groups = [group for record in records for group in record.groups]
        if not groups:
            return 0
        return int(await self._order("release", max(r.step for r in records), *groups))

    async def rewind(self, step: int) -> None:
        """Version back to ``step``. States and ledger stay: later steps are executed again."""
        await self._link.order("HSET", self._base + "facts", assemble.RESERVED_FACT, step)

    async def ledger(self) -> Ledger:
        """The counters."""
        fields = _text_keys(await self._read("HGETALL", self._base + "ledger"))
        return assemble.build_ledger({name: int(count) for name, count in fields.items()})

    async def audit(self) -> Ledger:
        """Counted from each live trajectory's own state and from the sets of those deleted."""
        flat = await self._read(*self._script("audit"))
        return assemble.build_ledger({name.decode(): int(count) for name, count in _pairs(flat)})

    async def groups(self) -> dict[str, int]:
        """Group counts: open, ready, claimed, trained, lost; moved with the states."""
        fields = _text_keys(await self._read("HGETALL", self._base + "tally"))
        return {state: int(fields.get(state, 0)) for state in assemble.GROUP_STATES}

    async def depth(self) -> tuple[int, float]:
        """(ready and unclaimed groups, age of the oldest in seconds by the server's clock)."""
        waiting = self._base + "waiting"
        commands: list[Command] = [("ZCARD", waiting), ("ZRANGE", waiting, 0, 0, "WITHSCORES"), ("TIME",)]
        size, oldest, now = await self._pipelined(commands, atomic=True)
        if not oldest:
            return 0, 0.0
        score = float(next(iter(_pairs(oldest)))[1])
        return int(size), max(0.0, int(now[0]) + int(now[1]) / 1e6 - score / 1000)

    async def lost_entries(self) -> int:
        """Stream entries that vanished unacknowledged (never, unless someone trims the stream)."""
        return int(await self._read("HGET", self._base + "stats", "lost_entries") or 0)

    async def get(self, key: str) -> bytes | None:
        """Read a fact; ``version`` is the last committed step, in decimal."""
        value: bytes | None = await self._read("HGET", self._base + "facts", key)
        return value

    async def put(self, key: str, value: bytes) -> None:
        """Write a fact; ValueError for ``version``."""
        assemble.check_fact(key)
        await self._link.order("HSET", self._base + "facts", key, value)

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._link.client.aclose()


def _chunks(records: list[tuple[Segment | End, bytes]]) -> Iterator[list[Any]]:
    """Arguments of ``append.lua``, 7 per record, bounded in number and bytes."""
    chunk: list[Any] = []
    size = 0
    for record, raw in records:
        state, reason = assemble.final_state(record)
        field = assemble.field_of(record)
        chunk += (record.group, record.trajectory, record.attempt, field, raw, state, reason)
        size += len(raw)
        if len(chunk) >= 7 * CHUNK_RECORDS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _uncommitted(record: StepRecord) -> StepRecord:
    return msgspec.structs.replace(record, committed=False)


def _pairs(reply: Any) -> Iterator[tuple[Any, Any]]:
    """A flat or mapped reply as pairs: redis-py parses some commands, not others."""
    if isinstance(reply, dict):
        return iter(reply.items())
    if reply and isinstance(reply[0], tuple | list):
        return iter([(item[0], item[1]) for item in reply])
    return iter(zip(reply[::2], reply[1::2], strict=True))


def _text_keys(reply: Any) -> dict[str, bytes]:
    return {name.decode(): value for name, value in _pairs(reply)}
