"""Timed twins against the simulator, and elastic ranks against every fixed split.

``PYTHONPATH=. python tests/bench/twins.py predict|shift|scale [--json FILE] [--steps N]``

predict
    Runs one job of timed twins and freezes the profile on it: what the live system adds to the profile's
    times (calls, queue, event loops) is fitted there and nowhere else. Then predicts three other jobs
    before they are run. Target: goodput, waits (RWT + TWT) and KV hit rate within 10%.
shift
    A load that shifts between generation-bound and training-bound phases: elastic ranks against
    every fixed split of the same 8 ranks. Target: RWT + TWT at most half of the best fixed split at no
    less goodput; the switch ledger's predictions within 30% of what was realised.
scale
    CPU share and memory of twin jobs of 8, 16, 32 and 48 ranks.

A run that takes more than 70% of the machine's CPU is void and says so.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cluster.config import Config, load
from cluster.metrics import read_steps
from cluster.sim.catalogue import load_profile
from cluster.sim.profile import Profile
from cluster.sim.scenario import Scenario
from cluster.sim.workloads import load_workload
from cluster.sim.world import run as simulate
from cluster.trace import read_trace
from deploy.cpu import VOID_SHARE
from deploy.paths import RunFolder

REPO = Path(__file__).resolve().parent.parent.parent
RECIPES = REPO / "deploy" / "recipes"
DEADLINE_S = 900.0
WARM_STEPS = 5  # the pipeline fills
WITHIN = 0.10
SPEED = 2.0  # of the predicted jobs: half the time, twice the share of what the live system adds

BASE = ("twin.toml", ())
OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "training-bound": ("twin.toml", ("generator.replicas=6", "learner.ranks=1", "run.max_lag=3")),
    "long groups": ("twin.toml", ("run.groups_per_step=6", "run.group_size=6", "env.slots=64")),
    "scarce memory, request by request": (
        "twin.toml",
        ("admission.policy=request", "generator.replicas=3", "env.slots=96", "run.groups_per_step=8"),
    ),
}


@dataclass
class Figures:
    """One run, live or simulated, over the same window of steps. Seconds are the profile's."""

    goodput: float  # sampled tokens a second that were trained
    wait: float  # RWT + TWT, rank-seconds a step
    rwt: dict[str, float]
    twt: dict[str, float]
    kv_hit: float
    step_s: float  # from commit to commit
    train_s: float  # of which training
    extra: dict[str, Any] = field(default_factory=dict)


def window(config: Config) -> tuple[int, int]:
    """Steps ``(first, last]`` that are compared: the pipeline is full, and admission still open."""
    return WARM_STEPS, config.run.steps - config.run.max_lag - 2


# -- live ---------------------------------------------------------------------------------------------


def live(recipe: str, overrides: Sequence[str], root: Path) -> tuple[Figures, Config]:
    """Run a job to its end. Raises RuntimeError when it fails or was too much for this machine."""
    words = [*overrides, f"run.root={root}"]
    config = load(RECIPES / recipe, words)
    command = [sys.executable, "-m", "deploy.cli", "train", str(RECIPES / recipe), *words]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{recipe} {overrides}: exit code {done.returncode}\n{done.stdout[-3000:]}"
                           f"\n{done.stderr[-3000:]}")  # fmt: skip
    folder = RunFolder(max(root.iterdir(), key=lambda path: path.stat().st_mtime))
    return figures_of(folder, config), config


