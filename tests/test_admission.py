"""Admission of tasks to a generator's KV memory: its promises over random traces, and what it buys."""

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.admission import Admission, Decision, Limits, ToolWaits

CAPACITY = 10_000


def admission(**limits: object) -> Admission:
    """An admission of 10k tokens without headroom."""
    return Admission(Limits(**{"capacity_tokens": CAPACITY, "headroom": 0.0} | limits))  # type: ignore[arg-type]


def ask(
    machine: Admission, task: str, tokens: int = 1000, growth: int = 100, now: float = 0.0, **more: object
) -> None:
    """Task ``g.m`` asks as a member of group ``g``."""
    given_ = {"group": task.split(".")[0], "tokens": tokens, "growth": growth, "now": now} | more
    machine.ask(task, **given_)  # type: ignore[arg-type]


def run_turn(machine: Admission, task: str, tokens: int = 1000, now: float = 0.0, **more: object) -> None:
    """Ask, start, and end a turn at once; the task must be started."""
    ask(machine, task, tokens=tokens, now=now, **more)
    assert task in machine.decide(now).start
    machine.turn_ended(task, tokens + 100, now)


# -- single rules -----------------------------------------------------------------------------------


def test_tasks_start_while_their_promises_fit() -> None:
    machine = admission()
    for n in range(12):
        ask(machine, f"g{n}.0", tokens=900, growth=100)
    # the tenth would fit, but not the turns that it has before it
    assert machine.decide(0.0) == Decision(start=tuple(f"g{n}.0" for n in range(9)))
    figures = machine.figures()
    assert (figures.promised, figures.free, figures.queued, figures.active) == (9000, 1000, 3, 9)
    machine.ended("g3.0", 1.0)
    assert machine.decide(1.0).start == ("g9.0",)


def test_demand_is_what_all_tasks_want_over_time() -> None:
    """Those without a place count like the mean of those with one."""
    machine = admission()
    assert machine.demand_s(5.0) == 0.0, "nobody wants anything"
    for n in range(12):
        ask(machine, f"g{n}.0", tokens=900, growth=100, now=5.0)
    machine.decide(5.0)
    assert machine.demand_s(7.0) == pytest.approx(2.0 * 1.2), "nine of twelve were promised 9,000 of 10,000"
    assert machine.demand_s(7.0) == pytest.approx(2.4), "no time has passed"
    for n in range(9, 12):
        machine.ended(f"g{n}.0", 7.0)
    machine.decide(8.0)
    assert machine.demand_s(9.0) == pytest.approx(2.4 + 2.0 * 0.9)


def test_demand_is_of_the_time_before_what_happens() -> None:
    """A task that comes was not there before, one that leaves was, whenever decisions are taken."""
    machine = admission()
    for n in range(10):
        ask(machine, f"g{n}.0", tokens=4900, growth=100, now=10.0 * n)
        machine.decide(10.0 * n)
        machine.turn_ended(f"g{n}.0", 5000, 10.0 * n + 1.0)
        machine.ended(f"g{n}.0", 10.0 * n + 2.0)
    assert machine.demand_s(100.0) == pytest.approx(10 * (0.5 + 0.51)), "2 s of each 10 s"


def test_demand_until_a_turn_is_asked_for_or_withdrawn() -> None:
    machine = admission()
    run_turn(machine, "g.0", tokens=2900)
    assert machine.demand_s(0.0) == 0.0
    ask(machine, "g.0", tokens=3400, now=2.0)
    machine.decide(2.0)
    assert machine.demand_s(2.0) == pytest.approx(2 * 0.31), "3,000 and a turn"
    ask(machine, "g.1", now=4.0)
    assert machine.demand_s(4.0) == pytest.approx(2 * 0.31 + 2 * 0.35), "one that has come just now"
    machine.ended("g.1", 4.0)
    machine.withdraw("g.0", 6.0)
    assert machine.demand_s(6.0) == pytest.approx(2 * 0.31 + 4 * 0.35), "observations come later"
    assert machine.demand_s(7.0) > 2 * 0.31 + 5 * 0.35 + 0.01, "now another one is expected"


