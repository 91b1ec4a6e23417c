"""One job of timed twins, run live or simulated, as figures that can be compared."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cluster.config import Config, load
from cluster.metrics import read_steps
from cluster.sim.profile import Profile
from cluster.sim.scenario import Scenario
from cluster.sim.workloads import load_workload
from cluster.sim.world import run as simulate
from deploy.cpu import VOID_SHARE
from deploy.paths import RunFolder

REPO = Path(__file__).resolve().parent.parent.parent
RECIPES = REPO / "deploy" / "recipes"
DEADLINE_S = 900.0
WARM_STEPS = 5  # the pipeline fills
OTHERS_SHARE = 0.25
"""Other work that takes more of the machine than this disturbs a run."""
COMPARED = ("goodput", "wait", "kv_hit")


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
    """Run a job to its end. Raises RuntimeError when it fails, TimeoutExpired after ``DEADLINE_S``."""
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
            "disturbed": summary["cpu_share_machine"] - summary["cpu_share"] > OTHERS_SHARE,
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


def errors_of(measured: Figures, told: Figures) -> dict[str, float]:
    """Relative errors of a prediction."""
    return {
        name: getattr(told, name) / getattr(measured, name) - 1 if getattr(measured, name) else 0.0
        for name in COMPARED
    }


def moves(root: Path) -> list[dict[str, Any]]:
    """The moves of the run, as its summary tells of them: when, how long, predicted and realised saving."""
    folder = RunFolder(max(root.iterdir(), key=lambda path: path.stat().st_mtime))
    told: list[dict[str, Any]] = json.loads(folder.summary.read_text())["moves"]
    return told
