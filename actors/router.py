"""Routing of calls to generators: a library in every env worker, no process of its own.

The controller's table says who generates; a table with an older epoch is refused. A trajectory
stays with the generator that holds its prefix, the first call of a trajectory goes where its group
is (members share their first prompt) unless that one is clearly busier than the least busy, and
everything else goes to the least busy; or, where generators admit by task (``gated``), to the one whose
ledger has most room. There a trajectory's end is told to its generator, and a request that has no place
yet while another generator has room may come back to be asked there.

Requests that come within a few milliseconds travel in one ``submit``, and one long poll per
generator collects the answers. Delivery is at least once: a request whose fate is unknown (the
handle raised, the answer is late, the generator left the table) is asked again under a new id, and
an answer to an id that nobody waits for is ignored.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from actors.gate import MOVED, NO_PLACE
from actors.lane import Lane, Lost
from actors.rollout import completion_fault
from cluster.affinity import place
from cluster.config import GeneratorConfig
from cluster.errors import BadRequest, EngineFailed, StaleEpoch
from cluster.messages import Table
from cluster.ports import Generator
from cluster.types import Completion, Request

T = TypeVar("T")

KV_KINDS = ("first_turn", "same_rank", "migrated", "post_sync")
_REMEMBERED = 65536  # sessions and groups whose place is kept
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0


@dataclass(slots=True)
class KvHit:
    """Prompt tokens of calls of one kind, and how many of them the prefix cache had."""

    calls: int = 0
    cached: int = 0
    prompt: int = 0


@dataclass(slots=True)
class RouterStats:
    """Totals since the start."""

    calls: int = 0
    submits: int = 0
    retries: int = 0
    no_place: int = 0  # answers that said to ask elsewhere or later
    malformed: int = 0
    stale_tables: int = 0
    kv_hit: dict[str, KvHit] = field(default_factory=lambda: {kind: KvHit() for kind in KV_KINDS})

    def totals(self) -> dict[str, float]:
        """Flat counters; the kind of a call follows the name after a dot."""
        flat: dict[str, float] = {
            "calls": self.calls,
            "submits": self.submits,
            "call_retries": self.retries,
            "no_place": self.no_place,
            "malformed_answers": self.malformed,
            "stale_tables": self.stale_tables,
        }
        for kind, hit in self.kv_hit.items():
            flat |= {f"kv_calls.{kind}": hit.calls, f"kv_cached.{kind}": hit.cached}
            flat[f"kv_prompt.{kind}"] = hit.prompt
        return flat


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a session's last call was answered."""

    generator: str
    version: int