def test_demand_counts_the_budget_of_its_time() -> None:
    machine = admission()
    ask(machine, "g.0", tokens=4900, growth=100)
    machine.decide(0.0)
    machine.pressure(0.95, 1, 2.0)
    assert machine.figures().cap == 0.8, "from now on"
    assert machine.demand_s(2.0) == pytest.approx(2 * 0.5)
    assert machine.demand_s(3.0) == pytest.approx(2 * 0.5 + 0.5 / 0.8)


@pytest.mark.parametrize("capacity", [0, CAPACITY])
def test_where_memory_admits_nobody_demand_is_not_told(capacity: int) -> None:
    machine = admission(policy="request", capacity_tokens=capacity)
    for n in range(30):
        ask(machine, f"g{n}.0", tokens=900, growth=100)
    machine.decide(0.0)
    assert (machine.figures().active, machine.demand_s(9.0)) == (30, 0.0)


def test_asking_again_changes_nothing() -> None:
    machine = admission()
    ask(machine, "g.0")
    ask(machine, "g.0", tokens=5000)
    assert machine.decide(0.0).start == ("g.0",)
    ask(machine, "g.0")
    assert machine.decide(0.0) == Decision()
    assert machine.figures().promised == 1100


def test_a_task_larger_than_the_budget_runs_alone() -> None:
    machine = admission()
    ask(machine, "big.0", tokens=50_000)
    ask(machine, "small.0")
    assert machine.decide(0.0).start == ("big.0",)
    machine.turn_ended("big.0", 50_100, 1.0)
    assert machine.decide(1.0) == Decision(start=("small.0",), park=("big.0",))
    ask(machine, "big.0", tokens=50_200, now=2.0)
    assert machine.decide(2.0) == Decision()
    machine.turn_ended("small.0", 1100, 3.0)
    assert machine.decide(3.0) == Decision(start=("big.0",), park=("small.0",))


def test_holds_end_by_themselves() -> None:
    machine = admission(prefill_tok_s=1000.0)
    run_turn(machine, "a.0", tokens=4000)
    ask(machine, "b.0", tokens=5000)
    assert machine.decide(0.0).start == ("b.0",)
    ask(machine, "c.0", tokens=1000)
    assert machine.decide(0.0) == Decision()
    due = machine.next_decision(0.0)
    assert due is not None and 5.0 < due < 15.0
    assert machine.decide(due - 1e-6) == Decision()
    assert machine.decide(due) == Decision(start=("c.0",), park=("a.0",))


def test_an_idle_rank_breaks_holds() -> None:
    machine = admission(prefill_tok_s=1.0)
    run_turn(machine, "a.0", tokens=6000)
    ask(machine, "b.0", tokens=6000)
    assert machine.decide(0.0) == Decision(start=("b.0",), park=("a.0",))


def test_the_fuller_group_keeps_its_place() -> None:
    machine = admission(prefill_tok_s=1.0)
    run_turn(machine, "a.0", tokens=3000)
    run_turn(machine, "b.0", tokens=3000)
    ask(machine, "c.0", tokens=3000)
    assert machine.decide(0.0).start == ("c.0",)
    machine.group_progress("a", 0.75, 0.0)
    machine.group_progress("b", 0.5, 0.0)
    ask(machine, "d.0", tokens=3000, group_done=0.875)
    assert machine.decide(0.0) == Decision(start=("d.0",), park=("b.0",))


def test_weights_that_changed_free_every_hold() -> None:
    machine = admission(prefill_tok_s=1.0)
    run_turn(machine, "a.0", tokens=6000)
    ask(machine, "b.0", tokens=2000)
    assert machine.decide(0.0).start == ("b.0",)
    ask(machine, "c.0", tokens=2000)
    assert machine.decide(1.0) == Decision()
    machine.synced(1.0)
    assert machine.decide(1.0) == Decision(start=("c.0",), park=("a.0",))


