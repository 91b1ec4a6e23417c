"""What a step cost whom: windows over the generators' totals, from barrier to barrier."""

from typing import Any

import pytest
from test_controller import config
from test_fleet import Fakes

from cluster.facts import StepWatch
from cluster.fleet import Fleet, Slot, Totals
from cluster.memory import MemoryQueue

COUNTS = {"generator": 2, "learner": 3, "scorer": 0, "spare": 0}


class Clock:
    """Stands in for ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Rig:
    """A watch over one slot whose totals a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr("cluster.facts.time", self.clock)
        self.fleet = Fleet(config(), MemoryQueue(), Fakes(), lambda *_: None)
        self.totals = Totals()
        self.fleet.slots = {"a": Slot("a", totals=self.totals, healthy=True)}
        self.watch = StepWatch(self.fleet)

    def step(self, number: int, seconds: float, **told: Any) -> Any:
        """The step that ends after so many seconds."""
        self.clock.now += seconds
        return self.watch.barrier({"step": number, **told}, COUNTS, False)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_loading_weights_is_neither_work_nor_waiting(rig: Rig) -> None:
    rig.watch.opened()
    rig.totals.busy_s, rig.totals.sync_s = 12.0, 2.0
    facts = rig.step(1, 10.0)
    assert (facts.step_s, facts.generator_busy_s, facts.rwt_s) == (10.0, 12.0, 2 * 10.0 - 2.0 - 12.0)
    rig.totals.sync_s = 3.0
    rig.totals.starved_s["no_work"] = 5.0
    facts = rig.step(2, 10.0)
    assert (facts.rwt_s, facts.generator_busy_s) == (5.0, 2 * 10.0 - 1.0 - 5.0), "one that tells is believed"


def test_what_generators_count_is_told_of_the_step(rig: Rig) -> None:
    rig.watch.opened()
    rig.totals.grown_tokens, rig.totals.demand_s = 300, 12.0
    facts = rig.step(1, 10.0, row_tokens=250)
    assert (facts.grown_tokens, facts.row_tokens, facts.demand) == (300, 250, 12.0 / 10.0 / 2)
    rig.totals.grown_tokens, rig.totals.demand_s = 340, 12.5
    facts = rig.step(2, 5.0)
    assert (facts.grown_tokens, facts.row_tokens, facts.demand) == (40, 0, pytest.approx(0.5 / 5.0 / 2))


def test_waits_of_learners_are_summed_over_them(rig: Rig) -> None:
    rig.watch.opened()
    facts = rig.step(1, 10.0, waits={"data": 2.0, "signal": 0.5}, sync_s=99.0)
    assert (facts.twt_s, facts.signal_s, facts.sync_s) == (6.0, 1.5, 10.0)


def test_only_whole_steps_are_told(rig: Rig) -> None:
    """After a restart, after a missed step, and when the loop asks twice, there is nothing to tell."""
    assert rig.step(7, 10.0) is None, "it began somewhere in the step"
    assert rig.step(8, 4.0).step_s == 4.0
    assert rig.step(8, 1.0) is None, "asked again"
    assert rig.step(9, 4.0).step_s == 5.0, "from the first answer"
    assert rig.step(11, 4.0) is None
    assert rig.step(12, 4.0).step_s == 4.0


def test_the_first_step_is_counted_from_the_opening(rig: Rig) -> None:
    rig.watch.opened()
    rig.clock.now += 3.0
    rig.watch.opened()
    facts = rig.step(1, 4.0)
    assert facts.step_s == 7.0 and facts.phase == "cold"
    assert rig.step(2, 4.0).phase == "train"


def test_a_generator_that_is_ill_is_told(rig: Rig) -> None:
    rig.watch.opened()
    rig.fleet.slots["b"] = Slot("b")
    assert rig.step(1, 1.0).unhealthy == 1
