"""What ``springtide simulate`` says: tables of what was found, and the answer in sentences."""

from statistics import fmean

from rich.console import Console
from rich.table import Table

from cluster.sim.compare import (
    READY,
    calmest,
    fastest,
    fixed_split,
    headline,
    ladder,
    leave_one_out,
    per_token,
)
from cluster.sim.policies import ASYNC, STATIC
from cluster.sim.scenario import Split
from cluster.sim.statistics import Interval, interval
from cluster.sim.study import Study, even
from cluster.sim.vary import Varied

WHAT = {
    "sync": "all ranks generate, then all train",
    "one_step_off": "next batch while this one is trained",
    "stream": "streaming, fixed split",
    "areal": "streaming, interrupted by every sync",
    "aimd": "streaming, cap that follows KV pressure",
    "lending": "streaming, idle learners generate",
    "tide": "all three mechanisms",
    "stream_pipelining": "stream, scoring placed by cost",
    "stream_pipelining_elastic": "the same, elastic ranks",
    "tide_no_admission": "tide without task batching",
    "tide_no_pipelining": "tide without pipelining",
    "tide_no_elastic": "tide with a fixed split",
}
"""The policies in a few words; docs/tide.md has the table."""
_STEP = f"training step by the cost model, {READY} micro-batches ready, below"
HEADLINES = {
    "goodput_vs_sync": ("goodput, tide / synchronous", "x"),
    "goodput_vs_best_async": ("goodput, tide / best tuned asynchronous", "x"),
    "goodput_elastic_vs_static": ("goodput, tide / tide with a fixed split", "x"),
    "goodput_elastic_untuned": ("goodput, elastic from an even split / best fixed split", "x"),
    "goodput_static_untuned": ("goodput, fixed even split / best fixed split", "x"),
    "wait_reduction_vs_best_static": ("waits per token, below the best fixed split by", "%"),
    "kv_hit_vs_request_lru": ("prefix-cache hits, tide / request by request", "x"),
    "train_step_reduction": (f"{_STEP} swapping for each by", "%"),
    "train_step_reduction_vs_one_burst": (f"{_STEP} one burst by", "%"),
}
IDLE = 0.25
"""Above this share of waiting, even at the best split, the batch is too small for the ranks."""
NOTABLE = 1.05
"""Below this ratio, elasticity is not worth recommending: a fixed split is simpler."""


def show(console: Console, found: Study) -> None:
    """Policies, headline figures, ladder."""
    options, run = found.options, found.job.workload.spec.run
    table = Table(
        title=f"{found.job.workload.name}: {found.job.ranks} ranks, {found.job.profile.name}, "
        f"{run.groups_per_step} x {run.group_size} trajectories a step, staleness bound {run.max_lag}; "
        f"{options.steps} steps, {len(options.seeds)} seeds",
        title_justify="left", box=None, header_style="bold",
    )  # fmt: skip
    for name in (
        "policy", "gen/learn/score", "goodput tok/s", "waits s/step", "KV hit", "moves", "what it is",
    ):  # fmt: skip
        text = name in ("policy", "what it is")
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "what it is")
    for name, results in found.results.items():
        best = found.tuned[name].best
        table.add_row(
            name, split_text(best.split, best.policy.rollout),
            spread(interval(found.goodput(name))), spread(interval(found.waits(name))),
            f"{fmean(r.kv_hit for r in results):.1%}", f"{fmean(len(r.moves) for r in results):.1f}",
            WHAT[name],
        )  # fmt: skip
    console.print(table)
    console.print(
        "  goodput: sampled tokens that were trained, per second, all ranks; waits: rank-seconds that nobody "
        "could use; KV hit: prompt tokens found in a cache",
        style="dim", highlight=False,
    )  # fmt: skip
    figures = headline(found)
    for key, (label, unit) in HEADLINES.items():
        if key in figures:
            console.print(f"  {label}: [bold]{number_text(figures[key], unit)}[/bold]", highlight=False)
    rungs = ladder(found)
    for row in rungs if len(rungs) > 2 else []:
        gain = f", {number_text(row['gain'], 'x')} of the one before" if row["gain"] else ""
        goodput = f"{row['goodput_tok_s'].mean:,.0f} tok/s"
        console.print(f"  ladder: {row['label']}: {goodput}{gain}", highlight=False)
    worths = leave_one_out(found)
    for row in worths if len(worths) > 2 else []:
        console.print(f"  all / {row['label']}: {number_text(row['worth'], 'x')}", highlight=False)
    console.print()