def test_a_turn_under_old_weights_is_not_worth_holding() -> None:
    machine = admission(prefill_tok_s=1.0)
    ask(machine, "a.0", tokens=6000)
    ask(machine, "b.0", tokens=1000)
    machine.decide(0.0)
    machine.synced(0.0)
    machine.turn_ended("a.0", 6100, 0.0)
    ask(machine, "c.0", tokens=4000)
    assert machine.decide(0.0) == Decision(start=("c.0",), park=("a.0",))


def test_an_evaluation_takes_the_place_of_training() -> None:
    machine = admission(prefill_tok_s=1.0, forget_s=1e12)
    run_turn(machine, "a.0", tokens=4000, group_done=0.99)
    ask(machine, "b.0", tokens=4000)
    assert machine.decide(0.0).start == ("b.0",)
    ask(machine, "eval.0", tokens=4000, evaluation=True)
    assert machine.decide(0.0) == Decision(start=("eval.0",), park=("a.0",))
    machine.turn_ended("eval.0", 4100, 1e9)  # however long it waits
    ask(machine, "c.0", tokens=4000, group_done=0.99, now=2e9)
    assert machine.decide(2e9) == Decision()


def test_a_rank_does_not_idle_for_an_evaluation_that_training_cannot_make_room_for() -> None:
    machine = admission(prefill_tok_s=1.0)
    run_turn(machine, "t.0", tokens=1000)
    run_turn(machine, "ea.0", tokens=6000, evaluation=True)
    ask(machine, "t.0", tokens=1200, now=1.0)
    ask(machine, "eb.0", tokens=6000, now=1.0, evaluation=True)
    assert machine.decide(1.0) == Decision(start=("t.0",))  # 3,900 tokens would be free without it
    machine.turn_ended("t.0", 1300, 2.0)
    machine.ended("ea.0", 2.0)
    ask(machine, "t.0", tokens=1400, now=2.0)
    assert machine.decide(2.0).start[0] == "eb.0"


def test_training_stands_back_for_an_evaluation_without_room() -> None:
    machine = admission()
    run_turn(machine, "a.0", tokens=4000)
    ask(machine, "b.0", tokens=5000)
    machine.decide(0.0)
    ask(machine, "eval.0", tokens=9000, evaluation=True)
    ask(machine, "a.0", tokens=4200)
    ask(machine, "c.0", tokens=10)
    assert machine.decide(0.0) == Decision()
    machine.turn_ended("b.0", 5100, 1.0)
    decision = machine.decide(1.0)
    assert decision.start == ("eval.0",) and set(decision.park) == {"a.0", "b.0"}


def test_diversity_bounds_the_share_of_a_kind() -> None:
    machine = admission(diversity=0.5)
    for n in range(10):
        ask(machine, f"x{n}.0", kind="x", now=float(n))
    ask(machine, "y0.0", kind="y", now=20.0)
    ask(machine, "y1.0", kind="y", now=20.0)
    start = machine.decide(20.0).start
    kinds = [name[0] for name in start]
    assert kinds[:4] == ["x", "y", "x", "y"]
    assert len(kinds) == 8  # once no other kind waits, the rest may come


def test_max_tasks_bounds_residents() -> None:
    machine = admission(max_tasks=2, prefill_tok_s=1.0)
    for n in range(3):
        ask(machine, f"g{n}.0", tokens=100)
    assert len(machine.decide(0.0).start) == 2
    machine.turn_ended("g0.0", 200, 0.0)
    assert machine.decide(0.0) == Decision()  # its place is held
    ask(machine, "eval.0", tokens=100, evaluation=True)
    assert machine.decide(0.0) == Decision(start=("eval.0",), park=("g0.0",))


def test_waiting_outweighs_priority_in_the_end() -> None:
    machine = admission()
    ask(machine, "busy.0", tokens=9900)
    machine.decide(0.0)
    ask(machine, "old.0", tokens=9000, now=1.0)
    served = None
    now = 1.0
    for n in range(200):  # a stream of askers from nearly complete groups, one place
        now += 10.0
        ask(machine, f"rich{n}.0", tokens=9000, group_done=0.9, now=now)
        machine.ended("busy.0" if n == 0 else served, now)
        (served,) = machine.decide(now).start
        if served == "old.0":
            break
    assert served == "old.0" and n > 10


