"""Which tasks hold a generator's KV cache: continuous batching of whole tasks. Pure; one per generator.

An engine that batches requests forgets a task as soon as its turn ends: while the environment works, other
requests take its cache, and its grown history is computed again when it comes back. Here the unit is the
task (an episode of many turns; TideRL, arXiv 2608.10402, "continuous task batching").

**States.** A task *asks* for a turn and is *queued*; decided, it is *active*; when its turn has been sampled
it is *waiting* for its environment. Active and waiting tasks are *resident*: the ledger promises them memory.
A waiting task may be *parked*: it loses its place, and asks for one like a new task when it is back.

**Ledger** (cluster/token_ledger.py). A resident task is promised its tokens and the growth expected until its
next turn has ended: the mean of what its group's earlier turns added (the first member to come is the group's
probe), before these the mean of its kind, before these all that it may grow. Real numbers replace estimates
at every turn. The sum of promises stays within the budget (capacity less headroom); a task larger than the
budget is promised all of it, so that it runs alone. An active task is never interrupted, so an underestimated
one may carry the sum over the budget until its turn ends; then waiting ones are parked.

**Priority** ``4 group_done + 1 (+-context / capacity)``: a group that lacks one member is worth nothing to
the learner. An evaluation, which pins the weights, goes before anything: it has a queue of its own. Among
askers, waiting ``AGE_S`` counts as one point, so that none starves.

**Who is parked.** A waiting task keeps its place while nobody needs the room. If somebody does, tasks whose
*hold* (cluster/tool_waits.py) has run out go first, lowest priority first. A hold is broken only for an
asker that leads by ``_MARGIN``, for an evaluation, or when the rank would stand idle. Evaluations are
never parked, and while one lacks room that training tasks hold, no training task starts.

Every event costs O(log n); ``decide`` costs that for each task it starts or parks, and O(1) if none.
"""

from math import ceil, inf
from typing import NamedTuple

from cluster.admission_records import BACK, WAITING, Task, expected_obs, expected_out
from cluster.admission_records import PREFILL_TOK_S as PREFILL_TOK_S
from cluster.admission_records import Figures as Figures
from cluster.admission_records import Limits as Limits
from cluster.lazy_heap import LazyHeap
from cluster.pressure import Pressure
from cluster.token_ledger import TokenLedger
from cluster.tool_waits import ToolWaits as ToolWaits

_MARGIN = 1.0  # a quarter of a group: context alone (at most 1) never breaks a hold
_AHEAD = 2  # turns of growth that must be free, beyond the first turn, for a new task to enter
_FIRST_CAP = 16.0  # concurrent requests at which "aimd" begins


class Decision(NamedTuple):
    """Tasks whose turn begins now, best first, and tasks that lose their place. Parked ones may be asking."""

    start: tuple[str, ...] = ()
    park: tuple[str, ...] = ()


_NOTHING = Decision()