def figures_of(folder: RunFolder, config: Config) -> Figures:
    """The figures of a finished run."""
    steps = read_steps(folder.metrics)
    summary = json.loads(folder.summary.read_text())
    first, last = window(config)
    speed = config.twin.speed
    chosen = [step for step in steps if first < step["step"] <= last]
    seconds = (chosen[-1]["t"] - steps[first - 1]["t"]) * speed
    count = len(chosen)
    rwt: dict[str, float] = {}
    twt: dict[str, float] = {}
    before = steps[first - 1]["t"]
    for step in chosen:
        for cause, spent in step["wait_rwt_s"].items():
            rwt[cause] = rwt.get(cause, 0.0) + spent * speed / count
        learners, scorers = step["ranks"].get("learner", 0), step["ranks"].get("scorer", 0)
        for cause, spent in step["wait_twt_s"].items():
            twt[cause] = twt.get(cause, 0.0) + spent * learners * speed / count
        idle = scorers * (step["t"] - before) - step.get("scorer_busy_s", 0.0)
        twt["scorer"] = twt.get("scorer", 0.0) + idle * speed / count
        before = step["t"]
    prompt = sum(step["prompt_tokens"] for step in steps)
    return Figures(
        goodput=sum(step["trained_tokens"] for step in chosen) / seconds,
        wait=sum(rwt.values()) + sum(twt.values()),
        rwt=rwt,
        twt=twt,
        kv_hit=sum(step["cached_tokens"] for step in steps) / max(1.0, prompt),
        step_s=seconds / count,
        train_s=statistics.fmean(step["step_s"] for step in chosen) * speed,
        extra={
            "run": folder.run_id,
            "cpu_share": summary["cpu_share"],
            "cpu_share_machine": summary["cpu_share_machine"],
            "void": summary["cpu_share"] > VOID_SHARE,
            "balanced": summary["ledger"]["balanced"] and summary["ledger"]["audited"],
            "wall_s": summary["wall_s"],
            "publish_s": statistics.fmean(step["wait_twt_s"]["publish"] for step in chosen) * speed,
            "env_step_s": statistics.fmean(step.get("env_step_s", 0.0) for step in chosen) * speed,
        },
    )


# -- simulated ----------------------------------------------------------------------------------------


def predicted(config: Config, profile: Profile) -> Figures:
    """The simulator's figures for the same job."""
    workload = load_workload(str(config.env.params["workload"]))
    result = simulate(Scenario.from_config(config, profile, workload))
    first, last = window(config)
    chosen = [step for step in result.steps if first < step.step <= last]
    seconds, count = chosen[-1].t - result.steps[first - 1].t, len(chosen)
    rwt: dict[str, float] = {}
    twt: dict[str, float] = {}
    for step in chosen:
        for total, part in ((rwt, step.rwt_s), (twt, step.twt_s)):
            for cause, spent in part.items():
                total[cause] = total.get(cause, 0.0) + spent / count
    return Figures(
        goodput=sum(step.tokens for step in chosen) / seconds,
        wait=sum(rwt.values()) + sum(twt.values()),
        rwt=rwt,
        twt=twt,
        kv_hit=result.kv_hit,
        step_s=seconds / count,
        train_s=statistics.fmean(step.train_s for step in chosen),
    )


def frozen(profile: Profile, measured: Figures, plain: Figures) -> Profile:
    """The profile with what the live system adds to its times, as seen in one run."""
    learner, sync = profile.learner, profile.sync
    added = max(0.0, measured.train_s - plain.train_s)
    publish = max(sync.publish_s, measured.extra["publish_s"])
    return replace(
        profile,
        name=f"{profile.name}-frozen",
        learner=replace(learner, step_fixed_s=learner.step_fixed_s + added),
        sync=replace(sync, publish_s=publish),
    )


def compare(measured: Figures, told: Figures) -> dict[str, Any]:
    """Relative errors of a prediction."""
    errors = {
        name: getattr(told, name) / getattr(measured, name) - 1 if getattr(measured, name) else 0.0
        for name in ("goodput", "wait", "kv_hit")
    }
    return {
        "measured": asdict(measured),
        "predicted": asdict(told),
        "errors": errors,
        "within": all(abs(error) <= WITHIN for error in errors.values()),
    }


def predict(steps: int) -> dict[str, Any]:
    """Freeze on one job, predict the others, then run them."""
    report: dict[str, Any] = {"within": WITHIN, "jobs": {}}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        recipe, overrides = BASE
        more = (f"run.steps={steps}", f"twin.speed={SPEED}")
        measured, config = live(recipe, (*overrides, *more), root / "base")
        profile = load_profile(config.twin.profile)
        plain = predicted(config, profile)
        fitted = frozen(profile, measured, plain)
        report["profile"] = {"step_fixed_s": fitted.learner.step_fixed_s, "publish_s": fitted.sync.publish_s}
        report["base"] = compare(measured, predicted(config, fitted))
        show("base", report["base"])
        for name, (recipe, overrides) in OTHERS.items():
            told = predicted(load(RECIPES / recipe, [*overrides, *more]), fitted)
            measured, _ = live(recipe, (*overrides, *more), root / name.partition(",")[0].replace(" ", "-"))
            report["jobs"][name] = compare(measured, told)
            show(name, report["jobs"][name])
    report["ok"] = all(job["within"] and not job["measured"]["extra"]["void"]
                       for job in report["jobs"].values())  # fmt: skip
    return report