def show_varied(console: Console, varied: Varied) -> None:
    """One row per value: what tide yields, what its best rival does, and what that comes to."""
    one = varied.studies[0]
    table = Table(
        title=f"{one.job.workload.name}: {varied.sweep.key}; {one.options.steps} steps, "
        f"{len(one.options.seeds)} seeds",
        title_justify="left", box=None, header_style="bold",
    )  # fmt: skip
    table.add_column(varied.sweep.key, no_wrap=True)
    for name in ("tide", "best async", "gain", "to fixed", "waits", "KV hit"):
        table.add_column(name, justify="right", no_wrap=True)
    for value, found in zip(varied.sweep.values, varied.studies, strict=True):
        table.add_row(value, *_cells(found))
    console.print(table)
    console.print(
        "  tokens a second at the generators/learners/scorers of each one's best split; gain: tide / best "
        "async; to fixed: tide / tide with a fixed split; waits: per token, tide / the calmest fixed split; "
        "KV hit: tide / best async",
        style="dim", highlight=False,
    )  # fmt: skip


def _cells(found: Study) -> list[str]:
    rival, static = fastest(found, ASYNC), calmest(found, STATIC)
    figures = headline(found)

    def yields(name: str | None) -> str:
        if name not in found.results:
            return "-"
        best = found.tuned[name].best
        return f"{fmean(found.goodput(name)):,.0f} at {split_text(best.split, best.policy.rollout)}"

    def hit(name: str | None) -> str:
        return f"{fmean(r.kv_hit for r in found.results[name]):.0%}" if name in found.results else "-"

    gain, kept = figures.get("goodput_vs_best_async"), figures.get("goodput_elastic_vs_static")
    waits = "-"
    if "tide" in found.results and static:
        theirs = fmean(per_token(found.results[static]))
        waits = f"{fmean(per_token(found.results['tide'])) / theirs:.2f}x" if theirs else "-"
    return [
        yields("tide"), f"{yields(rival)} {rival or ''}".strip(), number_text(gain, "x") if gain else "-",
        f"{kept.mean:.2f}x" if kept else "-", waits, f"{hit('tide')}/{hit(rival)}",
    ]  # fmt: skip


def answer(found: Study) -> list[str]:
    """How to split the ranks, and what elasticity would buy, in sentences."""
    if found.job.split:
        return [f"Everybody ran at the split {split_words(found.job.split)}: nothing was searched."]
    lines: list[str] = []
    best = fastest(found, fixed_split(found))
    if best:
        lines.append(
            f"How to split {found.job.ranks} ranks: {split_words(found.tuned[best].best.split)} "
            f"({best}, {fmean(found.goodput(best)):,.0f} tokens per second)."
        )
        lines += _beside(found, best)
        idle = waited_share(found, best)
        if idle > IDLE:
            run = found.job.workload.spec.run
            lines.append(
                f"Of all rank-seconds {idle:.0%} are waited still: {run.groups_per_step} x {run.group_size} "
                f"trajectories a step are few for {found.job.ranks} ranks. See --sweep load.batch=x1,x2,x4."
            )
    lines += _elasticity(found)
    figures = headline(found)
    against = []
    if "goodput_vs_best_async" in figures:
        rival = fastest(found, ASYNC)
        against.append(
            f"{number_text(figures['goodput_vs_best_async'], 'x')} the best asynchronous one ({rival})"
        )
    if "goodput_vs_sync" in figures:
        against.append(f"{number_text(figures['goodput_vs_sync'], 'x')} synchronous training")
    if against:
        lines.append(
            "All three mechanisms together, against systems that were each given their own best split: "
            f"{', '.join(against)}."
        )
    return lines


