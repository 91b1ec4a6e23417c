"""Who is where and what a generator's KV memory is promised to: the bookkeeping of admission. Pure.

Events move tasks between states and queues (cluster/places.py); nothing is decided here (see
cluster/admission.py, which explains states, promises and priorities). Every event costs O(log n).
"""

from cluster.admission_records import ACTIVE, BACK, GONE, PARKED, QUEUED, WAITING, Figures, sampled
from cluster.places import Places


class TokenLedger(Places):
    """Events of one generator. Times must not go backwards; unknown tasks and repeats change nothing."""

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
        self._pass(now)
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
        self._pass(now)
        self._dirty = True
        self._turns += 1
        self._active -= 1
        out = tokens - known.tokens if tokens > known.tokens else 0
        sampled(known, out)
        known.tokens, known.tool, known.timed = tokens, tool or known.tool, True
        self._wait(known, now)

    def ended(self, task: str, now: float) -> None:
        """It has left for good, whatever it was doing."""
        known = self._tasks.get(task)
        if known is None:
            return
        self._pass(now)
        del self._tasks[task]
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
        self._pass(now)
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

    def footprint(self, task: str) -> int:
        """Tokens promised to it, or what it would be promised if it were started; KeyError if unknown."""
        known = self._tasks[task]
        return known.held if known.state in (ACTIVE, WAITING) else self._promise(known)

    def recompute_s(self, tokens: int) -> float:
        """What it costs to compute a context of ``tokens`` again."""
        return tokens / self.limits.prefill_tok_s

    def demand_s(self, now: float) -> float:
        """Seconds until now, each times the memory that tasks wanted in it, as a share of the budget.

        Tasks without a place count as much as the mean of those with one. 0 unless memory is what admits
        tasks (policy "task"): else promises bound nothing, and may be of a capacity that is not known.
        """
        self._pass(now)
        return self._demand_s

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
