"""What a gate does: asks the ledger for a decision, hands requests to the engine, carries answers back."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from actors.engine_like import EngineLike
from actors.mailbox import Mailboxes
from actors.open_requests import Open, OpenRequests
from actors.pending import refused
from cluster.admission import Admission
from cluster.types import Completion

_log = logging.getLogger(__name__)
_POLL_S = 2.0  # one long poll at the engine


class GateCore:
    """Open requests, the ledger's view of them, and the tasks that serve them."""

    def __init__(self, engine: EngineLike, timeout_s: float, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.admission: Admission | None = None
        self._clock = clock
        self._boxes = Mailboxes(keep_s=max(600.0, 2 * timeout_s), clock=clock)
        self._open = OpenRequests()
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._starved_s = 0.0
        self._idle_since: float | None = None

    def _decide(self) -> list[Open]:
        """Ask for a decision; returns the requests that it lets in. Parked tasks need nothing done:
        their cache is the engine's to reuse."""
        admission, now = self.admission, self._clock()
        if admission is None:
            return []
        entries: list[Open] = []
        for task in admission.decide(now).start:
            for entry in self._open.of_task(task):
                self._open.enter(entry)
                entries.append(entry)
        due = admission.next_decision(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._on_time)
        self._note_idle(now)
        return entries

    def _on_time(self) -> None:
        """A hold has run out."""
        self._timer = None
        self._spawn(self._enter(self._decide()), "enter")

    async def _enter(self, entries: list[Open]) -> None:
        """Hand requests to the engine, those of a caller together."""
        by_caller: dict[str, list[Open]] = {}
        for entry in entries:
            by_caller.setdefault(entry.caller, []).append(entry)
        for caller, batch in by_caller.items():
            live = [entry for entry in batch if entry in self._open]
            if not live:
                continue
            await self.engine.submit(caller, [entry.request for entry in live])
            gone = [entry.request.id for entry in live if entry not in self._open]
            if gone:  # cancelled while they were handed over
                await self.engine.withdraw(caller, gone)
            pump = self._pumps.get(caller)
            if pump is None or pump.done():
                self._pumps[caller] = self._spawn(self._pump(caller), f"pump {caller}")

    async def _pump(self, caller: str) -> None:
        """Carry a caller's completions from the engine to its mailbox while any is outstanding."""
        while self._open.inside(caller):
            for completion in await self.engine.collect(caller, _POLL_S):
                entry = self._open.get(caller, completion.id)
                if entry is None:
                    continue  # cancelled
                self._close(entry, completion)
                self._boxes.put(caller, completion)
            await self._enter(self._decide())
        del self._pumps[caller]

    def _close(self, entry: Open, completion: Completion | None = None) -> None:
        """A request is answered, or cancelled (no completion): tell the ledger."""
        assert self.admission is not None, "nothing is open before the gate is"
        if not self._open.remove(entry):
            return
        now = self._clock()
        if not entry.request.session or self.admission.limits.policy == "request":
            self.admission.ended(entry.task, now)  # a task of one turn
        elif completion is None or completion.error:
            self.admission.withdraw(entry.task, now)
        else:
            tokens = (len(entry.request.prompt) + len(completion.output)) // 4
            self.admission.turn_ended(entry.task, tokens, now)

    def _ended(self, caller: str, sessions: Iterable[str]) -> list[str]:
        """These have left; returns those that nobody else plays."""
        gone = self._open.leave(caller, sessions)
        if self.admission is not None:
            for session in gone:
                self.admission.ended(session, self._clock())
        return gone

    def _refuse(self, entry: Open, error: str) -> None:
        """Answer a request as retryable."""
        completion = refused(entry.request, error, self.engine.name, retryable=True)
        self._close(entry, completion)
        self._boxes.put(entry.caller, completion)

    def _refuse_all(self, entries: Sequence[Open], error: str) -> None:
        for entry in entries:
            self._refuse(entry, error)

    def _note_idle(self, now: float) -> None:
        """Starved: the engine has nothing, and nobody waits for a place."""
        if self._open and self._idle_since is not None:
            self._starved_s += now - self._idle_since
            self._idle_since = None
        elif not self._open and self._idle_since is None:
            self._idle_since = now

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"gate {what}:{self.engine.name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s failed", task.get_name(), exc_info=task.exception())