def waited_share(found: Study, name: str) -> float:
    """RWT + TWT as a share of all rank-seconds, warm-up left out, mean over seeds."""
    shares = []
    for result in found.results[name]:
        counted = sum(step.step > result.scenario.warmup_steps for step in result.steps)
        total = result.seconds * found.job.ranks
        shares.append(result.wait_s * counted / total if total else 0.0)
    return fmean(shares)


def _elasticity(found: Study) -> list[str]:
    """What elastic ranks are worth: beside the best split, and without having searched for it."""
    figures = headline(found)
    gain = figures.get("goodput_elastic_vs_static")
    if not gain:
        return []
    own = split_text(found.tuned["tide"].best.split)
    text = (
        f"What elastic ranks would buy: beginning at their best split ({own}), {number_text(gain, 'x')} the "
        "goodput of the same system with that split kept"
    )
    moving = figures.get("goodput_elastic_untuned")
    still = figures.get("goodput_static_untuned")
    if moving and still:
        begin = split_text(even(found.tuned["tide"].best.policy, found.job))
        text += (
            f"; beginning with an even one ({begin}), {number_text(moving, 'x')} of the best fixed split's, "
            f"where the even split kept has {number_text(still, 'x')}"
        )
    lines = [text + "."]
    if gain.mean >= NOTABLE:
        lines.append("So turn them on (elastic.enabled=true): they beat the best fixed split.")
    elif moving and still and moving.mean >= NOTABLE * still.mean:
        lines.append(
            "So they are hardly worth it once the split is right (a fixed split is simpler), and worth it if "
            "you would rather not search, or expect the load to change."
        )
    else:
        lines.append("So they are hardly worth it here: a fixed split is simpler.")
    return lines


def _beside(found: Study, name: str) -> list[str]:
    """What being wrong about the split costs: the other numbers of generators that were tried."""
    tuned = found.tuned[name]
    top = max(tuned.tried.values(), default=0.0)
    by_count: dict[int, float] = {}
    for (split, scoring), goodput in tuned.tried.items():
        if scoring == tuned.best.policy.scoring and top:
            by_count[split.generators] = max(by_count.get(split.generators, 0.0), goodput / top)
    if len(by_count) < 2:
        return []
    parts = ", ".join(f"{count}: {share:.0%}" for count, share in sorted(by_count.items()))
    return [f"Goodput by the number of generators, in the short runs of the search: {parts}."]


def split_text(split: Split, rollout: str = "stream") -> str:
    """Generators/learners/scorers; "all" when the same ranks do both in turn."""
    if rollout == "sync":
        return f"all {split.generators}"
    return f"{split.generators}/{split.learners}/{split.scorers}"


def split_words(split: Split) -> str:
    """In words, roles without ranks left out."""
    parts = {"generation": split.generators, "training": split.learners, "scoring": split.scorers}
    return ", ".join(f"{count} to {role}" for role, count in parts.items() if count)


def number_text(value: Interval, unit: str) -> str:
    """A ratio or a share with its interval."""
    mean, low, high, n = value
    if unit == "%":
        text = f"{mean:.1%}"
        return text if n == 1 or low == high else f"{text} [{low:.1%}, {high:.1%}]"
    text = f"{mean:.2f}x"
    return text if n == 1 or f"{low:.2f}" == f"{high:.2f}" else f"{text} [{low:.2f}, {high:.2f}]"


def spread(value: Interval) -> str:
    """Mean and half width."""
    if value.n == 1:
        return f"{value.mean:,.0f}"
    return f"{value.mean:,.0f} ± {value.mean - value.low:,.0f}"