def test_time_waited_before_counts() -> None:
    machine = admission(max_tasks=1)
    for n, waited in enumerate([0.0, 5.0, 600.0]):
        ask(machine, f"g{n}.0", now=float(n), waited=waited, group_done=0.0 if waited else 0.9)
    order = []
    for _ in range(3):
        (name,) = machine.decide(10.0).start
        order.append(name)
        machine.ended(name, 10.0)
    assert order == ["g2.0", "g0.0", "g1.0"]


def test_the_groups_first_turn_is_the_probe_of_the_others() -> None:
    machine = admission()
    ask(machine, "g.0", tokens=100, growth=9000)
    ask(machine, "g.1", tokens=100, growth=9000)
    assert machine.decide(0.0).start == ("g.0",)  # unknown: all that it may grow
    machine.turn_ended("g.0", 150, 1.0)
    assert machine.decide(1.0).start == ("g.1",)
    assert machine.footprint("g.1") == 150


def test_withdrawn_requests_free_what_they_would_take() -> None:
    machine = admission()
    ask(machine, "a.0", tokens=6000)
    ask(machine, "b.0", tokens=6000)
    machine.decide(0.0)
    machine.withdraw("b.0", 0.0)
    assert machine.figures().queued == 0
    with pytest.raises(KeyError):
        machine.footprint("b.0")
    machine.withdraw("a.0", 0.0)
    assert machine.figures().active == 0 and machine.has_place("a.0")
    ask(machine, "a.0", tokens=6000)
    assert machine.decide(0.0).start == ("a.0",)


def test_tasks_that_left_unseen_are_forgotten() -> None:
    machine = admission(forget_s=100.0)
    run_turn(machine, "a.0")
    run_turn(machine, "e.0", evaluation=True)
    machine.decide(100.0)
    assert machine.figures().resident == 2
    machine.decide(101.0)
    figures = machine.figures()
    assert (figures.resident, figures.promised, figures.parked, figures.waiting) == (0, 0, 0, 0)


def test_request_policy_starts_everything_in_order() -> None:
    machine = Admission(Limits(capacity_tokens=0, policy="request"))
    for n in range(100):
        ask(machine, f"g{n}.0", tokens=10_000, now=float(n))
    assert machine.decide(100.0).start == tuple(f"g{n}.0" for n in range(100))
    machine.turn_ended("g0.0", 10_100, 100.0)
    assert machine.decide(1e9) == Decision()


def test_aimd_grows_while_it_binds_and_cuts_once_per_shortage() -> None:
    machine = admission(policy="aimd")
    for n in range(64):
        ask(machine, f"g{n}.0", tokens=100)
    assert len(machine.decide(0.0).start) == 16
    for n in range(16):
        machine.turn_ended(f"g{n}.0", 200, 1.0)
    machine.decide(1.0)
    machine.pressure(0.3, 0, 1.0)
    assert machine.figures().cap == 20.0 and len(machine.decide(1.0).start) == 4
    machine.pressure(0.95, 0, 2.0)
    machine.pressure(0.95, 0, 3.0)
    assert machine.figures().cap == 16.0  # frozen until drained
    machine.pressure(0.5, 0, 4.0)
    machine.pressure(0.5, 1, 5.0)
    assert machine.figures().cap == 8.0  # a preemption halves it


def test_the_budget_gives_way_when_the_engine_preempts() -> None:
    machine = admission()
    for n in range(9):
        run_turn(machine, f"g{n}.0", tokens=800)
    ask(machine, "z.0", tokens=100)
    machine.decide(0.0)
    machine.pressure(0.99, 1, 0.0)
    decision = machine.decide(0.0)
    assert decision.park and machine.figures().promised <= machine.figures().budget == 8000


@pytest.mark.parametrize(
    ("field", "value"), [("capacity_tokens", 0), ("headroom", 1.0), ("diversity", 0.0), ("max_tasks", -1)]
)
def test_limits_refuse_nonsense_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value}"):
        admission(**{field: value})


