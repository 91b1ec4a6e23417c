"""States and queues of the tasks at one generator, and the tokens promised to each. Pure.

What happens to a task is in cluster/token_ledger.py, what is decided in cluster/admission.py (which explains
states, promises and priorities). Every transition costs O(log n).
"""

from math import inf

from cluster.admission_records import (
    ACTIVE,
    BACK,
    PARKED,
    QUEUED,
    WAITING,
    Group,
    Growth,
    Limits,
    Task,
    expected_obs,
    expected_out,
    observed,
)
from cluster.lazy_heap import LateHeap, LazyHeap
from cluster.tool_waits import ToolWaits

W_GROUP, W_CONTEXT = 4.0, 1.0  # see cluster/admission.py
AGE_S = 120.0  # seconds in the queue that count as one point of priority
_KINDS = 256  # kinds told apart


class Places:
    """Transitions of tasks between states; each keeps queues, sums and counts right."""

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
        self._demand_s, self._passed = 0.0, inf  # until when it stands; not before the first event
        self._cap = 1.0
        self._budget = 0
        self._set_cap(1.0)

    def _pass(self, now: float) -> None:
        """All was as it is since the last call: so before any change. Untold where memory admits nobody."""
        if now > self._passed and self._resident and self._by_task:
            demand = self._promised * len(self._tasks) / (self._resident * self._budget)
            self._demand_s += demand * (now - self._passed)
        self._passed = now

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
        held = task.tokens + int(expected_obs(task) + expected_out(task))
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
            hold = self.waits.best_hold(task.tool, held, recompute_s, self.limits.capacity_tokens)
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
        need = task.tokens + int(expected_out(task))
        return need if need < self._budget else self._budget
