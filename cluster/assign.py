"""Which worker runs which group, and what to do when it no longer does. Pure.

Facts come in by ``pulled`` (what a worker says it runs) and ``open`` (what the queue says is
unfinished); ``reconcile`` answers with the groups to order again or to give up. Nothing here
is durable: a restarted controller learns the assignments back from the workers' next pulls,
and waits ``grace_s`` before it calls a group lost.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from cluster.types import Order


@dataclass(frozen=True)
class Verdict:
    """What to do with a group that nobody runs any more."""

    order: Order  # next attempt, or the last one if given up
    give_up: bool
    reason: str


@dataclass
class _Holder:
    incarnation: str
    seen: float
    running: dict[str, int] = field(default_factory=dict)


@dataclass
class Assignments:
    """State machine; every method takes the time as an argument."""

    max_attempts: int
    grace_s: float = 3.0
    silent_s: float = 30.0  # a worker that has not pulled for this long is lost
    started: float = 0.0
    _workers: dict[str, _Holder] = field(default_factory=dict)
    _given: dict[str, tuple[str, str, float]] = field(default_factory=dict)

    def pulled(self, worker: str, incarnation: str, running: dict[str, int], now: float) -> None:
        """A worker reports itself and the groups it runs."""
        self._workers[worker] = _Holder(incarnation, now, dict(running))
        for group in running:
            self._given.setdefault(group, (worker, incarnation, now))

    def given(self, group: str, worker: str, incarnation: str, now: float) -> None:
        """An order was handed to a worker."""
        self._given[group] = (worker, incarnation, now)

    def finished(self, group: str) -> None:
        """The group is no longer open."""
        self._given.pop(group, None)

    def live(self, now: float) -> list[str]:
        """Workers that pulled lately."""
        return [name for name, w in self._workers.items() if now - w.seen <= self.silent_s]

    def reconcile(self, open_orders: list[Order], now: float) -> list[Verdict]:
        """Groups that are open but run by nobody, with what to do about each."""
        known = {order.group for order in open_orders}
        for group in [g for g in self._given if g not in known]:
            del self._given[group]
        verdicts = []
        for order in open_orders:
            reason = self._lost(order, now)
            if reason:
                self._given.pop(order.group, None)
                verdicts.append(self._verdict(order, reason))
        return verdicts

    def _lost(self, order: Order, now: float) -> str:
        holder = self._given.get(order.group)
        if holder is None:
            return "unassigned" if now - self.started > self.grace_s else ""
        name, incarnation, since = holder
        worker = self._workers.get(name)
        if worker is None or now - worker.seen > self.silent_s:
            return "worker_lost" if now - max(since, self.started) > self.silent_s else ""
        if worker.incarnation != incarnation:
            return "worker_lost"
        reported_after = worker.seen - since > self.grace_s
        return "worker_forgot" if reported_after and order.group not in worker.running else ""

    def _verdict(self, order: Order, reason: str) -> Verdict:
        if order.attempt + 1 >= self.max_attempts:
            return Verdict(order, True, reason)
        return Verdict(replace(order, attempt=order.attempt + 1), False, reason)