# -- holds ------------------------------------------------------------------------------------------


@given(
    waits=st.lists(st.floats(0.0, 1e4), min_size=20, max_size=256),
    footprint=st.floats(1.0, 1e6),
    recompute_s=st.floats(1e-3, 1e3),
)
def test_the_hold_is_the_best_of_all_observed_waits(
    waits: list[float], footprint: float, recompute_s: float
) -> None:
    tools = ToolWaits()
    for wait in waits:
        tools.observe("t", wait)
    tools._tools["t"]._build()  # as if the hull had been due
    hold = tools.best_hold("t", footprint, recompute_s, 1e5)

    def value(tau: float) -> float:
        saved = sum(wait <= tau for wait in waits) * recompute_s
        return (saved - sum(min(wait, tau) for wait in waits) * footprint / 1e5) / len(waits)

    best = max([0.0, *(value(wait) for wait in waits)])
    assert value(hold) >= best - 1e-6 * max(1.0, abs(best))


def test_holds_follow_the_tool_and_fall_back() -> None:
    tools = ToolWaits()
    assert tools.best_hold("quick", 1000, 1.0, 10_000) == pytest.approx(10.0)  # ski rental
    for _ in range(30):
        tools.observe("quick", 0.5)
        tools.observe("slow", 500.0)
    assert tools.best_hold("quick", 1000, 1.0, 10_000) == 0.5
    assert tools.best_hold("slow", 1000, 1.0, 10_000) == 0.0
    assert tools.best_hold("unseen", 1000, 1.0, 10_000) == 0.5  # pooled: half are quick


# -- random traces ----------------------------------------------------------------------------------


