"""Timed twins against the simulator, and elastic ranks against every fixed split.

``python tests/bench/twins.py predict|shift|scale [--json FILE] [--steps N] [--seeds N]``

predict
    Runs one job of timed twins and freezes the profile on it: what the live system adds to the profile's
    times (calls, queue, event loops) is fitted there, on seed 0, and nowhere else. Then, for every seed,
    predicts that job and three others before they are run. Target: goodput, waits (RWT + TWT) and KV hit
    rate within 10% in the mean over seeds, whose 95 % interval is reported. A run takes about 90 s.
shift
    A load that shifts between generation-bound and training-bound phases: elastic ranks against
    every fixed split of as many ranks. Target: RWT + TWT at most half of the best fixed split at no
    less goodput. A run takes about 3 minutes.
scale
    CPU share and memory of twin jobs of more and more ranks, until one takes more than 70% of the machine;
    where that line is crossed is interpolated between two runs. A run takes 1 to 3 minutes.

A run that takes more than 70% of the machine's CPU is void, one beside which others take more than 25% is
disturbed, one whose ledger does not balance is unbalanced: each says so, and no target counts as met on it.
Figures are written after each run.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.config import load
from cluster.sim.catalogue import load_profile
from cluster.sim.statistics import interval
from deploy.cpu import VOID_SHARE
from tests.bench.twin_runs import (
    COMPARED,
    RECIPES,
    Figures,
    errors_of,
    frozen,
    live,
    moves,
    predicted,
)

WITHIN = 0.10
SPEED = 2.0  # of the predicted jobs: half the time, twice the share of what the live system adds
SCALES = (8, 16, 24, 32, 40, 48, 64)
Save = Callable[[dict[str, Any]], None]

BASE = "fitted"
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    BASE: ("twin.toml", ()),
    "training-bound": ("twin.toml", ("generator.replicas=6", "learner.ranks=1", "run.max_lag=3")),
    "long groups": ("twin.toml", ("run.groups_per_step=6", "run.group_size=6", "env.slots=64")),
    "scarce memory, request by request": (
        "twin.toml",
        ("admission.policy=request", "generator.replicas=3", "env.slots=96", "run.groups_per_step=8"),
    ),
}


# -- prediction ---------------------------------------------------------------------------------------


def predict(steps: int, seeds: int, save: Save) -> dict[str, Any]:
    """Freeze on one job, then for every seed predict all jobs and run them."""
    report: dict[str, Any] = {"within": WITHIN, "seeds": seeds, "jobs": {}}
    more = (f"run.steps={steps}", f"twin.speed={SPEED}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        recipe, overrides = JOBS[BASE]
        measured, config = live(recipe, (*overrides, *more, *_seed(0)), root / "base")
        profile = load_profile(config.twin.profile)
        fitted = frozen(profile, measured, predicted(config, profile))
        report["profile"] = {"step_fixed_s": fitted.learner.step_fixed_s, "publish_s": fitted.sync.publish_s}
        for seed in range(seeds):
            for name, (recipe, overrides) in JOBS.items():
                words = (*overrides, *more, *_seed(seed))
                told = predicted(load(RECIPES / recipe, list(words)), fitted)
                if seed or name != BASE:  # seed 0 of the base, the first of them, has been run
                    place = f"{seed}-{name.partition(',')[0].replace(' ', '-')}"
                    measured, _ = live(recipe, words, root / place)
                runs = report["jobs"].setdefault(name, {"runs": []})["runs"]
                runs.append({"seed": seed, "measured": asdict(measured), "predicted": asdict(told),
                             "errors": errors_of(measured, told)})  # fmt: skip
                report["jobs"][name] |= summary(runs)
                show(name, seed, runs[-1])
                save(report)
    for name, job in report["jobs"].items():
        parts = ", ".join(f"{key} {_percent(error)}" for key, error in job["errors"].items())
        print(f"{name}, mean of {seeds}: {parts}", flush=True)
    others = [job for name, job in report["jobs"].items() if name != BASE]
    report["ok"] = all(job["within"] and not job["unsound"] for job in others)
    return report


def _seed(seed: int) -> tuple[str, str]:
    return f"run.seed={seed}", f"env.params.seed={seed}"


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of one job over its seeds: mean, interval, the largest; whether the means meet the target."""
    means = {key: interval([run["errors"][key] for run in runs]) for key in COMPARED}
    return {
        "errors": {key: mean.plain() for key, mean in means.items()},
        "largest": {key: max((run["errors"][key] for run in runs), key=abs) for key in COMPARED},
        "within": all(abs(mean.mean) <= WITHIN for mean in means.values()),
        "unsound": sorted({mark for run in runs for mark in marks(run["measured"]["extra"])}),
    }


def _percent(error: Mapping[str, Any]) -> str:
    low, high = error["interval"]
    span = f" [{100 * low:+.1f}%, {100 * high:+.1f}%]" if low is not None and high is not None else ""
    return f"{100 * error['mean']:+.1f}%{span}"


# -- the shifting load --------------------------------------------------------------------------------


