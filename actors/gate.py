"""The gate before an engine: requests enter when admission (cluster/admission.py) gives their task a place.

::

    submit --> [open] --ask--> Admission --decide--> engine.submit --> engine.collect --> [box] --> collect
                 |                ^  ^                                      |
                 |   pressure ----+  +---- turn ended ----------------------+
                 +-- deadline, moved, engine dead: answered as retryable

A thin shell: it owns the ``Admission`` of one engine, tells it what happens and does what it decides. A
session (trajectory) is a task; a request without one is a task of a single turn. All waits have deadlines: a
request that got no place within ``request_timeout_s`` is answered with an error that says so, and the
engine bounds what has entered. With policy "request" everything enters at once.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from actors.engine_like import EngineLike
from actors.mailbox import Mailboxes
from actors.pending import refused
from cluster.admission import PREFILL_TOK_S, Admission, Figures, Limits
from cluster.config import AdmissionConfig
from cluster.messages import GeneratorHealth
from cluster.types import Completion, Request, Weights

_log = logging.getLogger(__name__)

NO_PLACE = "NoPlace: "  # how answers begin that only say "not yet": asking again is no failure
MOVED = NO_PLACE + "another generator has room"
_POLL_S = 2.0  # one long poll at the engine
_WATCH_S = 0.25  # how often deadlines are looked for
_MOVE_S = 1.0  # shortest wait after which a task may be better off elsewhere


class _Open:
    """A request that has not been answered."""

    __slots__ = ("caller", "deadline", "entered", "request", "since", "task")

    def __init__(self, caller: str, request: Request, since: float, deadline: float) -> None:
        self.caller = caller
        self.request = request
        self.since = since
        self.deadline = deadline  # of the wait for a place
        self.entered = False  # the engine has it, or is about to
        self.task = request.session or f"{caller}/{request.id}"


class Gate:
    """``submit``, ``collect``, ``cancel`` as the engine's own, with places in between."""

    def __init__(
        self,
        engine: EngineLike,
        config: AdmissionConfig,
        timeout_s: float,
        *,
        prefill_tok_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout_s`` bounds the wait for a place. ``prefill_tok_s`` is read once the engine runs."""
        self.engine = engine
        self.admission: Admission | None = None
        self._config = config
        self._timeout_s = timeout_s
        self._prefill_tok_s = prefill_tok_s
        self._clock = clock
        self._boxes = Mailboxes(keep_s=max(600.0, 2 * timeout_s), clock=clock)
        self._open: dict[tuple[str, str], _Open] = {}
        self._by_task: dict[str, list[_Open]] = {}
        self._homes: dict[str, set[str]] = {}  # caller -> sessions that it plays
        self._leaving: set[str] = set()  # released while a request of theirs was open
        self._entered: Counter[str] = Counter()  # requests that the engine has, by caller
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._starved_s = 0.0
        self._idle_since: float | None = None
        self.moved = 0  # requests sent elsewhere

    # -- life -------------------------------------------------------------------------------

    async def start(self, version: int = 0) -> None:
        """Start the engine and open the gate. Raises what ``Engine.start`` raises."""
        await self.engine.start(version)
        self.open()

    def open(self) -> None:
        """Begin to admit: the engine has started and knows its memory."""
        capacity, policy = self.engine.capacity_tokens, self._config.policy
        if policy == "task" and capacity < 1:
            _log.warning("%s does not tell its KV capacity: every request enters at once", self.engine.name)
            policy = "request"
        rate = self._prefill_tok_s() if self._prefill_tok_s is not None else 0.0
        limits = Limits(
            capacity_tokens=capacity,
            headroom=self._config.headroom,
            max_tasks=self._config.max_tasks,
            diversity=self._config.diversity,
            prefill_tok_s=rate if rate > 0.0 else PREFILL_TOK_S,
            context=self._config.context,
            policy=policy,
        )
        self.admission = Admission(limits)
        self._idle_since = self._clock()
        self._spawn(self._watch(), "watch")
        self._spawn(self._mourn(), "mourn")

    async def close(self) -> None:
        """Close the engine; whoever waits at the gate is answered as retryable."""
        await self.engine.close()
        self._refuse_waiting("closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    # -- requests ---------------------------------------------------------------------------

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """Queue requests; each is answered in ``collect``. One that is outstanding already is ignored."""
        admission, now = self.admission, self._clock()
        if admission is None or not self.engine.healthy:
            for request in requests:
                error = f"EngineFailed: {self.engine.name} is not running"
                self._boxes.put(caller, refused(request, error, self.engine.name, retryable=True))
            return
        self._boxes.touch(caller)
        extra: list[_Open] = []
        for request in requests:
            if (caller, request.id) in self._open:
                continue
            entry = _Open(caller, request, now, now + self._timeout_s)
            self._open[caller, request.id] = entry
            others = self._by_task.setdefault(entry.task, [])
            others.append(entry)
            if request.session and admission.limits.policy != "request":
                self._homes.setdefault(caller, set()).add(request.session)
            if any(other.entered for other in others):
                self._admitted(entry)  # the task is in a turn already (asked again): it enters beside it
                extra.append(entry)
            elif len(others) == 1:
                admission.ask(
                    entry.task,
                    group=request.group or request.session.rpartition(".")[0] or entry.task,
                    tokens=len(request.prompt) // 4,
                    growth=request.sampling.max_tokens,
                    evaluation=request.evaluation,
                    group_done=request.group_done,
                    kind=request.kind,
                    tool=request.tool,
                    waited=request.waited_s,
                    now=now,
                )
        await self._enter(extra + self._decide())

    async def collect(self, caller: str, wait_s: float) -> list[Completion]:
        """All completions of a caller since its last collect; waits at most ``wait_s`` for one."""
        return await self._boxes.take(caller, wait_s)

    async def cancel(self, caller: str) -> int:
        """Stop everything that a caller has outstanding, at the gate and inside; nothing is answered."""
        found = [entry for entry in self._open.values() if entry.caller == caller]
        for entry in found:
            self._close(entry)
        await self.engine.cancel(caller)
        for session in self._homes.pop(caller, set()):
            self._ended(session)
        await self._enter(self._decide())
        return len(found)

    async def release(self, sessions: Iterable[str]) -> None:
        """These tasks have ended: their places are free. Unknown ones are ignored."""
        gone = list(sessions)
        for session in gone:
            self._ended(session)
        for home in self._homes.values():
            home.difference_update(gone)
        await self.engine.release(gone)
        await self._enter(self._decide())

    # -- the engine's other calls -----------------------------------------------------------

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """See ``Engine.load_weights``; holds on prefixes of older weights end."""
        before = self.engine.version
        version = await self.engine.load_weights(weights, epoch)
        if self.admission is not None and version != before:
            self.admission.synced(self._clock())
            await self._enter(self._decide())
        return version

    def stats(self) -> GeneratorHealth:
        """The engine's counters with the ledger's; the engine's report moves the budget."""
        health = self.engine.stats()
        if self.admission is None:
            return health
        now = self._clock()
        self.admission.pressure(health.kv_usage, health.preemptions, now)
        figures = self.admission.figures()
        starved = self._starved_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        return replace(
            health,
            waiting=health.waiting + len(self._open) - self._entered.total(),
            capacity_tokens=figures.capacity,
            promised_tokens=min(figures.promised, figures.capacity),
            resident=figures.resident,
            parked=figures.parked,
            queued=figures.queued,
            starved_s=starved,
        )

    @property
    def figures(self) -> Figures | None:
        """The ledger's counts; None before the engine has started."""
        return self.admission.figures() if self.admission is not None else None

    # -- effects ----------------------------------------------------------------------------

    def _decide(self) -> list[_Open]:
        """Ask for a decision; returns the requests that it lets in. Parked tasks need nothing done:
        their cache is the engine's to reuse."""
        admission, now = self.admission, self._clock()
        if admission is None:
            return []
        entries: list[_Open] = []
        for task in admission.decide(now).start:
            for entry in self._by_task.get(task, ()):
                self._admitted(entry)
                entries.append(entry)
        due = admission.next_decision(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._on_time)
        self._note_idle(now)
        return entries

    async def _enter(self, entries: list[_Open]) -> None:
        """Hand requests to the engine, those of a caller together."""
        by_caller: dict[str, list[_Open]] = {}
        for entry in entries:
            by_caller.setdefault(entry.caller, []).append(entry)
        for caller, batch in by_caller.items():
            live = [entry for entry in batch if self._is_open(entry)]
            if not live:
                continue
            await self.engine.submit(caller, [entry.request for entry in live])
            gone = [entry.request.id for entry in live if not self._is_open(entry)]
            if gone:  # cancelled while they were handed over
                await self.engine.withdraw(caller, gone)
            pump = self._pumps.get(caller)
            if pump is None or pump.done():
                self._pumps[caller] = self._spawn(self._pump(caller), f"pump {caller}")

    async def _pump(self, caller: str) -> None:
        """Carry a caller's completions from the engine to its mailbox while any is outstanding."""
        while self._entered[caller]:
            for completion in await self.engine.collect(caller, _POLL_S):
                entry = self._open.get((caller, completion.id))
                if entry is None:
                    continue  # cancelled
                self._close(entry, completion)
                self._boxes.put(caller, completion)
            await self._enter(self._decide())
        del self._pumps[caller], self._entered[caller]

    def _admitted(self, entry: _Open) -> None:
        entry.entered = True
        self._entered[entry.caller] += 1

    def _close(self, entry: _Open, completion: Completion | None = None) -> None:
        """A request is answered, or cancelled (no completion): tell the ledger."""
        assert self.admission is not None, "nothing is open before the gate is"
        del self._open[entry.caller, entry.request.id]
        if entry.entered:
            self._entered[entry.caller] -= 1
        others = self._by_task[entry.task]
        others.remove(entry)
        if others:
            return
        del self._by_task[entry.task]
        now = self._clock()
        one_turn = not entry.request.session or self.admission.limits.policy == "request"
        if one_turn or entry.task in self._leaving:
            self._leaving.discard(entry.task)
            self.admission.ended(entry.task, now)
        elif completion is None or completion.error:
            self.admission.withdraw(entry.task, now)
        else:
            tokens = (len(entry.request.prompt) + len(completion.output)) // 4
            self.admission.turn_ended(entry.task, tokens, now)

    def _ended(self, session: str) -> None:
        """A task has left; if a request of it is still open, it leaves with its answer."""
        if session in self._by_task:
            self._leaving.add(session)
        elif self.admission is not None:
            self.admission.ended(session, self._clock())

    def _is_open(self, entry: _Open) -> bool:
        return self._open.get((entry.caller, entry.request.id)) is entry

    def _refuse(self, entry: _Open, error: str) -> None:
        """Answer a request that waits at the gate."""
        completion = refused(entry.request, error, self.engine.name, retryable=True)
        self._close(entry, completion)
        self._boxes.put(entry.caller, completion)

    def _refuse_waiting(self, reason: str) -> None:
        for entry in [entry for entry in self._open.values() if not entry.entered]:
            self._refuse(entry, f"EngineFailed: {reason}")

    def _note_idle(self, now: float) -> None:
        """Starved: the engine has nothing, and nobody waits for a place."""
        if self._open and self._idle_since is not None:
            self._starved_s += now - self._idle_since
            self._idle_since = None
        elif not self._open and self._idle_since is None:
            self._idle_since = now

    # -- watching ---------------------------------------------------------------------------

    def _on_time(self) -> None:
        """A hold has run out."""
        self._timer = None
        self._spawn(self._enter(self._decide()), "enter")

    async def _watch(self) -> None:
        """Deadlines at the gate, tasks that are better off elsewhere, callers that left."""
        while self.engine.healthy:
            await asyncio.sleep(_WATCH_S)
            now = self._clock()
            for entry in [entry for entry in self._open.values() if not entry.entered]:
                if entry.deadline < now:
                    self._refuse(entry, f"{NO_PLACE}no place within {self._timeout_s:g} s")
                elif self._better_elsewhere(entry, now):
                    self.moved += 1
                    self._refuse(entry, MOVED)
                    self._ended(entry.task)
            self._boxes.prune()
            for caller in [caller for caller in self._homes if not self._boxes.knows(caller)]:
                await self.cancel(caller)
            await self._enter(self._decide())

    def _better_elsewhere(self, entry: _Open, now: float) -> bool:
        """Has it waited longer than its context takes to compute again, where there is room for it?

        The time waited stands for the time still to wait: with heavy tails the best guess without a model.
        """
        admission, request = self.admission, entry.request
        if admission is None or not request.elsewhere or admission.has_place(entry.task):
            return False
        fits = admission.footprint(entry.task) <= request.elsewhere
        return fits and now - entry.since > max(_MOVE_S, admission.recompute_s(len(request.prompt) // 4))

    async def _mourn(self) -> None:
        """When the engine dies, those at the gate are told."""
        reason = await self.engine.run_until_dead()
        self._refuse_waiting(reason)

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"gate {what}:{self.engine.name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s failed", task.get_name(), exc_info=task.exception())