class Trace(RuleBasedStateMachine):
    """Any order of events; after each, the decision and the ledger are held to the promises."""

    @initialize(
        max_tasks=st.sampled_from([0, 0, 3]),
        diversity=st.sampled_from([1.0, 0.5]),
        context=st.sampled_from(["protect_long", "protect_short"]),
        rate=st.sampled_from([50.0, 5000.0]),
    )
    def begin(self, max_tasks: int, diversity: float, context: str, rate: float) -> None:
        self.machine = admission(
            max_tasks=max_tasks, diversity=diversity, context=context, prefill_tok_s=rate, forget_s=1e9
        )
        self.max_tasks = max_tasks
        self.now = 0.0
        self.serial = 0
        self.state: dict[str, str] = {}
        self.place: set[str] = set()
        self.tokens: dict[str, int] = {}
        self.evals: set[str] = set()

    def tasks(self, *states: str) -> list[str]:
        return [task for task, state in self.state.items() if state in states]

    def decide(self) -> None:
        machine = self.machine
        decision = machine.decide(self.now)
        for task in decision.park:
            assert task in self.place and self.state[task] in ("waiting", "asking")
            assert task not in self.evals
            self.place.discard(task)
        for task in decision.start:
            assert self.state[task] == "asking"
            self.state[task] = "active"
            self.place.add(task)
        figures = machine.figures()
        if self.max_tasks:
            assert len(self.place) <= max(self.max_tasks, 1)
        parkable = [t for t in self.tasks("waiting", "asking") if t in self.place and t not in self.evals]
        if figures.promised > figures.budget:  # growth beyond the estimates: all that may go has gone
            assert not [t for t in parkable if self.state[t] == "waiting"]
            assert not [t for t in decision.start if t not in self.evals]
        left = [t for t in self.tasks("asking") if t in self.evals]
        if left:
            assert not [t for t in decision.start if t not in self.evals]
        room = figures.budget - figures.promised + sum(machine._tasks[t].held for t in parkable)
        for task in left:
            new = task not in self.place
            slots = not (self.max_tasks and new) or len(self.place) - len(parkable) < self.max_tasks
            if new and not [t for t in left if t in self.place]:
                first = min(machine.footprint(t) for t in left)
                if len(left) == 1:
                    assert first > room or not slots
        if not self.tasks("active") and self.tasks("asking"):
            held_by_evals = [t for t in self.tasks("waiting") if t in self.evals]
            assert held_by_evals, "a rank with askers stands idle"
        assert machine.decide(self.now) == Decision()

    @invariant()
    def figures_agree(self) -> None:
        if not hasattr(self, "machine"):
            return
        figures = self.machine.figures()
        assert figures.active == len(self.tasks("active"))
        assert figures.queued == len(self.tasks("asking"))
        assert figures.resident == len(self.place)
        assert figures.parked == len([t for t in self.tasks("waiting") if t not in self.place])
        assert figures.promised == sum(self.machine._tasks[task].held for task in self.place)
        assert set(self.machine._tasks) == set(self.state)
        assert sum(len(g.members) for g in self.machine._groups.values()) == len(self.state)

    @rule(
        tokens=st.integers(1, 12_000),
        evaluation=st.integers(0, 5),
        done=st.sampled_from([0.0, 0.25, 0.75]),
        kind=st.sampled_from("xy"),
    )
    def arrives(self, tokens: int, evaluation: int, done: float, kind: str) -> None:
        self.serial += 1
        task = f"g{self.serial // 3}.{self.serial}"
        ask(
            self.machine,
            task,
            tokens=tokens,
            growth=500,
            now=self.now,
            group_done=done,
            kind=kind,
            evaluation=evaluation == 0,
        )
        self.state[task], self.tokens[task] = "asking", tokens
        if evaluation == 0:
            self.evals.add(task)
        self.decide()

    @precondition(lambda self: self.tasks("waiting"))
    @rule(pick=st.integers(0, 99), answer=st.integers(0, 800))
    def returns(self, pick: int, answer: int) -> None:
        waiting = self.tasks("waiting")
        task = waiting[pick % len(waiting)]
        self.tokens[task] += answer
        ask(self.machine, task, tokens=self.tokens[task], growth=500, now=self.now, tool="t")
        self.state[task] = "asking"
        self.decide()

    @precondition(lambda self: self.tasks("active"))
    @rule(pick=st.integers(0, 99), out=st.integers(1, 500))
    def samples(self, pick: int, out: int) -> None:
        active = self.tasks("active")
        task = active[pick % len(active)]
        self.tokens[task] += out
        self.machine.turn_ended(task, self.tokens[task], self.now, "t")
        self.state[task] = "waiting"
        self.decide()

    @precondition(lambda self: self.state)
    @rule(pick=st.integers(0, 99))
    def ends(self, pick: int) -> None:
        task = list(self.state)[pick % len(self.state)]
        self.machine.ended(task, self.now)
        del self.state[task]
        self.place.discard(task)
        self.evals.discard(task)
        self.decide()

    @precondition(lambda self: self.tasks("active", "asking"))
    @rule(pick=st.integers(0, 99))
    def is_withdrawn(self, pick: int) -> None:
        asking = self.tasks("active", "asking")
        task = asking[pick % len(asking)]
        self.machine.withdraw(task, self.now)
        if task in self.machine._tasks:
            self.state[task] = "waiting"
        else:
            assert task not in self.place
            del self.state[task]
            self.evals.discard(task)
        self.decide()

    @rule(group=st.integers(0, 10), done=st.floats(0.0, 1.0))
    def progresses(self, group: int, done: float) -> None:
        self.machine.group_progress(f"g{group}", done, self.now)
        self.decide()

    @rule(seconds=st.sampled_from([0.5, 5.0, 500.0]))
    def time_passes(self, seconds: float) -> None:
        due = self.machine.next_decision(self.now)
        self.now += seconds
        if due is not None and due > self.now:  # nothing but time has changed
            assert self.machine.decide(self.now) == Decision()
        self.decide()

    @rule()
    def syncs(self) -> None:
        self.machine.synced(self.now)
        self.decide()

    @rule(usage=st.floats(0.0, 1.0), preempted=st.integers(0, 20))
    def reports(self, usage: float, preempted: int) -> None:
        self.machine.pressure(usage, int(preempted == 0), self.now)
        self.decide()


Trace.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_random_traces = Trace.TestCase


