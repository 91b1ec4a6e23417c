"""The figures of a study: headline ratios, ladder, leave-one-out, everything as JSON.

Figures are paired over seeds. What a figure compares is said where it is computed.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from cluster.pipeline import Costs, decoupled_s, full_batch_s, thrash_s
from cluster.sim.policies import ASYNC, LADDER, LEAVE_ONE_OUT, STATIC, scorer_share
from cluster.sim.profile import Profile
from cluster.sim.scenario import Result, Split
from cluster.sim.statistics import Interval, interval, ratio, reduction
from cluster.sim.study import Study

READY = 8
"""Ready micro-batches at which the training step is compared, as TideRL did."""


def fastest(found: Study, names: Sequence[str]) -> str | None:
    """Of the policies that were run, the one with the highest mean goodput."""
    run = [name for name in names if name in found.results]
    return max(run, key=lambda name: fmean(found.goodput(name))) if run else None


def calmest(found: Study, names: Sequence[str]) -> str | None:
    """Of the policies that were run, the one that waits least per token trained."""
    run = [name for name in names if name in found.results]
    return min(run, key=lambda name: fmean(per_token(found.results[name]))) if run else None


def fixed_split(found: Study) -> list[str]:
    """Policies that were run whose split never changes, without those that generate and train in turn."""
    ways = {name: tuned.best.policy for name, tuned in found.tuned.items() if name in found.results}
    return [name for name, way in ways.items() if way.roles == "static" and way.rollout != "sync"]


def per_token(results: Sequence[Result]) -> list[float]:
    """Rank-seconds waited per trained token: comparable between batches of different sizes."""
    return [_per_token(result) for result in results]


def _per_token(result: Result) -> float:
    steps = [step for step in result.steps if step.step > result.scenario.warmup_steps] or result.steps
    tokens = fmean(step.tokens for step in steps) if steps else 0.0
    return result.wait_s / tokens if tokens else 0.0


def headline(found: Study) -> dict[str, Interval]:
    """The figures of the published comparison, as far as the policies that were run allow.

    ``train_step_reduction*`` come from the cost model, not from the runs: one value each, no interval.
    """
    figures: dict[str, Interval] = {}
    if "tide" not in found.results:
        return figures
    ours = found.goodput("tide")
    if "sync" in found.results:
        figures["goodput_vs_sync"] = ratio(ours, found.goodput("sync"))
    asynchronous = fastest(found, ASYNC)
    if asynchronous:
        figures["goodput_vs_best_async"] = ratio(ours, found.goodput(asynchronous))
    static = calmest(found, STATIC)
    if static and all(value > 0 for value in per_token(found.results[static])):
        figures["wait_reduction_vs_best_static"] = reduction(
            per_token(found.results["tide"]), per_token(found.results[static])
        )
    if "tide_no_admission" in found.results:
        lru = [result.kv_hit for result in found.results["tide_no_admission"]]
        if all(hit > 0 for hit in lru):
            figures["kv_hit_vs_request_lru"] = ratio([r.kv_hit for r in found.results["tide"]], lru)
    if found.job.profile.scorer.passes:
        split = found.tuned["tide"].best.split
        swap, whole = step_reduction(found.job.profile, split.learners + split.scorers)
        figures["train_step_reduction"] = interval([swap])
        figures["train_step_reduction_vs_one_burst"] = interval([whole])
    if "tide_no_elastic" in found.results:
        best = found.goodput("tide_no_elastic")
        figures["goodput_elastic_vs_static"] = ratio(ours, best)
        for name, key in (("tide", "goodput_elastic_untuned"), ("tide_no_elastic", "goodput_static_untuned")):
            if name in found.untuned:
                figures[key] = ratio([r.goodput_tok_s for r in found.untuned[name]], best)
    return figures


def step_reduction(profile: Profile, ranks: int, ready: int = READY) -> tuple[float, float]:
    """By what share a training step with ``ready`` micro-batches is shorter with scorers of their own.

    Against (streaming that swaps the reference per micro-batch, the whole batch in one burst), on the same
    ``ranks``. A micro-batch fills every rank: ``micro_tokens`` each. From the cost model that the live
    system decides by (cluster/pipeline.py); (0, 0) without a scorer or a second rank.
    """
    if not profile.scorer.passes or ranks < 2:
        return 0.0, 0.0
    tokens = profile.learner.micro_tokens * ranks
    score = tokens * profile.scorer.passes / profile.scorer.forward_tok_s
    train = tokens * (1 / profile.learner.forward_tok_s + 1 / profile.learner.backward_tok_s)
    at = (0.0,) * ready
    middle = max(1, min(ranks - 1, round(ranks * scorer_share(profile))))
    fixed = profile.learner.step_fixed_s
    ours = min(
        decoupled_s(at, Costs(score, train, profile.scorer.swap_s, scorers, ranks - scorers))
        for scorers in (middle - 1, middle, middle + 1)
        if 1 <= scorers < ranks
    )
    shared = Costs(score, train, profile.scorer.swap_s, 0, ranks)
    return (
        1 - (ours + fixed) / (thrash_s(at, shared) + fixed),
        1 - (ours + fixed) / (full_batch_s(at, shared) + fixed),
    )


def ladder(found: Study) -> list[dict[str, Any]]:
    """From the base to all mechanisms: goodput of each rung, and its gain over the one before."""
    rows: list[dict[str, Any]] = []
    before: str | None = None
    for name, label in LADDER:
        if name not in found.results:
            continue
        row: dict[str, Any] = {"policy": name, "label": label}
        row["goodput_tok_s"] = interval(found.goodput(name))
        row["gain"] = ratio(found.goodput(name), found.goodput(before)) if before else None
        rows.append(row)
        before = name
    return rows


def leave_one_out(found: Study) -> list[dict[str, Any]]:
    """What each mechanism is worth beside the other two: everything over everything but it."""
    return [
        {"policy": name, "label": label, "worth": ratio(found.goodput("tide"), found.goodput(name))}
        for name, label in LEAVE_ONE_OUT
        if name in found.results and "tide" in found.results
    ]


def plain(value: Any) -> Any:
    """Records as JSON values."""
    if isinstance(value, Interval):
        return value.plain()
    if isinstance(value, Split):
        return {"generators": value.generators, "learners": value.learners, "scorers": value.scorers}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def report(found: Study) -> dict[str, Any]:
    """Everything of a study as JSON values."""
    policies = {}
    for name, results in found.results.items():
        best = found.tuned[name].best
        policies[name] = {
            "split": best.split,
            "scoring": best.policy.scoring,
            "goodput_tok_s": interval([r.goodput_tok_s for r in results]),
            "wait_s": interval([r.wait_s for r in results]),
            "kv_hit": interval([r.kv_hit for r in results]),
            "train_s": interval([r.train_s for r in results]),
            "group_latency_s": interval([r.group_latency_s for r in results]),
            "moves": fmean(len(r.moves) for r in results),
            "wasted_tokens": fmean(r.wasted_tokens for r in results),
            "prefilled_tokens": fmean(r.prefilled_tokens for r in results),
            "events": sum(r.events for r in results),
            "wall_s": sum(r.wall_s for r in results),
            "sweep": [
                {"split": split, "scoring": scoring, "goodput_tok_s": value}
                for (split, scoring), value in sorted(found.tuned[name].tried.items(), key=_by_split)
            ],
        }
    run = found.job.workload.spec.run
    tree: dict[str, Any] = {
        "workload": found.job.workload.name,
        "profile": found.job.profile.name,
        "ranks": found.job.ranks,
        "steps": found.options.steps,
        "warmup_steps": found.options.warmup_steps,
        "seeds": list(found.options.seeds),
        "job": msgspec.to_builtins(run) | {"ranks": found.job.ranks, "profile": found.job.profile.name},
        **headline(found),
        "best_async": fastest(found, ASYNC),
        "best_static_by_wait": calmest(found, STATIC),
        "ladder": ladder(found),
        "leave_one_out": leave_one_out(found),
        "policies": policies,
    }
    built: dict[str, Any] = plain(tree)
    return built


def _by_split(item: tuple[tuple[Split, str], float]) -> tuple[str, int, int]:
    (split, scoring), _ = item
    return scoring, split.generators, split.scorers