def shift(steps: int, most: int, save: Save) -> dict[str, Any]:
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
        made = moves(root / "elastic")
        report["elastic"] = asdict(measured) | {"moves": made}
        show_figures("elastic", measured)
        for move in made:
            realised = move["realised_s"]
            saved = "untold" if realised is None else f"{realised:+.2f} s a step"
            print(f"  step {move.get('step')}: {move['kind']}, {move['reason']}: predicted "
                  f"{move['predicted_s']:+.2f}, realised {saved}", flush=True)  # fmt: skip
        for name in order[:most]:
            fixed, _ = live(recipe, splits[name], root / name)
            report["static"][name] = asdict(fixed)
            show_figures(name, fixed)
            save(report)
    runs = [report["elastic"], *report["static"].values()]
    report["sound"] = not any(marks(run["extra"]) for run in runs)
    best = min(float(one["wait"]) for one in report["static"].values())
    most_goodput = max(float(one["goodput"]) for one in report["static"].values())
    report["wait_against_best"] = report["elastic"]["wait"] / best
    report["goodput_against_best"] = report["elastic"]["goodput"] / most_goodput
    reached = report["wait_against_best"] <= 0.5 and report["goodput_against_best"] >= 1.0
    report["ok"] = reached and report["sound"]
    print(f"waits {report['wait_against_best']:.2f} x the best fixed split's, goodput "
          f"{report['goodput_against_best']:.2f} x", flush=True)  # fmt: skip
    return report


# -- scale --------------------------------------------------------------------------------------------


def scale(steps: int, counts: Sequence[int], save: Save) -> dict[str, Any]:
    """CPU share by number of ranks, at about the same load per rank, up to the first run that is void."""
    report: dict[str, Any] = {"void_share": VOID_SHARE, "ranks": {}}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in counts:
            learners, scorers = max(1, ranks * 6 // 32), max(1, ranks // 16)
            words = (
                f"run.steps={steps}", f"learner.ranks={learners}", f"scorer.replicas={scorers}",
                f"generator.replicas={ranks - learners - scorers}",
                f"run.groups_per_step={max(2, ranks // 4)}", f"env.slots={6 * ranks // 2}",
            )  # fmt: skip
            measured, _ = live("twin-32.toml", words, Path(folder) / str(ranks))
            report["ranks"][str(ranks)] = measured.extra | {"goodput": measured.goodput}
            report["void_from"] = crossing({int(n): one["cpu_share"] for n, one in report["ranks"].items()})
            print(f"{ranks} ranks: CPU {measured.extra['cpu_share']:.2f} "
                  f"(machine {measured.extra['cpu_share_machine']:.2f})", flush=True)  # fmt: skip
            save(report)
            if measured.extra["void"]:
                break
    print(f"{VOID_SHARE:.0%} of the machine begins at {report['void_from'] or 'more'} ranks", flush=True)
    return report


def crossing(shares: Mapping[int, float]) -> float | None:
    """Ranks at which the share passes ``VOID_SHARE``, between two runs on a line; None if none does."""
    before: tuple[int, float] | None = None
    for ranks, share in sorted(shares.items()):
        if share > VOID_SHARE:
            if before is None:
                return float(ranks)
            low, least = before
            return round(low + (ranks - low) * (VOID_SHARE - least) / (share - least), 1)
        before = ranks, share
    return None


def show(name: str, seed: int, run: Mapping[str, Any]) -> None:
    errors = ", ".join(f"{key} {100 * value:+.1f}%" for key, value in run["errors"].items())
    extra = run["measured"]["extra"]
    print(f"{name}, seed {seed}: {errors}; {_noted(extra)}", flush=True)


def show_figures(name: str, one: Figures) -> None:
    print(f"{name}: goodput {one.goodput:.0f}, waits {one.wait:.2f}, {_noted(one.extra)}", flush=True)


def marks(extra: Mapping[str, Any]) -> list[str]:
    """Why a run proves nothing; empty if it does."""
    found = {"void": extra["void"], "disturbed": extra["disturbed"], "unbalanced": not extra["balanced"]}
    return [mark for mark, holds in found.items() if holds]


def _noted(extra: Mapping[str, Any]) -> str:
    return f"CPU {extra['cpu_share']:.2f}" + "".join(f", {mark.upper()}" for mark in marks(extra))


def main() -> int:
    """Run a study, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("study", choices=("predict", "shift", "scale"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="predict: runs of every job")
    parser.add_argument("--most", type=int, default=99, help="shift: so many fixed splits")
    parser.add_argument("--ranks", type=int, nargs="+", default=SCALES, help="scale: jobs of so many ranks")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: must be at least 1")
    if arguments.most < 1:
        parser.error(f"--most {arguments.most}: must be at least 1")
    begun = time.time()

    def save(report: dict[str, Any]) -> None:
        report["seconds"] = time.time() - begun
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")

    if arguments.study == "predict":
        report = predict(arguments.steps or 36, arguments.seeds, save)
    elif arguments.study == "shift":
        report = shift(arguments.steps or 144, arguments.most, save)
    else:
        report = scale(arguments.steps or 12, arguments.ranks, save)
    save(report)
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
