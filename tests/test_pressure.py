"""The bound that follows an engine's memory: one answer to one shortage, and none that lasts for ever."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.pressure import Pressure

WIDTH = 8


def observe(bound: Pressure, usage: float, preemptions: int, turns: int, full: bool = True) -> bool:
    return bound.observe(usage, preemptions, binds=True, full=full, turns=turns, width=WIDTH)


def test_one_shortage_is_answered_once() -> None:
    bound = Pressure(64.0, 1.0, 1024.0)
    changed = [observe(bound, 0.95, n, turns=n) for n in range(1, WIDTH)]  # no turnover yet
    assert changed == [True] + [False] * (WIDTH - 2)
    assert bound.value == 32.0


def test_a_shortage_that_outlasts_its_answer_is_answered_again_each_turnover() -> None:
    bound = Pressure(64.0, 1.0, 1024.0)
    for n in range(1, 3 * WIDTH + 2):
        observe(bound, 0.95, n, turns=n)
    assert bound.value == 64.0 / 2**4


def test_growth_waits_for_room_and_for_a_turnover() -> None:
    bound = Pressure(64.0, 1.0, 1024.0)
    assert not observe(bound, 0.5, 0, turns=WIDTH - 1)
    assert observe(bound, 0.5, 0, turns=WIDTH) and bound.value == 80.0
    assert not any(observe(bound, 0.65, 0, turns=n * WIDTH) for n in range(2, 40))


def test_where_memory_is_planned_to_be_full_calm_gives_back_what_a_preemption_took() -> None:
    bound = Pressure(1.0, 0.25, 1.0, preempted=0.8)
    assert observe(bound, 0.97, 1, turns=1, full=False) and bound.value == 0.8
    grew = [n for n in range(1, 12) if observe(bound, 0.97, 1, turns=1 + n * WIDTH, full=False)]
    assert grew == [5]  # the turnover that thaws it, then four calm ones
    assert bound.value == 1.0


@given(
    reports=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 3 * WIDTH), st.booleans()), max_size=60
    )
)
def test_it_stays_in_its_range_and_never_grows_while_the_engine_preempts(
    reports: list[tuple[float, int, int, bool]],
) -> None:
    bound = Pressure(16.0, 2.0, 100.0)
    preemptions = turns = 0
    for usage, more, ended, full in reports:
        preemptions, turns, before = preemptions + more, turns + ended, bound.value
        changed = observe(bound, usage, preemptions, turns, full)
        assert 2.0 <= bound.value <= 100.0 and changed == (bound.value != before)
        assert not (more and bound.value > before)
