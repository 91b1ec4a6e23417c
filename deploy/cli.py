"""``springtide``: parse first, import heavy things after.

    springtide train RECIPE [key=value ...] [--dry-run] [--address HOST:PORT]
    springtide train --resume RUN
    springtide eval RECIPE --checkpoint FOLDER
    springtide replay RUN
    springtide report RUN
    springtide scale RUN [--generators N] [--learners N] [--scorers N] [--env-workers N] [--show] [--auto]
    springtide simulate WORKLOAD [--ranks N] [--policy NAME ...] [--sweep] [--json FILE] [--picture FILE]
    springtide doctor
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.config import Config, apply_override, build, dump, load
from cluster.errors import ConfigError, SpringtideError
from cluster.sim.catalogue import names
from cluster.sim.policies import POLICIES
from deploy.signals import Terminated, sigterm_raises

INTERRUPTED = 130
TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 2 after an error, which is one line on stderr, 130 after
    Ctrl-C, 143 after SIGTERM.
    """
    arguments = parser().parse_args(argv)
    try:
        with sigterm_raises():
            return int(arguments.handler(arguments))
    except SpringtideError as error:
        text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
        sys.stderr.write(f"springtide: {error.boundary}: {text}\n")
        return 2
    except KeyboardInterrupt as error:
        sys.stderr.write("springtide: interrupted\n")
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="springtide", description="Asynchronous RL for LLM agents.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy")
    train.add_argument("recipe", nargs="?", help="a recipe (TOML)")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="such as run.steps=5")
    train.add_argument("--dry-run", action="store_true", help="print the effective configuration and stop")
    train.add_argument("--resume", metavar="RUN", help="a run folder to continue")
    train.add_argument("--address", help="join a running Ray cluster")
    train.set_defaults(handler=_train)

    evaluate = commands.add_parser("eval", help="evaluate a checkpoint on held-out tasks")
    evaluate.add_argument("recipe")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value")
    evaluate.add_argument("--checkpoint", required=True, help='a checkpoint or model folder, or "base"')
    evaluate.add_argument("--against", help="another one: paired difference on the same tasks")
    evaluate.add_argument("--json", metavar="FILE", help="write the result")
    evaluate.set_defaults(handler=_evaluate)

    replay = commands.add_parser("replay", help="train a recorded run's batches again, compare the losses")
    replay.add_argument("run", help="a run folder recorded with run.record=true")
    replay.set_defaults(handler=_replay)

    report = commands.add_parser("report", help="draw report.png of a run folder again")
    report.add_argument("run")
    report.set_defaults(handler=_report)

    _add_scale(commands)
    _add_simulate(commands)

    doctor = commands.add_parser("doctor", help="say what is wrong with this installation, and the remedy")
    doctor.set_defaults(handler=_doctor)
    return top


def _add_scale(commands: Any) -> None:
    scale = commands.add_parser("scale", help="change how many ranks of a running job do what")
    scale.add_argument("run", help="the run folder of a running job")
    for name, what in (
        ("generators", "generate"), ("learners", "train"), ("scorers", "score"),
    ):  # fmt: skip
        scale.add_argument(f"--{name}", type=int, metavar="N", help=f"ranks that {what}")
    scale.add_argument("--env-workers", type=int, metavar="N", help="processes that play environments")
    scale.add_argument("--show", action="store_true", help="print ranks, roles and moves, and change nothing")
    scale.add_argument("--auto", action="store_true", help="take earlier counts back")
    scale.add_argument("--timeout", type=float, metavar="S", default=900.0, help="how long to wait for it")
    scale.set_defaults(handler=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    from deploy.scale import Wish, scale

    wish = Wish(arguments.generators, arguments.learners, arguments.scorers, arguments.env_workers)
    return scale(arguments.run, wish, arguments.show, arguments.auto, arguments.timeout)


def _add_simulate(commands: Any) -> None:
    sim = commands.add_parser("simulate", help="predict a cluster: how to split ranks, what elasticity buys")
    sim.add_argument(
        "workload", nargs="+", metavar="WORKLOAD",
        help=f"a TOML file, or one of {', '.join(names('workloads'))}",
    )  # fmt: skip
    sim.add_argument("--ranks", type=int, metavar="N", help="ranks of the job (default: the workload's)")
    sim.add_argument("--policy", nargs="+", metavar="NAME", help=f"of {', '.join(POLICIES)}")
    sim.add_argument(
        "--profile", metavar="NAME|FILE",
        help=f"service times: a TOML file, or one of {', '.join(names('profiles'))}",
    )  # fmt: skip
    sim.add_argument("--split", metavar="G/L/S", help="generators/learners/scorers, instead of searching")
    sim.add_argument("--steps", type=int, metavar="N", help="optimizer steps of a run (default 24)")
    sim.add_argument("--seeds", type=int, metavar="N", help="runs per policy (default 3; study 5)")
    sim.add_argument("--sweep", action="store_true", help="every split tried; vary what the answer rests on")
    sim.add_argument("--study", action="store_true", help="all policies, ladder, leave-one-out: minutes")
    sim.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores, at most 2)")
    sim.add_argument("--json", metavar="FILE", help="write the figures")
    sim.add_argument("--picture", metavar="FILE", help="write a picture (PNG)")
    sim.set_defaults(handler=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from deploy.simulate import simulate  # numpy, rich

    return simulate(arguments)


def _train(arguments: argparse.Namespace) -> int:
    folder_path, config = _resumed(arguments) if arguments.resume else _fresh(arguments)
    if arguments.dry_run:
        print(json.dumps(dump(config), indent=2))
        return 0
    from deploy.launch import start  # tokenizers, environments, the terminal view

    return start(config, folder_path)


def _fresh(arguments: argparse.Namespace) -> tuple[Path, Config]:
    if not arguments.recipe:
        raise ConfigError("train needs a recipe (or --resume RUN)")
    overrides = list(arguments.overrides)
    if arguments.address:
        overrides.append(f'cluster.address="{arguments.address}"')
    config = load(arguments.recipe, overrides)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(config.run.root) / f"{config.run.name}-{stamp}", config


def _resumed(arguments: argparse.Namespace) -> tuple[Path, Config]:
    folder = Path(arguments.resume)
    saved = folder / "config.json"
    if not saved.exists():
        raise ConfigError(f"--resume {arguments.resume}: no config.json there; give a run folder")
    words = [arguments.recipe, *arguments.overrides]
    overrides = [word for word in words if word]
    if arguments.address:
        overrides.append(f'cluster.address="{arguments.address}"')
    try:
        tree = json.loads(saved.read_text())
    except ValueError as error:
        raise ConfigError(f"--resume {arguments.resume}: config.json is damaged: {error}") from error
    for override in overrides:
        apply_override(tree, override)
    return folder, build(tree)


def _evaluate(arguments: argparse.Namespace) -> int:
    from deploy.evaluate import evaluate

    modes = 'eval.modes=["greedy", "sampled"]'
    config = load(arguments.recipe, [modes, *arguments.overrides])
    return evaluate(config, arguments.checkpoint, arguments.against, arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is no run folder: it has no config.json")
    if not (folder / "record").is_dir():
        raise ConfigError(f"{folder} holds no record: train with run.record=true")
    from deploy.replay import replay

    return replay(folder)


def _report(arguments: argparse.Namespace) -> int:
    from deploy.report import write_report

    try:
        print(write_report(arguments.run))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"no report of {arguments.run}: {error}") from error
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from deploy.doctor import main as doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
