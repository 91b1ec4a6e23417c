"""Moves of ranks as people read them: the switch ledger, from a run's trace and the controller's status."""

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("generator", "learner", "scorer", "spare", "lost")


def moves_of(
    trace: Sequence[Mapping[str, Any]], switches: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One entry per planned move, oldest first.

    ``trace`` are events of the run, of which those of moves are read: when each was planned and begun, its
    parts in seconds, how it ended. ``switches`` are the controller's records (the newest), which alone know
    what a move saved. Both tell a move by its id.
    """
    moves: dict[int, dict[str, Any]] = {}
    for event in trace:
        name = str(event["event"])
        if name == "move_planned":
            moves[int(event["move"])] = _planned(event)
        elif name in ("move_begun", "move_made", "move_done", "move_undone"):
            _note(name, event, moves)
    for record in switches:
        move = moves.get(int(record["id"]))
        if move is None or move["kind"] != record["move"]:
            continue  # of an earlier history, whose trace is another file's
        move["step"] = record["step"]
        move["realised_s"], move["measured_steps"] = record["realised_s"], record["steps"]
        move["unmeasured"] = record["void"]
    return list(moves.values())


def _planned(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "move": int(event["move"]),
        "rank": int(event["rank"]),
        "kind": f"{event['source']}>{event['target']}",
        "reason": event["reason"],
        "state": "planned",
        "planned_at": event["t"],
        "prepare_s": None,  # plan to barrier: the new role's actor got ready beside the old one
        "seconds": None,  # barrier to serving
        "cost_s": event["cost_s"],
        "parts": {},
        "predicted_s": event["predicted_s"],
        "realised_s": None,
        "error": "",
    }


def _note(name: str, event: Mapping[str, Any], moves: Mapping[int, dict[str, Any]]) -> None:
    """Take one later event of a move; those of a move that this trace has not planned are left out."""
    move = moves.get(int(event["move"]))
    if move is None:
        return
    if name == "move_begun":
        move["state"] = "begun"
        move["prepare_s"] = round(event["t"] - move["planned_at"], 3)
    elif name == "move_made":
        move["parts"] = {part: seconds for part, seconds in event["parts"].items() if part != "total"}
    elif name == "move_done":
        move["state"], move["seconds"] = "done", event["seconds"]
    else:
        move["state"], move["error"] = "undone", event["error"]


def line_of(move: Mapping[str, Any]) -> str:
    """``rank 1 generator > learner, done, prepared in 8.1 s, switched in 4.20 s (expected 6.00): ...``"""
    source, _, target = move["kind"].partition(">")
    text = f"rank {move['rank']} {source} > {target}, {move['state']}"
    if move["prepare_s"] is not None:
        text += f", prepared in {move['prepare_s']:.1f} s"
    if move["seconds"] is not None:
        text += f", switched in {move['seconds']:.2f} s (expected {move['cost_s']:.2f})"
    if move["parts"]:
        parts = sorted(move["parts"].items(), key=lambda part: -part[1])
        text += ": " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts)
    if move["predicted_s"]:
        saved = move.get("realised_s")
        text += f"; saving per step: predicted {move['predicted_s']:.2f} s"
        if saved is not None:
            text += f", realised {saved:.2f} s"
        elif move.get("unmeasured"):
            text += f", not measured: {move['unmeasured']}"
    return f"{text}; {move['error']}" if move["error"] else text


def counts_of(ranks: Mapping[str, str]) -> dict[str, int]:
    """Ranks by role, those that no node carries any more as ``lost``; ``ranks`` maps number to role."""
    counts = {role: sum(held == role for held in ranks.values()) for role in ROLES}
    return {role: count for role, count in counts.items() if count}


def roles_line(roles: Mapping[str, Any]) -> str:
    """``generator 2, learner 1, spare 1; rank 1: generator > learner planned; target learner 2``."""
    text = ", ".join(f"{role} {count}" for role, count in counts_of(roles["ranks"]).items())
    if roles["move"]:
        text += f"; rank {roles['move']} {roles['phase']}"
    if roles["target"]:
        text += "; target " + ", ".join(f"{role} {count}" for role, count in sorted(roles["target"].items()))
    return text