class Admission(TokenLedger):
    """See the module docstring; the events are those of ``TokenLedger``."""

    def __init__(self, limits: Limits, waits: ToolWaits | None = None) -> None:
        """``waits`` may be shared between generators: what tools take does not depend on them."""
        super().__init__(limits, waits)
        if limits.policy == "aimd":
            self._guard = Pressure(_FIRST_CAP, 1.0, 65536.0)
        else:  # the ledger is nearly right: one preemption is no reason to give up half of the memory
            self._guard = Pressure(1.0, 0.25, 1.0, preempted=0.8)
        self._set_cap(self._guard.value)
        self._forgotten_at = -inf  # nobody has been silent for too long before

    def pressure(self, kv_usage: float, preemptions: int, now: float) -> None:
        """The engine's report: used share of its KV cache, and how often it has preempted in all.

        Under "task" a full cache is the aim: the budget is cut if the engine preempts, or uses more than the
        ledger knows of. Under "aimd" this moves the cap.
        """
        limits, guard = self.limits, self._guard
        if limits.policy == "aimd":
            binds, full, width = self._active >= 0.9 * guard.value, True, int(guard.value)
        else:
            binds = self._promised >= 0.9 * self._budget
            full = kv_usage * limits.capacity_tokens > self._promised
            width = self._resident
        if guard.observe(
            kv_usage, preemptions, binds=binds, full=full, turns=self._turns, width=max(1, width)
        ):
            self._pass(now)
            self._dirty = True
            self._set_cap(guard.value)

    # -- decisions ----------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        """Which turns begin and which tasks lose their place. Taken at once: a repeated call decides anew."""
        if now > self._forgotten_at:
            self._forget(now)
        if not self._queued and self._promised <= self._budget:
            return _NOTHING  # holds may run out unseen while nobody asks
        holds = self._holds
        while (held := holds.due(now)) is not None:
            self._dirty = True
            self._expire(held)
        if not self._dirty:
            return _NOTHING
        self._pass(now)
        self._dirty = False
        start: list[str] = []
        park: list[str] = []
        if not self._by_task:
            self._serve_plain(start)
        else:
            if self._promised > self._budget:
                self._shed(park)
            if self._queued_evals and self._serve_evaluations(start, park):
                self._serve_idle(start, park)
            elif self._queued and not self._serve_back(start, park) and self._queued:
                self._serve_new(start, park)
        return Decision(tuple(start), tuple(park)) if start or park else _NOTHING

    def next_decision(self, now: float) -> float | None:
        """When time alone may change a decision: somebody is queued and a hold runs out. None: never."""
        if not self._queued or not self._by_task or self._holds.first() is None:
            return None
        return max(now, self._holds.first_key())

    def _forget(self, now: float) -> None:
        """Tasks not heard of for ``forget_s`` have left."""
        until = now  # from which the next one is counted at the earliest
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if now - oldest.since <= self.limits.forget_s:
                until = oldest.since
                break
            self.ended(oldest.name, now)
        self._forgotten_at = until + self.limits.forget_s

    # -- serving ------------------------------------------------------------------------------------

    def _serve_plain(self, start: list[str]) -> None:
        """Policy "request": everything; "aimd": first come, first served below the cap."""
        cap = inf if self.limits.policy == "request" else self._cap
        while self._active < cap and (task := self._back.first()) is not None:
            self._start(task, self._promise(task), start)

    def _serve_evaluations(self, start: list[str], park: list[str]) -> bool:
        """Start evaluations, those with a place first; True if one is left without room."""
        for queue in (self._evals_back, self._evals):
            while (task := queue.first()) is not None:
                held = self._promise(task)
                slots = 0 if task.state == BACK else 1
                fits = self._make_room(held - task.held, slots, inf, task, park)
                if not fits and (slots or self._active):  # alone with other evaluations it may overdraw
                    return True
                self._start(task, held, start)
        return False

    def _serve_idle(self, start: list[str], park: list[str]) -> None:
        """Start one training task that kept its place, if nothing runs and it fits as things are.

        The evaluation that waits would not fit even if it were parked: only other evaluations can make room.
        """
        task = self._back.first()
        if task is None or self._active:
            return
        held = self._promise(task)
        if self._make_room(held - task.held, 0, -inf, None, park):
            self._start(task, held, start)

    def _serve_back(self, start: list[str], park: list[str]) -> bool:
        """Start training tasks that kept their place; True if one's growth finds no room."""
        while (task := self._back.first()) is not None:
            held = self._promise(task)
            if self._promised + held - task.held > self._budget:
                idle = self._active == 0  # a rank that stands idle loses more than a recomputation
                limit = inf if idle else task.base - _MARGIN
                if not self._make_room(held - task.held, 0, limit, task if idle else None, park):
                    return True
            self._start(task, held, start)
        return False

    def _serve_new(self, start: list[str], park: list[str]) -> None:
        """Start training tasks without a place, the best first; a kind above its share stands back."""
        while self._queued and (queue := self._next_kind()) and (task := queue.first()):
            held = self._promise(task)
            need = held
            if not task.parked:
                need = min(self._budget, held + int(_AHEAD * (expected_out(task) + expected_obs(task))))
            limit = inf if self._active == 0 else task.base - _MARGIN
            if not self._make_room(need, 1, limit, None, park):
                return
            self._start(task, held, start)

    def _next_kind(self) -> LazyHeap[Task] | None:
        """The queue whose head goes first, among the kinds that may have another task."""
        if len(self._new) == 1:
            return next(iter(self._new.values()))
        waiting = [(queue.first_key(), kind) for kind, queue in self._new.items() if queue]
        if not waiting:
            return None
        share, total = self.limits.diversity, sum(self._kind_count.values())
        if share < 1.0 and len(waiting) > 1:
            bound = max(1, ceil(share * (total + 1)))
            allowed = [entry for entry in waiting if self._kind_count.get(entry[1], 0) < bound]
            if not allowed:
                fewest = min(self._kind_count.get(kind, 0) for _, kind in waiting)
                allowed = [entry for entry in waiting if self._kind_count.get(entry[1], 0) == fewest]
            waiting = allowed
        return self._new[min(waiting)[1]]

    def _make_room(self, tokens: int, slots: int, limit: float, asker: Task | None, park: list[str]) -> bool:
        """Park until ``tokens`` and ``slots`` more fit: all that is needed, or nothing at all.

        First expired holds; then holds of priority up to ``limit``; then, if ``asker`` is given, training
        tasks other than itself that ask and have a place.
        """
        short = self._promised + tokens - self._budget
        crowd = self._resident + slots - self.limits.max_tasks if self.limits.max_tasks and slots else 0
        if short <= 0 and crowd <= 0:
            return True
        offered = self._expired_tokens + (self._unexpired_tokens if limit > -inf else 0)
        if short > offered + (self._back_tokens if asker is not None else 0):
            return False
        others: list[Task] | None = None
        victims: list[Task] = []
        while short > 0 or crowd > 0:
            victim = self._expired.pop()
            if victim is None and self._unexpired and self._unexpired.first_key() <= limit:
                victim = self._unexpired.pop()
            if victim is None and asker is not None:
                if others is None:
                    others = sorted((t for t in self._back if t is not asker), key=lambda t: -t.base)
                victim = others.pop() if others else None
            if victim is None:
                for spared in victims:
                    if spared.state == WAITING:
                        (self._expired if spared.expired else self._unexpired).push(spared.base, spared)
                return False
            victims.append(victim)
            short -= victim.held
            crowd -= 1
        for victim in victims:
            self._park(victim, park)
        return True

    def _shed(self, park: list[str]) -> None:
        """Promises exceed the budget (growth, or a cut): park waiting tasks until they do not."""
        while self._promised > self._budget:
            victim = self._expired.pop() or self._unexpired.pop()
            if victim is None:
                return
            self._park(victim, park)
