"""A step's metrics under their public names (cluster/metrics.py), appended to the run's JSONL."""

import time
from pathlib import Path
from typing import Any

from cluster.config import Config
from cluster.metrics import JsonlSink, Rate, overlap_fraction

WINDOW_S = 30.0
KEPT_INTERVALS = 400
FROM_LEARNER = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "clip_fraction": "clip_fraction",
    "ratio_mean": "ratio_mean",
    "kl_ref": "kl",
    "lr": "lr",
    "mismatch_kl": "mismatch_kl",
    "mismatch_max_log_ratio": "mismatch_max_log_ratio",
    "max_abs_log_ratio_at_lag0": "lag0_max_log_ratio",
    "lag0_tokens": "lag0_tokens",
    "scorer_busy_s": "scorer_busy_s",
    "scored_ahead": "scored_ahead",
    "row_tokens": "row_tokens",
}
FROM_LOOP = (
    "reward", "reward_std", "success", "turns_mean", "truncated_fraction",
    "group_zero_std_fraction", "signal_effect_size", "lag_mean", "lag_max", "lag_hist", "version",
    "wait_twt_s", "step_s", "ready_ras", "ready_tprm_s", "ready_head_age_s", "ready_depth",
    "mixed_versions", "trained_tokens",
)  # fmt: skip
TOTALS = ("generated_tokens", "sync_s")
KV_KINDS = ("first_turn", "same_rank", "migrated", "post_sync")


class Measure:
    """Turns running totals into increments and rates; remembers only the last windows."""

    def __init__(self, config: Config, path: Path) -> None:
        self.config = config
        self._sink = JsonlSink(path)
        now = time.monotonic()
        self._goodput = Rate(WINDOW_S, now)
        self._rows = Rate(WINDOW_S, now)
        self._sampled = Rate(WINDOW_S, now)
        self._before: dict[str, float] = {}
        self._trained = 0.0
        self._sampled_total = 0.0
        self._learner: list[tuple[float, float]] = []
        self._generator: list[tuple[float, float]] = []

    def close(self) -> None:
        """Close the file."""
        self._sink.close()

    def step(self, step: int, metrics: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        """Name, derive, write; returns the named record."""
        named = {name: metrics[name] for name in FROM_LOOP}
        named |= {new: metrics[old] for old, new in FROM_LEARNER.items() if old in metrics}
        named["skipped"] = 1.0 - metrics.get("update_applied", 1.0)
        named |= self._rates(metrics, facts)
        named["wait_rwt_s"] = {**facts.get("rwt", {}), "sync": self._increment("sync_s", facts["sync_s"])}
        for name in ("prompt_tokens", "cached_tokens"):
            named[name] = self._increment(name, facts.get(name, 0.0))
        named["tasks"] = facts["tasks"]
        named["admission_events"] = {
            event: self._increment(f"admission.{event}", total) for event, total in facts["admission"].items()
        }
        named["ranks"] = facts["ranks"]
        named |= facts.get("switches", {})
        named |= self._worker_facts(facts["workers"])
        self._sink.record(step, named)
        return named

    def _rates(self, metrics: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        sampled = self._increment("generated_tokens", facts["generated_tokens"])
        self._goodput.add(now, metrics["trained_tokens"])
        self._rows.add(now, metrics["row_tokens"])
        self._sampled.add(now, sampled)
        self._trained += metrics["trained_tokens"]
        self._sampled_total += sampled
        if "busy" in metrics:
            self._learner = [*self._learner, tuple(metrics["busy"])][-KEPT_INTERVALS:]
        fresh = [(float(a), float(b)) for a, b in facts["generator_busy"]]
        self._generator = [*self._generator, *fresh][-4 * KEPT_INTERVALS :]
        return {
            "goodput_tok_s": self._goodput.value(now),
            "row_tok_s": self._rows.value(now),
            "sampled_tok_s": self._sampled.value(now),
            "goodput_fraction": min(1.0, self._trained / max(1.0, self._sampled_total)),
            "overlap_fraction": overlap_fraction(self._learner[:-1], self._generator),
        }

    def _worker_facts(self, totals: dict[str, float]) -> dict[str, Any]:
        hits = {}
        for kind in KV_KINDS:
            prompt = self._increment(f"kv_prompt.{kind}", totals.get(f"kv_prompt.{kind}", 0.0))
            cached = self._increment(f"kv_cached.{kind}", totals.get(f"kv_cached.{kind}", 0.0))
            if prompt > 0:
                hits[kind] = cached / prompt
        failures = {
            name.partition(".")[2]: self._increment(name, value)
            for name, value in totals.items()
            if name.startswith("env_failures.")
        }
        turns = self._increment("turns", totals.get("turns", 0.0))
        spent = self._increment("env_step_s", totals.get("env_step_s", 0.0))
        named: dict[str, Any] = {"kv_hit": hits, "env_failures": failures}
        return named | ({"env_step_s": spent / turns} if turns > 0 else {})

    def _increment(self, name: str, total: float) -> float:
        """Growth since the last step; a counter that fell (a replaced process) starts anew."""
        before = self._before.get(name, 0.0)
        self._before[name] = total
        return total - before if total >= before else total
