"""The switch ledger of a run, read from its trace and the controller's records."""

from typing import Any

from deploy.moves import counts_of, line_of, moves_of, roles_line

RECORD = {"reason": "", "predicted_s": 0.0, "cost_predicted_s": 5.0, "cost_s": 4.2, "before_s": 2.0}


def planned(move: int, t: float, source: str, target: str, **more: Any) -> dict[str, Any]:
    return {"event": "move_planned", "t": t, "move": move, "rank": 1, "source": source, "target": target,
            "epoch": 3, "reason": "asked for", "cost_s": 5.0, "predicted_s": 0.0} | more  # fmt: skip


TRACE = [
    planned(0, 100.0, "generator", "learner", predicted_s=0.8),
    {"event": "move_begun", "t": 108.0, "move": 0},
    {"event": "move_made", "t": 112.0, "move": 0, "parts": {"gather": 0.5, "regroup": 3.0, "total": 3.5}},
    {"event": "move_done", "t": 112.2, "move": 0, "kind": "generator>learner", "seconds": 4.2, "cost_s": 5.0},
    planned(1, 130.0, "learner", "generator"),
    {"event": "move_undone", "t": 140.0, "move": 1, "error": "its actor was not ready"},
]
SWITCHES = [
    RECORD | {"id": 0, "move": "generator>learner", "step": 4, "realised_s": 0.7, "steps": 3, "void": ""},
    RECORD | {"id": 1, "move": "learner>generator", "step": 9, "realised_s": None, "steps": 0,
              "void": "undone"},
]  # fmt: skip


def test_a_move_has_its_times_parts_and_saving() -> None:
    first, second = moves_of(TRACE, SWITCHES)
    assert (first["state"], first["prepare_s"], first["seconds"], first["step"]) == ("done", 8.0, 4.2, 4)
    assert first["parts"] == {"gather": 0.5, "regroup": 3.0}
    assert (first["predicted_s"], first["realised_s"], first["measured_steps"]) == (0.8, 0.7, 3)
    assert (second["state"], second["seconds"]) == ("undone", None)
    assert second["error"] == "its actor was not ready"
    assert second["unmeasured"] == "undone"


def test_records_that_do_not_belong_to_the_trace_are_left_out() -> None:
    assert [move["realised_s"] for move in moves_of(TRACE, SWITCHES[:1])] == [0.7, None]
    other = [SWITCHES[0] | {"move": "scorer>learner"}]
    assert [move["realised_s"] for move in moves_of(TRACE, other)] == [None, None]
    assert moves_of(TRACE, [])[0]["state"] == "done"
    assert moves_of(TRACE[4:], SWITCHES)[0]["step"] == 9, "the records of an earlier run come first"
    late = {"event": "move_done", "t": 131.0, "move": 0, "kind": "generator>learner", "seconds": 1.0}
    assert moves_of([late], []) == []
    assert moves_of([*TRACE[4:5], late], [])[0]["state"] == "planned", "the end of an earlier move"


def test_lines_say_what_happened() -> None:
    first, second = moves_of(TRACE, SWITCHES)
    assert line_of(first) == (
        "rank 1 generator > learner, done, prepared in 8.0 s, switched in 4.20 s (expected 5.00): "
        "regroup 3.00, gather 0.50; saving per step: predicted 0.80 s, realised 0.70 s"
    )
    assert line_of(second) == "rank 1 learner > generator, undone; its actor was not ready"


def test_roles_in_a_line() -> None:
    ranks = {"0": "learner", "1": "generator", "2": "generator", "3": "lost", "4": "spare"}
    assert counts_of(ranks) == {"generator": 2, "learner": 1, "spare": 1, "lost": 1}
    roles = {"ranks": ranks, "move": "1: generator > learner", "phase": "planned", "target": {"learner": 2}}
    assert roles_line(roles) == (
        "generator 2, learner 1, spare 1, lost 1; rank 1: generator > learner planned; target learner 2"
    )
    assert roles_line(roles | {"move": None, "target": {}}).endswith("lost 1")
