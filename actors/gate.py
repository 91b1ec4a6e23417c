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

A task whose end is told (``release``) takes its open requests with it, waiting or inside. What nobody asks
for any more does not enter: a caller that waits for answers polls every few seconds, one that is silent
for ``_SILENT_S`` has died. A generator that joins or leaves the fleet forgets all (``clear``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from actors.engine_like import EngineLike
from actors.gate_core import GateCore
from actors.open_requests import Open
from actors.pending import refused
from cluster.admission import PREFILL_TOK_S, Admission, Figures, Limits
from cluster.config import AdmissionConfig
from cluster.errors import StaleEpoch
from cluster.messages import GeneratorHealth
from cluster.types import Completion, Request, Weights

_log = logging.getLogger(__name__)

NO_PLACE = "NoPlace: "  # how answers begin that only say "not yet": asking again is no failure
MOVED = NO_PLACE + "another generator has room"
_WATCH_S = 0.25  # how often deadlines are looked for
_MOVE_S = 1.0  # shortest wait after which a task may be better off elsewhere
_SILENT_S = 30.0  # a caller that has not polled for so long waits for nothing


class Gate(GateCore):
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
        super().__init__(engine, timeout_s, clock)
        self._config = config
        self._timeout_s = timeout_s
        self._prefill_tok_s = prefill_tok_s
        self._elsewhere: dict[str, int] = {}  # most tokens free at another generator, as each caller knows it
        self._epoch = 0  # of the newest order
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
        """Close the engine; whatever is open is answered as retryable."""
        await self.engine.close()
        self._refuse_all(self._open.all(), "EngineFailed: closed")
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
        extra: list[Open] = []
        for request in requests:
            if self._open.get(caller, request.id) is not None:
                continue
            entry = Open(caller, request, now, now + self._timeout_s)
            others = self._open.of_task(entry.task)
            self._open.add(entry)
            if request.session and admission.limits.policy != "request":
                self._open.play(caller, request.session)
            if any(other.entered for other in others):
                self._open.enter(entry)  # the task is in a turn already (asked again): it enters beside it
                extra.append(entry)
            elif not others:
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

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        """All completions of a caller since its last collect; waits at most ``wait_s`` for one.

        ``elsewhere``: most tokens that are free at another generator, as the caller knows it now.
        """
        self._elsewhere[caller] = elsewhere
        return await self._boxes.take(caller, wait_s)

    async def cancel(self, caller: str) -> int:
        """Stop everything that a caller has outstanding, at the gate and inside; nothing is answered."""
        found = [entry for entry in self._open.all() if entry.caller == caller]
        for entry in found:
            self._close(entry)
        self._elsewhere.pop(caller, None)
        gone = self._ended(caller, self._open.sessions(caller))
        await self.engine.cancel(caller)
        await self.engine.release(gone)
        await self._enter(self._decide())
        return len(found)

    async def release(self, caller: str, sessions: Iterable[str]) -> None:
        """These tasks of a caller have ended: their places are free, what they still ask is dropped.

        Unknown ones are ignored, and so are those that another caller plays by now.
        """
        names = list(dict.fromkeys(sessions))
        inside: list[str] = []
        for entry in [entry for name in names for entry in self._open.of_task(name)]:
            if entry.caller == caller:
                inside += [entry.request.id] if entry.entered else []
                self._close(entry)
        gone = self._ended(caller, names)
        if inside:
            await self.engine.withdraw(caller, inside)
        await self.engine.release(gone)
        await self._enter(self._decide())

    async def clear(self, epoch: int) -> None:
        """Forget all tasks: this generator has joined or left the fleet. What is open is answered as moved.

        Raises StaleEpoch for an order older than one seen.
        """
        if epoch < self._epoch:
            raise StaleEpoch(f"{self.engine.name}: order of epoch {epoch}, already at {self._epoch}")
        self._epoch = epoch
        inside: dict[str, list[str]] = {}
        for entry in self._open.all():
            if entry.entered:
                inside.setdefault(entry.caller, []).append(entry.request.id)
        self._refuse_all(self._open.all(), MOVED)
        gone: list[str] = []
        for caller in self._open.callers():
            gone += self._ended(caller, self._open.sessions(caller))
        for caller, names in inside.items():
            await self.engine.withdraw(caller, names)
        await self.engine.release(gone)
        await self._enter(self._decide())

    # -- the engine's other calls -----------------------------------------------------------

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """See ``Engine.load_weights``; holds on prefixes of older weights end."""
        before = self.engine.version
        version = await self.engine.load_weights(weights, epoch)
        self._epoch = max(self._epoch, epoch)
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
            waiting=health.waiting + len(self._open) - self._open.inside(),
            capacity_tokens=figures.capacity,
            promised_tokens=min(figures.promised, figures.capacity),
            free_tokens=figures.free,
            demand_s=self.admission.demand_s(now),
            resident=figures.resident,
            parked=figures.parked,
            queued=figures.queued,
            starved_s=starved,
            parks=figures.parks,
            resumes=figures.resumes,
            moved=self.moved,
        )

    @property
    def figures(self) -> Figures | None:
        """The ledger's counts; None before the engine has started."""
        return self.admission.figures() if self.admission is not None else None

    # -- watching ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Deadlines at the gate, tasks that are better off elsewhere, callers that left."""
        while self.engine.healthy:
            await asyncio.sleep(_WATCH_S)
            now = self._clock()
            for entry in self._open.waiting():
                if entry not in self._open:
                    continue  # moved with another one of its task
                if entry.deadline < now:
                    self._refuse(entry, f"{NO_PLACE}no place within {self._timeout_s:g} s")
                elif self._boxes.silent_s(entry.caller) > _SILENT_S:
                    self._refuse(entry, f"{NO_PLACE}nobody asks for the answer")
                elif self._better_elsewhere(entry, now):
                    self._move(entry)
            self._boxes.prune()
            callers = {*self._open.callers(), *self._elsewhere}
            for caller in [caller for caller in callers if not self._boxes.knows(caller)]:
                await self.cancel(caller)
            await self._enter(self._decide())

    def _better_elsewhere(self, entry: Open, now: float) -> bool:
        """Has it waited longer than its context takes to compute again, where there is room for it?

        The time waited stands for the time still to wait: with heavy tails the best guess without a model.
        """
        admission, room = self.admission, self._elsewhere.get(entry.caller, 0)
        if admission is None or not entry.request.mobile or not room or admission.has_place(entry.task):
            return False
        waited, tokens = now - entry.since, len(entry.request.prompt) // 4
        fits = admission.footprint(entry.task) <= room
        return fits and waited > max(_MOVE_S, admission.recompute_s(tokens))

    def _move(self, entry: Open) -> None:
        """Its task goes elsewhere, into room that the next one does not find there."""
        assert self.admission is not None, "nothing is open before the gate is"
        self._elsewhere[entry.caller] -= self.admission.footprint(entry.task)
        self.moved += 1
        self._refuse_all(self._open.of_task(entry.task), MOVED)
        self._ended(entry.caller, [entry.task])

    async def _mourn(self) -> None:
        """When the engine dies, those at the gate are told; it answers those inside."""
        reason = await self.engine.run_until_dead()
        self._refuse_all(self._open.waiting(), f"EngineFailed: {reason}")