class Router:
    """Implements ``Policy`` over many generators.

    ``caller`` names this worker at the generators (their mailbox key); ``connect`` gives the handle
    of a generator by name, and is asked anew when a name comes back to the table.
    """

    def __init__(
        self,
        caller: str,
        config: GeneratorConfig,
        connect: Callable[[str], Generator],
        window_s: float = 0.001,
        *,
        gated: bool = False,
    ) -> None:
        """``gated``: generators admit by task, so that a request may wait for a place as long again."""
        self.caller = caller
        self.config = config
        self.stats = RouterStats()
        self._connect = connect
        self._window_s = window_s
        self._gated = gated
        self._epoch = -1
        self._lanes: dict[str, Lane] = {}
        self._versions: dict[str, int] = {}
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._groups: OrderedDict[str, str] = OrderedDict()
        self._asked: OrderedDict[str, str] = OrderedDict()  # session -> generator that may know it (gated)
        self._changed = asyncio.Event()

    @property
    def epoch(self) -> int:
        """Epoch of the table in force, -1 before the first."""
        return self._epoch

    @property
    def versions(self) -> dict[str, int]:
        """Version of each generator according to the table in force."""
        return dict(self._versions)

    def set_table(self, table: Table) -> None:
        """Take a table. Raises StaleEpoch when it is older than the one in force.

        Requests at a generator that left are asked elsewhere; so are those at one that became
        unhealthy, if any other is healthy.
        """
        if table.epoch < self._epoch:
            self.stats.stale_tables += 1
            raise StaleEpoch(f"table of epoch {table.epoch} while {self._epoch} is in force")
        self._epoch = table.epoch
        rows = {row.name: row for row in table.generators}
        for name in [name for name in self._lanes if name not in rows]:
            self._lanes.pop(name).close(f"generator {name} left the table")
        for name, row in rows.items():
            if name not in self._lanes:
                self._lanes[name] = Lane(
                    name,
                    self.caller,
                    self._connect(name),
                    self._window_s,
                    self.stats,
                    partial(self._elsewhere, name),
                )
            lane = self._lanes[name]
            lane.healthy = row.healthy
            lane.report(row.free, row.report)
        self._versions = {name: row.version for name, row in rows.items()}
        healthy = any(lane.healthy for lane in self._lanes.values())
        for lane in self._lanes.values():
            if healthy and not lane.healthy:
                lane.drop(f"generator {lane.name} is unhealthy")
        self._wake()

    async def generate(self, request: Request) -> Completion:
        """Answer one request, trying up to ``max_retries`` times more after a failure.

        Raises BadRequest at once for what no generator can serve, EngineFailed after the retries or
        when no generator was healthy for ``request_timeout_s``. That there was no place in time is no
        failure: it is asked again until the caller gives up (a trajectory has its group's deadline).
        """
        self.stats.calls += 1
        cause = ""
        avoid: str | None = None
        failures = number = 0
        mobile = True
        began = time.monotonic()
        while True:
            lane = await self._choose(request, avoid, cause)
            try:
                completion = await lane.ask(
                    self._asking(request, number, lane, mobile, began),
                    self.config.request_timeout_s * (2 if self._gated else 1),
                )
            except Lost as error:
                cause = str(error)
            else:
                cause = self._judge(request, completion)
                if not cause:
                    self._account(request, completion, lane.name)
                    return replace(completion, id=request.id, generator=completion.generator or lane.name)
            number += 1
            avoid = lane.name
            if cause.startswith(NO_PLACE):
                self.stats.no_place += 1
                if cause == MOVED:
                    mobile = False  # once is enough
                else:
                    avoid = None
                continue
            failures += 1
            if failures > self.config.max_retries:
                raise EngineFailed(f"request {request.id} failed {failures} times, last: {cause}")
            self.stats.retries += 1
            await asyncio.sleep(min(_BACKOFF_S * 2 ** (failures - 1), _BACKOFF_MAX_S))

    def forget(self, session: str) -> None:
        """A trajectory ended: its place needs no memory, here and at its generator."""
        self._places.pop(session, None)
        self._release(session, self._asked.pop(session, None))

    async def aclose(self) -> None:
        """Stop all polling; open requests fail."""
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.close("the router was closed")
        await asyncio.gather(*(lane.wait_closed() for lane in lanes))

    def _judge(self, request: Request, completion: Completion) -> str:
        """Why an answer must be asked for again, "" if it is good. Raises BadRequest."""
        if completion.error:
            if not completion.retryable:
                raise BadRequest(f"request {request.id} was refused: {completion.error}")
            return completion.error
        fault = completion_fault(completion)
        if fault:
            self.stats.malformed += 1
        return fault

    def _asking(self, request: Request, number: int, lane: Lane, mobile: bool, began: float) -> Request:
        """The request as the lane gets it, under a name of its own when it is asked again."""
        if number:
            waited_s = time.monotonic() - began if self._gated else 0.0
            request = replace(request, id=f"{request.id}#{number}", waited_s=waited_s)
        if not self._gated or not request.session:
            return request
        before = self._asked.get(request.session)
        if before != lane.name:
            self._release(request.session, before)
            lane.room -= len(request.prompt) // 4 + request.sampling.max_tokens
        _remember(self._asked, request.session, lane.name)
        return replace(request, mobile=mobile)

    def _elsewhere(self, name: str) -> int:
        """Most tokens that another generator has room for."""
        now = time.monotonic()
        rooms = [lane.room for lane in self._lanes.values() if lane.name != name and lane.usable(now)]
        return max([0, *rooms])

    def _release(self, session: str, name: str | None) -> None:
        lane = self._lanes.get(name) if name is not None else None
        if lane is not None:
            lane.release(session)

    async def _choose(self, request: Request, avoid: str | None, cause: str) -> Lane:
        """A usable generator; waits for one at most ``request_timeout_s``."""
        deadline = time.monotonic() + self.config.request_timeout_s
        while True:
            now = time.monotonic()
            usable = [lane for lane in self._lanes.values() if lane.usable(now)]
            if usable:
                return self._prefer(request, [lane for lane in usable if lane.name != avoid] or usable)
            if now >= deadline:
                known = ", ".join(sorted(self._lanes)) or "none in the table"
                raise EngineFailed(
                    f"no healthy generator for {self.config.request_timeout_s:g} s ({known})"
                    + (f"; last failure: {cause}" if cause else "")
                )
            rests = [lane.suspect_until for lane in self._lanes.values() if lane.healthy]
            await self._wait_change(max(0.001, min([deadline, *rests]) - now))

    def _prefer(self, request: Request, usable: list[Lane]) -> Lane:
        """Where the session was, else as cluster/affinity.py says; remembers where the group is."""
        session = request.session
        names = [lane.name for lane in usable]
        before = self._places.get(session)
        if before is not None and before.generator in names:
            return usable[names.index(before.generator)]
        usable = sorted(usable, key=lambda lane: lane.name)
        group = request.group or session.rpartition(".")[0] or session
        home = self._groups.get(group, "")
        chosen = usable[
            place(
                [lane.load for lane in usable],
                [lane.room for lane in usable] if self._gated else None,
                len(request.prompt) // 4 + request.sampling.max_tokens,
                next((i for i, lane in enumerate(usable) if lane.name == home), -1),
            )
        ]
        if session:
            _remember(self._groups, group, chosen.name)
        return chosen

    def _account(self, request: Request, completion: Completion, name: str) -> None:
        """Count prefix hits by kind, and remember where the session is."""
        place = self._places.get(request.session)
        if place is None:
            kind = "first_turn"
        elif place.generator != name:
            kind = "migrated"
        elif completion.versions[0].version != place.version:
            kind = "post_sync"
        else:
            kind = "same_rank"
        hit = self.stats.kv_hit[kind]
        hit.calls += 1
        hit.cached += completion.cached_tokens
        hit.prompt += len(request.prompt) // 4
        if request.session:
            _remember(self._places, request.session, _Place(name, completion.versions[-1].version))

    def _wake(self) -> None:
        """Wake everyone who waits for a generator, now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return  # the caller looks again and knows its own deadline


def _remember(memory: OrderedDict[str, T], key: str, value: T) -> None:
    """Set a key, forgetting the oldest beyond the bound."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
