"""Evaluation suites: one result a task, failures are no scores, honest intervals."""

import pytest

from cluster.evaluation import EvalBook, summarise, wilson
from cluster.messages import EvalEpisode
from cluster.types import Order, Purpose, Task


def orders(n: int) -> list[Order]:
    return [
        Order(
            group=f"s-{i}", task=Task(id=str(i), env="coin", seed=i), members=(f"s-{i}.0",),
            purpose=Purpose.EVAL, suite="s",
        )
        for i in range(n)
    ]  # fmt: skip


def test_wilson_interval_against_published_values() -> None:
    # Newcombe (1998), Statistics in Medicine 17: 81 of 263 gives 0.2553 to 0.3662.
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(20, 20)[1] == 1.0


def test_a_failure_is_counted_and_not_scored() -> None:
    episodes = [
        EvalEpisode(suite="s", group="a", success=1.0),
        EvalEpisode(suite="s", group="b", success=0.0),
        EvalEpisode(suite="s", group="c", error="failed(env)"),
    ]
    result = summarise("s", "greedy", episodes, 1.0)
    assert (result.success, result.failed, result.tasks) == (0.5, 1, 3)


async def test_a_suite_ends_when_every_task_has_one_result() -> None:
    book = EvalBook()
    book.begin("s", "greedy", orders(3), 0.0)
    taken = [book.next() for _ in range(4)]
    assert taken[3] is None
    lost = taken[0]
    assert lost is not None
    book.again(lost.group)
    assert book.next() == lost
    for i in range(3):
        book.record(EvalEpisode(suite="s", group=f"s-{i}", success=1.0), 1.0)
        book.record(EvalEpisode(suite="s", group=f"s-{i}", success=0.0), 2.0)
    result = await book.finished("s", 1.0)
    assert (result.success, result.tasks) == (1.0, 3), "the second result of a task is ignored"


def test_a_task_that_is_to_be_done_again_is_not_once_its_result_has_come() -> None:
    book = EvalBook()
    book.begin("s", "greedy", orders(2), 0.0)
    for group in (order.group for order in (book.next(), book.next()) if order is not None):
        book.again(group)
    book.record(EvalEpisode(suite="s", group="s-1", success=1.0), 1.0)
    left = book.next()
    assert left is not None and left.group == "s-0" and book.next() is None


async def test_a_suite_that_does_not_end_says_what_is_missing() -> None:
    book = EvalBook()
    book.begin("s", "greedy", orders(3), 0.0)
    book.record(EvalEpisode(suite="s", group="s-0", success=1.0), 1.0)
    with pytest.raises(TimeoutError, match="2 of 3 tasks missing"):
        await book.finished("s", 0.01)


def test_an_empty_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="no task"):
        EvalBook().begin("s", "greedy", [], 0.0)
