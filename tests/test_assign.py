"""Assignments: lost groups are found once, live ones are left alone."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.assign import Assignments
from cluster.types import Order, Task


def order(group: str, attempt: int = 0) -> Order:
    return Order(group=group, task=Task(id="t", env="coin", seed=0), members=(f"{group}.0",), attempt=attempt)


def test_a_running_group_is_left_alone() -> None:
    book = Assignments(max_attempts=3)
    book.given("g", "w", "one", now=0.0)
    for now in range(1, 100):
        book.pulled("w", "one", {"g": 0}, float(now))
        assert book.reconcile([order("g")], float(now)) == []


def test_a_replaced_worker_loses_its_groups_at_its_first_pull() -> None:
    book = Assignments(max_attempts=3)
    book.pulled("w", "one", {}, 0.0)
    book.given("g", "w", "one", now=0.0)
    book.pulled("w", "two", {}, 1.0)
    (verdict,) = book.reconcile([order("g")], 1.0)
    assert (verdict.reason, verdict.give_up, verdict.order.attempt) == ("worker_lost", False, 1)


def test_a_grant_that_never_arrived_is_ordered_again() -> None:
    book = Assignments(max_attempts=3, grace_s=3.0)
    book.pulled("w", "one", {}, 0.0)
    book.given("g", "w", "one", now=0.0)
    book.pulled("w", "one", {}, 2.0)
    assert book.reconcile([order("g")], 2.0) == [], "within the grace it may still be under way"
    book.pulled("w", "one", {}, 4.0)
    (verdict,) = book.reconcile([order("g")], 4.0)
    assert verdict.reason == "worker_forgot"


def test_a_silent_worker_is_lost() -> None:
    book = Assignments(max_attempts=3, silent_s=30.0)
    book.pulled("w", "one", {"g": 0}, 0.0)
    assert book.reconcile([order("g")], 29.0) == []
    (verdict,) = book.reconcile([order("g")], 31.0)
    assert verdict.reason == "worker_lost"


def test_a_restarted_controller_learns_assignments_from_pulls() -> None:
    book = Assignments(max_attempts=3, grace_s=3.0, started=100.0)
    assert book.reconcile([order("g"), order("h")], 101.0) == [], "workers have not spoken yet"
    book.pulled("w", "one", {"g": 0}, 102.0)
    (verdict,) = book.reconcile([order("g"), order("h")], 104.0)
    assert (verdict.order.group, verdict.reason) == ("h", "unassigned")


def test_the_last_attempt_is_given_up() -> None:
    book = Assignments(max_attempts=2)
    book.pulled("w", "one", {}, 0.0)
    book.given("g", "w", "one", 0.0)
    book.pulled("w", "two", {}, 1.0)
    (verdict,) = book.reconcile([order("g", attempt=1)], 1.0)
    assert verdict.give_up


@given(st.lists(st.sampled_from(["pull", "restart", "reconcile", "wait"]), max_size=60))
def test_attempts_only_grow_and_stay_below_the_bound(events: list[str]) -> None:
    book = Assignments(max_attempts=3, grace_s=1.0, silent_s=5.0)
    now, incarnation, live = 0.0, 0, order("g")
    book.given("g", "w", "0", now)
    for event in events:
        now += 0.7
        if event == "pull":
            book.pulled("w", str(incarnation), {}, now)
        elif event == "restart":
            incarnation += 1
        elif event == "reconcile":
            for verdict in book.reconcile([live], now):
                if verdict.give_up:
                    assert live.attempt == 2
                    return
                assert verdict.order.attempt == live.attempt + 1 < 3
                live = verdict.order
                book.given("g", "w", str(incarnation), now)
