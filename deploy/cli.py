"""``springtide``: parse first, import heavy things after.

    springtide train RECIPE [key=value ...] [--dry-run] [--address HOST:PORT]
    springtide train --resume RUN
    springtide eval RECIPE --checkpoint FOLDER
    springtide replay RUN
    springtide report RUN
    springtide scale RUN [--generators N] [--learners N] [--scorers N] [--env-workers N] [--show] [--auto]
    springtide simulate WORKLOAD [--ranks N] [--sweep KEY=V1,V2,...] [--json FILE] [--picture FILE]
    springtide doctor
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.config import Config, apply_override, build, dump, load
from cluster.errors import ConfigError, SpringtideError
from cluster.sim.catalogue import names
from cluster.sim.policies import POLICIES
from deploy.paths import check_target, with_environment
from deploy.resume import check_resume
from deploy.signals import Terminated, sigterm_raises

SIMULATE = """\
How should I split my ranks between generating and training, and what would elastic ranks buy?

  springtide simulate text --ranks 32                 about a minute on two cores
  springtide simulate my.toml --profile my-cluster.toml --json out.json --picture out.png
  springtide simulate text --sweep generator.kv_tokens=x0.25,x0.5,x1

A workload says how long episodes are and how slow their environment is, a profile how fast the ranks are.
Write your own by copying a built-in one from cluster/sim/workloads and cluster/sim/profiles; docs/tide.md,
section 4, describes both formats."""
INTERRUPTED = 130
TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 2 after an error, which is one line on stderr, 130 after
    Ctrl-C, 143 after SIGTERM.

    As a command of its own (no ``argv``), one that had a process group leaves at once: torch's caches keep
    the group to the end, and when Python is torn down its threads may abort the process (exit code 134).
    """
    arguments = parse(argv)
    code = _outcome(arguments)
    if argv is None and arguments.leave_at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _outcome(arguments: argparse.Namespace) -> int:
    """Run the command; errors in one line."""
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of a command; overrides (``key=value``) may stand anywhere after it.

    argparse takes positional words in one run only: those behind an option come back as left over.
    """
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    overrides = getattr(arguments, "overrides", None)
    if overrides is not None and "=" in (arguments.recipe or "") and not Path(arguments.recipe).exists():
        # train run.steps=5 RECIPE: the recipe is the first word that is no override.
        overrides.insert(0, arguments.recipe)
        words = [word for word in (*overrides, *rest) if "=" not in word and not word.startswith("-")]
        arguments.recipe = words[0] if words and not getattr(arguments, "resume", None) else None
        for some in (overrides, rest):
            if arguments.recipe in some:
                some.remove(arguments.recipe)
                break
    unknown = [word for word in rest if overrides is None or word.startswith("-") or "=" not in word]
    if unknown:
        command: argparse.ArgumentParser = getattr(arguments, "command", top)
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides is not None:
        overrides += rest
    return arguments


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="springtide", description="Asynchronous RL for LLM agents.")
    top.set_defaults(leave_at_once=False)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy")
    train.add_argument("recipe", nargs="?", help="a recipe (TOML)")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as run.steps=5 (all: springtide keys)"
    )
    train.add_argument("--dry-run", action="store_true", help="print the effective configuration and stop")
    train.add_argument("--resume", metavar="RUN", help="a run folder to continue")
    train.add_argument("--address", help="join a running Ray cluster")
    train.set_defaults(handler=_train, command=train)

    evaluate = commands.add_parser("eval", help="evaluate a checkpoint on held-out tasks")
    evaluate.add_argument("recipe")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value")
    evaluate.add_argument("--checkpoint", required=True, help='a run, checkpoint or model folder, or "base"')
    evaluate.add_argument("--against", help="another one: paired difference on the same tasks")
    evaluate.add_argument("--json", metavar="FILE", help="write the result")
    evaluate.set_defaults(handler=_evaluate, command=evaluate)

    replay = commands.add_parser("replay", help="train a recorded run's batches again, compare the losses")
    replay.add_argument("run", help="a run folder recorded with run.record=true")
    replay.set_defaults(handler=_replay, leave_at_once=True)

    report = commands.add_parser("report", help="draw report.png of a run folder again")
    report.add_argument("run")
    report.set_defaults(handler=_report)

    _add_scale(commands)
    _add_simulate(commands)

    shown = commands.add_parser("keys", help="every key of a recipe: type, default, meaning")
    shown.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="such as run or env.sandbox")
    shown.set_defaults(handler=_keys)

    doctor = commands.add_parser("doctor", help="say what is wrong with this installation, and the remedy")
    doctor.set_defaults(handler=_doctor)
    return top


def _keys(arguments: argparse.Namespace) -> int:
    from deploy.keys import show  # rich

    return show(arguments.prefix)


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
    scale.add_argument("--timeout", type=float, metavar="S", default=900.0,
                       help="how long to wait for it (default: %(default).0f s)")
    scale.set_defaults(handler=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    from deploy.scale import Wish, scale

    wish = Wish(arguments.generators, arguments.learners, arguments.scorers, arguments.env_workers)
    return scale(arguments.run, wish, arguments.show, arguments.auto, arguments.timeout)


def _add_simulate(commands: Any) -> None:
    sim = commands.add_parser(
        "simulate", help="predict a cluster: how to split ranks, what elasticity buys",
        description=SIMULATE, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    sim.add_argument(
        "--set", action="append", metavar="KEY=VALUE",
        help="change a field of workload or profile: load.batch=x0.5, run.max_lag=4; may be given again",
    )  # fmt: skip
    sim.add_argument(
        "--sweep", action="append", metavar="KEY=V1,V2,...",
        help="how the answer depends on something: generator.kv_tokens=x0.25,x0.5,x1; may be given again "
        "(without =: lists the keys)",
    )  # fmt: skip
    sim.add_argument("--study", action="store_true", help="all policies, ladder, leave-one-out: many minutes")
    sim.add_argument("--steps", type=int, metavar="N", help="optimizer steps of a run (default 16; study 24)")
    sim.add_argument("--seeds", type=int, metavar="N", help="runs per policy (default 3; study 5)")
    sim.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores, at most 8)")
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
    config = with_environment(load(arguments.recipe, overrides), arguments.recipe)
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
    before = build(json.loads(json.dumps(tree)))
    for override in overrides:
        apply_override(tree, override)
    config = build(tree)
    check_resume(folder, before, config)
    return folder, config


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.json:
        check_target(arguments.json)
    from deploy.evaluate import evaluate

    if not arguments.recipe:
        raise ConfigError("eval needs a recipe")
    modes = 'eval.modes=["greedy", "sampled"]'
    config = with_environment(load(arguments.recipe, [modes, *arguments.overrides]), arguments.recipe)
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
    folder = Path(arguments.run)
    if not (folder / "metrics.jsonl").is_file():
        why = "it has no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise ConfigError(f"no report of {folder}: {why}; give a run folder")
    from deploy.report import write_report

    try:
        print(write_report(folder))
    except ValueError as error:
        raise ConfigError(f"no report of {folder}: {error}") from error
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from deploy.doctor import main as doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
