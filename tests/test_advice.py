"""Warnings about rewards: each once, at the right step, and none where all is well."""

from typing import Any

from deploy.advice import CONSTANT_STEPS, Advice


def record(step: int, constant: float = 0.5, **rewards: float) -> dict[str, Any]:
    return {"step": step, "reward": {"outcome": 0.25, **rewards}, "group_zero_std_fraction": constant}


def test_a_weight_that_nothing_pays_is_named_with_what_is_paid() -> None:
    advice = Advice({"succes": 1.0, "success": 1.0, "off": 0.0})
    assert advice.look({"step": 0}) == [], "no batch yet"
    [line] = advice.look(record(1, success=0.5, length=3.0))
    assert "reward.weights.succes:" in line and line.endswith("they pay: length, success")
    assert advice.look(record(1, success=0.5)) == advice.look(record(2, success=0.5)) == []


def test_an_environment_that_pays_nothing() -> None:
    assert Advice({"success": 1.0}).look(record(1))[0].endswith("they pay nothing")


def test_right_weights_say_nothing() -> None:
    assert Advice({"success": 1.0}).look(record(1, success=0.5)) == []


def test_constant_batches_in_a_row_are_said_once_and_a_row_starts_anew() -> None:
    advice = Advice({"success": 1.0})
    said: list[tuple[int, str]] = []
    shares = [1.0] * (CONSTANT_STEPS - 1) + [0.9] + [1.0] * (CONSTANT_STEPS + 3)
    for step, share in enumerate(shares, start=1):
        for _ in range(2):  # the same record is seen twice
            said += [(step, line) for line in advice.look(record(step, share, success=0.0))]
    assert [step for step, _ in said] == [2 * CONSTANT_STEPS]
    assert "every group's members had the same reward (mean 0.25)" in said[0][1]


def test_batches_that_nobody_showed_us_end_a_row() -> None:
    advice = Advice({"success": 1.0})
    steps = [1, 2, 3, 5, *range(6, 5 + CONSTANT_STEPS)]
    said = [step for step in steps if advice.look(record(step, 1.0, success=0.0))]
    assert said == [4 + CONSTANT_STEPS]