# -- the shifting load --------------------------------------------------------------------------------


def shift(steps: int, most: int = 99) -> dict[str, Any]:
    """Elastic ranks and fixed splits of as many, live: ``most`` of them, those first that simulate best."""
    report: dict[str, Any] = {"static": {}}
    recipe, more = "twin-elastic.toml", (f"run.steps={steps}",)
    base = load(RECIPES / recipe, list(more))
    profile = load_profile(base.twin.profile)
    report["simulated"] = {"elastic": asdict(predicted(base, profile))}
    ranks = base.generator.replicas + base.learner.ranks
    splits = {}
    for learners in range(1, ranks):
        split = (f"generator.replicas={ranks - learners}", f"learner.ranks={learners}")
        words = (*more, *split, "elastic.enabled=false")
        splits[name := f"{ranks - learners}+{learners}"] = words
        report["simulated"][name] = asdict(predicted(load(RECIPES / recipe, list(words)), profile))
    order = sorted(splits, key=lambda name: float(report["simulated"][name]["wait"]))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        measured, _ = live(recipe, more, root / "elastic")
        report["elastic"] = asdict(measured) | {"moves": moves(root / "elastic")}
        show_figures("elastic", measured)
        for name in order[:most]:
            fixed, _ = live(recipe, splits[name], root / name)
            report["static"][name] = asdict(fixed)
            show_figures(name, fixed)
    best = min(float(one["wait"]) for one in report["static"].values())
    most_goodput = max(float(one["goodput"]) for one in report["static"].values())
    report["wait_against_best"] = report["elastic"]["wait"] / best
    report["goodput_against_best"] = report["elastic"]["goodput"] / most_goodput
    report["ok"] = report["wait_against_best"] <= 0.5 and report["goodput_against_best"] >= 1.0
    return report


def moves(root: Path) -> list[dict[str, Any]]:
    """What the trace says of moves, in order."""
    folder = RunFolder(max(root.iterdir(), key=lambda path: path.stat().st_mtime))
    told = ("move", "switch", "resize")
    return [event for event in read_trace(folder.trace) if any(word in event["event"] for word in told)]


# -- scale --------------------------------------------------------------------------------------------


def scale(steps: int) -> dict[str, Any]:
    """CPU share by number of ranks, at about the same load per rank."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (8, 16, 32, 48):
            learners, scorers = max(1, ranks * 6 // 32), max(1, ranks // 16)
            words = (
                f"run.steps={steps}", f"learner.ranks={learners}", f"scorer.replicas={scorers}",
                f"generator.replicas={ranks - learners - scorers}",
                f"run.groups_per_step={max(2, ranks // 4)}", f"env.slots={6 * ranks // 2}",
            )  # fmt: skip
            measured, _ = live("twin-32.toml", words, Path(folder) / str(ranks))
            report[str(ranks)] = measured.extra | {"goodput": measured.goodput}
            print(ranks, "ranks:", report[str(ranks)], flush=True)
    return report


def show(name: str, job: dict[str, Any]) -> None:
    errors = ", ".join(f"{key} {100 * value:+.1f}%" for key, value in job["errors"].items())
    print(f"{name}: {errors}; CPU {job['measured']['extra']['cpu_share']:.2f}", flush=True)


def show_figures(name: str, one: Figures) -> None:
    share = one.extra["cpu_share"]
    print(f"{name}: goodput {one.goodput:.0f}, waits {one.wait:.2f}, CPU {share:.2f}", flush=True)


def main() -> int:
    """Run a study, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("study", choices=("predict", "shift", "scale"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--most", type=int, default=99, help="shift: so many fixed splits")
    arguments = parser.parse_args()
    begun = time.time()
    if arguments.study == "predict":
        report = predict(arguments.steps or 40)
    elif arguments.study == "shift":
        report = shift(arguments.steps or 144, arguments.most)
    else:
        report = scale(arguments.steps or 12)
    report["seconds"] = time.time() - begun
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