@given(
    done=st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 0.875]), min_size=2, max_size=9),
    late=st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 0.875]), min_size=2, max_size=9),
    places=st.integers(1, 9),
    synced=st.booleans(),
)
def test_of_equals_the_fuller_group_keeps_its_place(
    done: list[float], late: list[float], places: int, synced: bool
) -> None:
    machine = admission(prefill_tok_s=1.0)
    now = dict(enumerate(done))
    for n, share in now.items():
        ask(machine, f"g{n}.0", growth=0, group_done=share)
    assert len(machine.decide(0.0).start) == len(done)
    for n in now:
        machine.turn_ended(f"g{n}.0", 1000, 0.0)
    for n, share in enumerate(late[: len(done)]):  # groups get fuller while their tasks wait
        now[n] = max(now[n], share)
        machine.group_progress(f"g{n}", now[n], 0.0)
    if synced:
        machine.synced(0.0)
    ask(
        machine,
        "e.0",
        tokens=1000 * (10 - len(done)) + 1000 * min(places, len(done)),
        growth=0,
        evaluation=True,
    )
    decision = machine.decide(0.0)
    assert decision.start == ("e.0",) and len(decision.park) == min(places, len(done))
    parked = {int(task[1:-2]) for task in decision.park}
    assert all(now[n] <= now[kept] for n in parked for kept in now.keys() - parked)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tasks=st.integers(1, 40),
    max_tasks=st.sampled_from([0, 1, 4]),
    diversity=st.sampled_from([1.0, 0.4]),
    largest=st.sampled_from([500, 4000, 15_000]),
)
def test_everyone_is_served_and_nothing_is_left(
    seed: int, tasks: int, max_tasks: int, diversity: float, largest: int
) -> None:
    rng = random.Random(seed)
    machine = admission(max_tasks=max_tasks, diversity=diversity, prefill_tok_s=100.0)
    left = {f"g{n // 4}.{n}": rng.randint(1, 6) for n in range(tasks)}
    size = {name: rng.randint(1, largest) for name in left}
    evals = {name for name in left if rng.random() < 0.2}
    asking, active, outside, now = set(left), set(), set(), 0.0
    for name in left:
        ask(machine, name, tokens=size[name], growth=400, kind=name[-1], evaluation=name in evals)
    for _ in range(200 * tasks):
        now += rng.choice([0.0, 0.1, 10.0])
        decision = machine.decide(now)
        asking -= set(decision.start)
        active |= set(decision.start)
        if not left:
            break
        move = rng.choice([pool for pool in (active, outside) if pool])  # both empty: a deadlock
        name = rng.choice(sorted(move))
        move.remove(name)
        if move is outside:
            size[name] += rng.randint(0, 300)
            ask(machine, name, tokens=size[name], growth=400, now=now)
            asking.add(name)
            continue
        size[name] += rng.randint(1, 400)
        left[name] -= 1
        machine.turn_ended(name, size[name], now, "t")
        outside.add(name)
        if not left[name]:
            outside.remove(name)
            del left[name]
            machine.ended(name, now)
    assert not left
    figures = machine.figures()
    assert (figures.promised, figures.resident, figures.parked, figures.queued) == (0, 0, 0, 0)
    assert not machine._tasks and not machine._groups and not machine._idle
    queues = [machine._back, machine._evals, machine._holds, machine._unexpired, machine._expired]
    assert not any(queues) and all(len(queue) <= 64 for queue in queues)


def test_twenty_thousand_tasks_are_decided_in_milliseconds() -> None:
    machine = Admission(Limits(capacity_tokens=20_000_000))
    for n in range(20_000):
        ask(machine, f"g{n // 8}.{n}", tokens=1500, growth=500)
    active = list(machine.decide(0.0).start)
    assert 5000 < len(active) < 20_000
    rng, spent = random.Random(0), 0.0
    for n in range(2000):
        name = active.pop(rng.randrange(len(active)))
        machine.turn_ended(name, 2000 + n, float(n), "tool")
        began = time.perf_counter()
        active += machine.decide(float(n)).start
        spent += time.perf_counter() - began
    assert spent / 2000 < 0.005
