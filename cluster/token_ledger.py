"""Who is where and what a generator's KV memory is promised to: the bookkeeping of admission. Pure.

Events move tasks between states and queues; nothing is decided here (see cluster/admission.py, which explains
states, promises and priorities). Every event costs O(log n).
"""

from cluster.admission_records import (
    ACTIVE,
    BACK,
    GONE,
    PARKED,
    QUEUED,
    WAITING,
    Figures,
    Group,
    Growth,
    Limits,
    Task,
    observed,
    sampled,
)
from cluster.lazy_heap import LateHeap, LazyHeap
from cluster.tool_waits import ToolWaits

W_EVAL, W_GROUP, W_ACTIVE, W_CONTEXT = 8.0, 4.0, 2.0, 1.0  # see cluster/admission.py
AGE_S = 120.0  # seconds in the queue that count as one point of priority
_KINDS = 256  # kinds told apart


class TokenLedger:
    """Events of one generator. Times must not go backwards; unknown tasks and repeats change nothing."""

    def __init__(self, limits: Limits, waits: ToolWaits | None = None) -> None:
        """``waits`` may be shared between generators: what tools take does not depend on them."""
        self.limits = limits
        self.waits = waits if waits is not None else ToolWaits()
        self._tasks: dict[str, Task] = {}
        self._groups: dict[str, Group] = {}
        self._kinds: dict[str, Growth] = {}
        self._kind_count: dict[str, int] = {}  # resident training tasks
        self._new: dict[str, LazyHeap[Task]] = {}  # kind -> training askers without a place
        self._back: LazyHeap[Task] = LazyHeap()  # training askers with one
        self._evals: LazyHeap[Task] = LazyHeap()
        self._evals_back: LazyHeap[Task] = LazyHeap()
        self._holds: LazyHeap[Task] = LazyHeap()  # waiting training tasks by the end of their hold
        self._unexpired: LateHeap[Task] = LateHeap()  # the same by priority, lowest first
        self._expired: LateHeap[Task] = LateHeap()
        self._idle: dict[str, Task] = {}  # waiting or parked, longest first
        self._unexpired_tokens = self._expired_tokens = self._back_tokens = 0
        self._promised = self._resident = self._active = self._parked = 0
        self._queued = self._queued_evals = 0
        self._by_task = limits.policy == "task"
        self._turns = self._starts = self._parks = self._resumes = 0
        self._salt = 0
        self._dirty = False
        self._sign = W_CONTEXT if limits.context == "protect_long" else -W_CONTEXT
        self._cap = 1.0
        self._budget = 0
        self._set_cap(1.0)

    # -- events -------------------------------------------------------------------------------------

    def ask(
        self, task: str, *, group: str, tokens: int, growth: int, evaluation: bool = False,
        group_done: float = 0.0, kind: str = "", tool: str = "", waited: float = 0.0, now: float,
    ) -> None:  # fmt: skip
        """A task wants a turn: a prompt of ``tokens``, up to ``growth`` more. Nothing if it asks already.

        ``tool`` is what its environment did since its last turn, ``group_done`` the ended share of its
        group; ``waited`` counts as if it had asked so many seconds ago.
        """
        known = self._tasks.get(task)
        if known is not None and known.state <= ACTIVE:
            return
        self._dirty = True
        if known is None:
            known = self._enter(task, group, kind, evaluation)
        else:
            self._returned(known, tokens, tool, now)
        if group_done != known.group.done:
            self.group_progress(known.group.name, group_done, now)
        known.tokens, known.growth, known.asked = tokens, growth, now - waited
        known.tool = tool or known.tool
        self._enqueue(known)

    def turn_ended(self, task: str, tokens: int, now: float, tool: str = "") -> None:
        """Its turn has been sampled, ``tokens`` are its context; it waits for its environment (``tool``)."""
        known = self._tasks.get(task)
        if known is None or known.state != ACTIVE:
            return
        self._dirty = True
        self._turns += 1
        self._active -= 1
        out = tokens - known.tokens if tokens > known.tokens else 0
        sampled(known, out)
        known.tokens, known.tool, known.timed = tokens, tool or known.tool, True
        self._wait(known, now)

    def ended(self, task: str, now: float) -> None:
        """It has left for good, whatever it was doing."""
        known = self._tasks.pop(task, None)
        if known is None:
            return
        self._dirty = True
        self._leave(known)
        if known.state != PARKED:
            self._give_up_place(known)
        known.state = GONE
        group = known.group
        del group.members[task]
        if not group.members:
            del self._groups[group.name]

    def withdraw(self, task: str, now: float) -> None:
        """Its request was cancelled: it is not asking or active any more, but has not left.

        One that never had a turn is forgotten.
        """
        known = self._tasks.get(task)
        if known is None or known.state > ACTIVE:
            return
        self._dirty = True
        known.timed = False
        if known.state == QUEUED:
            if not known.parked:
                self.ended(task, now)
                return
            self._leave(known)
            known.state, known.since = PARKED, now
            self._parked += 1
            self._idle[task] = known
            return
        if known.state == ACTIVE:
            self._active -= 1
        else:
            self._leave(known)
        self._wait(known, now)

    def group_progress(self, group: str, done: float, now: float) -> None:
        """``done`` of the group's members have ended (share). Unknown groups are ignored."""
        known = self._groups.get(group)
        if known is None or known.done == done:
            return
        known.done = done
        self._dirty = True
        for task in known.members.values():
            if task.state == WAITING and not task.evaluation:
                self._requeue_waiting(task)
            elif task.state in (QUEUED, BACK):
                self._leave(task)
                self._enqueue(task)

    def synced(self, now: float) -> None:
        """The weights changed: prefixes of the old ones are worth nothing, so parking is free."""
        self._salt += 1
        self._dirty = True
        for task in list(self._unexpired):
            self._expire(task)

    def has_place(self, task: str) -> bool:
        """Is it resident?"""
        known = self._tasks.get(task)
        return known is not None and known.state in (BACK, ACTIVE, WAITING)

    def priority(self, task: str) -> float:
        """The priority of the module docstring, without age; KeyError if the task is unknown."""
        known = self._tasks[task]
        active = W_ACTIVE if known.state == ACTIVE else 0.0
        return W_EVAL * known.evaluation + active + self._base(known)

    def footprint(self, task: str) -> int:
        """Tokens promised to it, or what it would be promised if it were started; KeyError if unknown."""
        known = self._tasks[task]
        return known.held if known.state in (ACTIVE, WAITING) else self._promise(known)

    def recompute_s(self, tokens: int) -> float:
        """What it costs to compute a context of ``tokens`` again."""
        return tokens / self.limits.prefill_tok_s

    def figures(self) -> Figures:
        """See ``Figures``."""
        return Figures(
            capacity=self.limits.capacity_tokens,
            budget=self._budget,
            promised=self._promised,
            free=max(0, self._budget - self._promised),
            resident=self._resident,
            active=self._active,
            waiting=len(self._idle) - self._parked,
            parked=self._parked,
            queued=self._queued,
            starts=self._starts,
            parks=self._parks,
            resumes=self._resumes,
            cap=self._cap,
        )

    # -- transitions --------------------------------------------------------------------------------

    def _enter(self, name: str, group: str, kind: str, evaluation: bool) -> Task:
        if kind not in self._kinds:
            kind = kind if len(self._kinds) < _KINDS else ""
            self._kinds.setdefault(kind, Growth())
        alike = self._kinds[kind]
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = Group(group)
        task = self._tasks[name] = known.members[name] = Task(name, known, kind, evaluation, alike)
        if self._by_task:
            task.state = PARKED
        else:
            self._take_place(task)
            task.state = WAITING
        return task

    def _returned(self, task: Task, tokens: int, tool: str, now: float) -> None:
        """Its environment has answered."""
        del self._idle[task.name]
        if task.timed:
            self.waits.observe(tool or task.tool, now - task.since)
        answer = tokens - task.tokens if tokens > task.tokens else 0
        observed(task, answer)
        if task.state == PARKED:
            self._parked -= 1
        elif self._by_task:
            self._unhold(task)

    def _enqueue(self, task: Task) -> None:
        """Into the queue that fits; from ``WAITING`` it keeps its place, from ``PARKED`` it has none."""
        self._queued += 1
        self._queued_evals += task.evaluation
        if task.state == WAITING:
            task.state = BACK
        elif task.state == PARKED:
            task.state = QUEUED
        task.stamp += 1
        if not self._by_task:
            self._back.push(task.asked, task)
            return
        task.base = self._base(task)
        key = task.asked / AGE_S - task.base
        if task.evaluation:
            (self._evals_back if task.state == BACK else self._evals).push(key, task)
        elif task.state == BACK:
            self._back_tokens += task.held
            self._back.push(key, task)
        else:
            queue = self._new.get(task.kind)
            if queue is None:
                queue = self._new[task.kind] = LazyHeap()
            queue.push(key, task)

    def _start(self, task: Task, held: int, start: list[str]) -> None:
        """``task``, the first of its queue, becomes active."""
        task.stamp += 1
        self._queued -= 1
        self._queued_evals -= task.evaluation
        if task.state == BACK:
            self._back_tokens -= task.held if self._by_task and not task.evaluation else 0
        else:
            self._take_place(task)
            self._resumes += task.parked
        task.parked = False
        task.state = ACTIVE
        task.salt = self._salt
        self._promised += held - task.held
        task.held = held
        self._active += 1
        self._starts += 1
        start.append(task.name)

    def _wait(self, task: Task, now: float) -> None:
        """An active or asking task with a place waits for its environment."""
        task.state, task.since = WAITING, now
        self._idle[task.name] = task
        held = task.tokens + int(self._obs(task) + self._out(task))
        if held > self._budget:
            held = self._budget
        self._promised += held - task.held
        task.held = held
        if task.evaluation or not self._by_task:
            return
        task.base = self._base(task)
        hold = 0.0
        if task.salt == self._salt:
            recompute_s = task.tokens / self.limits.prefill_tok_s
            hold = self.waits.best_hold(task.tool, 0.0, held, recompute_s, self.limits.capacity_tokens)
        task.stamp += 1
        task.expired = hold <= 0.0
        if task.expired:
            self._expired_tokens += held
            self._expired.push(task.base, task)
        else:
            self._unexpired_tokens += held
            task.until = now + hold
            self._unexpired.push(task.base, task)
            self._holds.push(task.until, task)

    def _expire(self, task: Task) -> None:
        """The hold of a waiting training task is over."""
        task.stamp += 1
        task.expired = True
        self._unexpired_tokens -= task.held
        self._expired_tokens += task.held
        self._expired.push(task.base, task)

    def _requeue_waiting(self, task: Task) -> None:
        """Its priority has changed."""
        task.base = self._base(task)
        task.stamp += 1
        if task.expired:
            self._expired.push(task.base, task)
        else:
            self._unexpired.push(task.base, task)
            self._holds.push(task.until, task)

    def _park(self, task: Task, park: list[str]) -> None:
        """A waiting task, or one that asks and has a place, loses it."""
        park.append(task.name)
        self._parks += 1
        if task.state == WAITING:
            self._unhold(task)
            task.state = PARKED
            self._parked += 1
            self._give_up_place(task)
        else:
            self._leave(task)
            self._give_up_place(task)
            task.state = PARKED
            self._enqueue(task)
        task.parked = True

    def _leave(self, task: Task) -> None:
        """Out of whatever queue or list its state has it in."""
        task.stamp += 1
        if task.state <= BACK:
            self._queued -= 1
            self._queued_evals -= task.evaluation
            if task.state == BACK and not task.evaluation and self._by_task:
                self._back_tokens -= task.held
        elif task.state == ACTIVE:
            self._active -= 1
        else:
            del self._idle[task.name]
            if task.state == PARKED:
                self._parked -= 1
            else:
                self._unhold(task)

    def _unhold(self, task: Task) -> None:
        """A waiting task waits no more."""
        task.stamp += 1
        if task.evaluation or not self._by_task:
            return
        if task.expired:
            self._expired_tokens -= task.held
        else:
            self._unexpired_tokens -= task.held

    def _take_place(self, task: Task) -> None:
        self._resident += 1
        if not task.evaluation:
            self._kind_count[task.kind] = self._kind_count.get(task.kind, 0) + 1

    def _give_up_place(self, task: Task) -> None:
        if task.state == QUEUED:
            return
        self._promised -= task.held
        task.held = 0
        self._resident -= 1
        if not task.evaluation:
            self._kind_count[task.kind] -= 1

    # -- estimates ----------------------------------------------------------------------------------

    def _set_cap(self, cap: float) -> None:
        """See ``Figures.cap``; the budget follows."""
        limits = self.limits
        self._cap = cap
        scale = cap if self._by_task else 1.0
        self._budget = max(1, int(limits.capacity_tokens * (1.0 - limits.headroom) * scale))

    def _base(self, task: Task) -> float:
        context = task.tokens / self.limits.capacity_tokens
        return W_GROUP * task.group.done + self._sign * (context if context < 1.0 else 1.0)

    def _promise(self, task: Task) -> int:
        """What a turn of this asker needs, at most the whole budget."""
        need = task.tokens + int(self._out(task))
        return need if need < self._budget else self._budget

    def _out(self, task: Task) -> float:
        """Tokens that its turn is expected to sample."""
        growth = task.group.growth
        if not growth.n_out:
            growth = task.alike
            if not growth.n_out:
                return task.growth
        return growth.out if growth.out < task.growth else task.growth

    def _obs(self, task: Task) -> float:
        """Tokens that its environment's answer is expected to add."""
        growth = task.group.growth
        return growth.obs if growth.n_obs else task.alike.obs
