"""Live goodput: asynchronous against synchronous training, whole jobs, environments that take their time.

Both jobs run the demo's recipe with the same seeds, batch size and trajectories in flight; only
``run.max_lag`` differs. Every turn waits for a log-normal delay (mean 0.5 s, sigma 1: one turn in a hundred
takes more than 3 s), as tools and simulators do. A synchronous step lasts as long as its slowest
trajectory; an asynchronous job fills the places of those that have ended. Goodput is sampled tokens that
entered an applied step within the bound, per second from the first admission to the last step, so
start-up and evaluation don't count, but the ramp and the last stragglers do. Target: twice.

``python tests/bench/goodput.py [--json FILE] [--steps N]`` takes about five minutes, once
the demo's model has been made.
"""

import argparse
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.jobs import REPO, Job

RECIPE = REPO / "deploy" / "recipes" / "frozenlake.toml"
TARGET = 2.0
STEPS = 20
GROUPS, MEMBERS = 4, 8
MAX_LAG = 4
LATENCY = {"mean_s": 0.5, "sigma": 1.0}
JOB_DEADLINE_S = 900.0


def run(steps: int = STEPS) -> dict[str, Any]:
    """Both jobs, one after the other; ``ratio`` is the asynchronous goodput over the synchronous one."""
    with tempfile.TemporaryDirectory(prefix="springtide-bench-") as folder:
        found = {
            name: job(Path(folder) / name, steps, lag)
            for name, lag in (("synchronous", 0), ("asynchronous", MAX_LAG))
        }
    ours, reference = found["asynchronous"], found["synchronous"]
    return {
        "name": "goodput",
        "ratio": ours["goodput_tok_s"] / reference["goodput_tok_s"],
        "target": TARGET,
        "ours": ours["goodput_tok_s"],
        "reference": reference["goodput_tok_s"],
        "unit": "tok/s",
        "steps": steps,
        "latency": LATENCY,
        "max_lag": MAX_LAG,
        "trajectories_in_flight": GROUPS * MEMBERS,
        **found,
    }


def settings(steps: int, max_lag: int) -> dict[str, Any]:
    """The demo's recipe by dotted key, with what the benchmark changes."""
    tree = tomllib.loads(RECIPE.read_text())
    flat = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    return {
        **flat,
        "model.path": "",  # the recipe names a maker
        "run.steps": steps,
        "run.groups_per_step": GROUPS,
        "run.group_size": MEMBERS,
        "run.max_lag": max_lag,
        "run.checkpoint_every": steps,
        "env.latency": LATENCY,
        "env.slots": GROUPS * MEMBERS,  # the synchronous job can fill them all, too
        "eval.before": False,
        "eval.after": False,
    }


def job(root: Path, steps: int, max_lag: int) -> dict[str, Any]:
    """Run one job to its end; what its summary says of throughput."""
    work = Job(root, steps, model=Path(), **settings(steps, max_lag))
    with work.running():
        if work.wait(JOB_DEADLINE_S):
            raise RuntimeError(f"the job failed:\n{work.tail()}")
    summary = work.summary()
    ledger = summary["ledger"]
    if not ledger["balanced"] or summary["lag"]["max"] > max_lag:
        raise RuntimeError(f"the measurement is void: ledger {ledger}, lag {summary['lag']}")
    return {
        "goodput_tok_s": summary["goodput_tok_s"],
        "train_s": summary["train_s"],
        "trained": ledger["trained"],
        "dropped": sum(ledger["dropped"].values()),
        "lag_mean": summary["lag"]["mean"],
        "overlap_fraction": summary["overlap_fraction"],
        "wait_twt_s": summary["twt_s"]["total"],
    }


def main() -> int:
    """Print the result; exit status 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each job")
    arguments = parser.parse_args()
    result = run(arguments.steps)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if result["ratio"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
