"""``springtide eval``: held-out tasks on sealed weights, greedy and sampled, with intervals.

The same controller, worker, router, sandboxes and engine as in training, in one process and
without Ray or a queue server. A checkpoint is verified against its checksums first.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from actors.engine import Engine
from actors.reward import Reward
from actors.router import Router
from actors.tokenizer import Tokenizer
from actors.worker import Worker
from cluster.config import Config
from cluster.controller import Controller, codec_plain
from cluster.errors import CheckpointDamaged, ConfigError, EngineFailed, EnvFailed
from cluster.evaluation import Z95
from cluster.memory import MemoryQueue
from cluster.messages import EvalEpisode, EvalSummary, GeneratorHealth
from cluster.types import Completion, Request, Weights
from deploy.paths import temporary_root
from deploy.preflight import check_environment, check_model, rehearse
from deploy.prepare import check_folder, model_folder
from deploy.signals import Stopper
from deploy.view import View
from envs.pool import EnvPool
from envs.registry import build_tasks, builder
from learner.manifest import checkpoints, latest_valid, verify

DEADLINE_S = 3600.0
NAME = "generator-0"
BASE = "base"  # instead of a folder: the weights that the recipe starts from


Suites = dict[str, tuple[EvalSummary, list[EvalEpisode]]]
Phase = Callable[[str], AbstractContextManager[None]]


def _quiet(text: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class LocalGenerator:
    """An engine of this process as ``controller.GeneratorPort`` and ``ports.Generator``: it has no gate."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """See ``ports.Generator``."""
        await self._engine.submit(caller, requests)

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        """See ``ports.Generator``."""
        return await self._engine.collect(caller, wait_s)

    async def release(self, caller: str, sessions: Sequence[str]) -> None:
        """See ``ports.Generator``."""
        await self._engine.release(sessions)

    async def health(self) -> GeneratorHealth:
        """See ``controller.GeneratorPort``."""
        return self._engine.stats()

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """See ``controller.GeneratorPort``."""
        return await self._engine.load_weights(weights, epoch)

    async def clear(self, epoch: int) -> None:
        """It has no gate."""

    async def restart(self, reason: str) -> None:
        """There is nobody to start another."""
        raise ConfigError(f"the engine must be restarted: {reason}")


def chosen(path: str) -> Path:
    """The folder that ``--checkpoint`` means: of a run, or of its checkpoints, the newest that is whole.

    Raises ConfigError when a run has none, CheckpointDamaged when all are damaged.
    """
    folder = Path(path)
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if root != folder or checkpoints(root):
        newest = latest_valid(root)
        if newest is None:
            raise ConfigError(f"--checkpoint = {path!r}: the run has no checkpoint yet")
        return newest
    return folder


def weights_folder(path: str | Path) -> Path:
    """The model folder of a checkpoint (verified), or the folder itself."""
    folder = Path(path)
    if (folder / "manifest.json").exists():
        damage = verify(folder)
        if damage:
            raise CheckpointDamaged(f"{folder}: {'; '.join(damage)}")
        folder = folder / "hf"
    return check_folder(folder, "--checkpoint")


def evaluate(config: Config, checkpoint: str, against: str | None, file: str | None) -> int:
    """Evaluate, print, and write JSON if asked. "base" stands for the recipe's initial weights."""
    named = {"checkpoint": checkpoint} | ({"against": against} if against else {})
    tasks = check_environment(config)
    with View(f"Springtide: evaluation of {config.run.name}", 0) as view:
        folders = {name: _prepared(config, path, view) for name, path in named.items()}
        with view.phase("rehearsing the environment"):
            for folder in folders.values():
                rehearse(config, tasks, check_model(config, folder))
        results = {}
        for name, folder in folders.items():
            results[name] = run_suites(config, folder, _phases(view, f"{name}: " if against else ""))
    report: dict[str, Any] = {
        name: {mode: codec_plain(summary) for mode, (summary, _) in suites.items()}
        for name, suites in results.items()
    }
    for name, suites in results.items():
        for mode, (summary, _) in suites.items():
            sys.stdout.write(f"{name} {mode}: {describe(summary)}\n")
    if against:
        report["difference"] = {}
        for mode in config.eval.modes:
            mean, low, high, n = paired(results["checkpoint"][mode][1], results["against"][mode][1])
            report["difference"][mode] = {"mean": mean, "low": low, "high": high, "tasks": n}
            interval = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
            sys.stdout.write(f"difference {mode}: {interval} over {n} paired tasks\n")
    if file:
        Path(file).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _phases(view: View, prefix: str) -> Phase:
    return lambda text: view.phase(f"{prefix}{text}")


def _prepared(config: Config, path: str, view: View) -> Path:
    """The model folder to evaluate; says which checkpoint that is if the user did not."""
    if path == BASE:
        with view.phase("preparing the model"):
            return model_folder(config)
    folder = chosen(path)
    if folder != Path(path):
        view.note(f"checkpoint: {folder}")
    with view.phase("checking the checkpoint"):
        return weights_folder(folder)


def describe(summary: EvalSummary) -> str:
    """One line: success with its 95% interval, components, failures."""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in sorted(summary.rewards.items()))
    return (
        f"success {summary.success:.3f} [{summary.low:.3f}, {summary.high:.3f}] of {summary.tasks} tasks"
        f" ({parts}; {summary.failed} failed; {summary.turns_mean:.1f} turns; {summary.seconds:.0f} s)"
    )


def paired(ours: Sequence[EvalEpisode], theirs: Sequence[EvalEpisode]) -> tuple[float, float, float, int]:
    """Mean difference of success on the tasks that both scored, with a 95% normal interval."""
    index = {episode.group.partition("-")[2]: episode for episode in theirs if not episode.error}
    differences = [
        episode.success - index[key].success
        for episode in ours
        if not episode.error and (key := episode.group.partition("-")[2]) in index
    ]
    n = len(differences)
    if n < 2:
        return 0.0, -1.0, 1.0, n
    mean = math.fsum(differences) / n
    variance = math.fsum((d - mean) ** 2 for d in differences) / (n - 1)
    spread = Z95 * math.sqrt(variance / n)
    return mean, mean - spread, mean + spread, n


def run_suites(config: Config, model: Path, phase: Phase = _quiet) -> Suites:
    """Every mode of ``eval.modes`` on one model folder; ``phase`` shows what it is at."""
    return asyncio.run(_interruptible(config, model, phase))


async def _interruptible(config: Config, model: Path, phase: Phase) -> Suites:
    """Ctrl-C and SIGTERM clean up, then leave at once: a model that loads in a thread cannot be stopped.

    When an engine does not start, that thread is freed by the end of the process that it waits for.
    """
    stopper = Stopper()
    others = psutil.Process().children()
    try:
        prefix = f"springtide-{os.getpid()}-eval-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=temporary_root()) as folder:
            os.environ["VLLM_RPC_BASE_PATH"] = folder  # the engine's sockets
            return await stopper.run(_run_suites(config, model, Path(folder), phase))
    except asyncio.CancelledError:
        sys.stderr.write("springtide: interrupted\n")
        sys.stderr.flush()
        _kill_children()
        os._exit(stopper.exit_code)
    except EngineFailed:
        _kill_children(others)
        raise


def _kill_children(spare: Sequence[psutil.Process] = ()) -> None:
    """End every process below this one, but for the children in ``spare``."""
    for child in psutil.Process().children():
        if child not in spare:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*child.children(recursive=True), child):
                    process.kill()


async def _run_suites(config: Config, model: Path, folder: Path, phase: Phase) -> Suites:
    engine = Engine(model, config.generator, config.harness.max_context, NAME, config.run.seed * 1000)
    tasks = build_tasks(config.env.name, config.env.params, config.run.seed)
    queue = MemoryQueue()
    generator = LocalGenerator(engine)
    controller = Controller(config, queue, tasks.task, {NAME: generator})
    pool = EnvPool(builder(config.env.name, config.env.params), config.env, config.env.slots)
    router = Router(f"eval-{time.time_ns()}", config.generator, lambda _: generator)
    background: list[asyncio.Task[None]] = []
    try:
        with phase("starting the engine"):
            await pool.start()
            await engine.start()
        await controller.start()
        worker = Worker(
            "worker-0", config, queue, router, pool, Tokenizer(str(model), config.model.template),
            controller, folder=folder, reward=Reward(config.reward.weights),
        )  # fmt: skip
        background = [asyncio.create_task(controller.run()), asyncio.create_task(worker.run())]
        found: Suites = {}
        for mode in config.eval.modes:
            with phase(f"playing {config.eval.tasks} tasks, {mode}"):
                work = controller.evaluate(f"eval_{mode}", mode, config.eval.tasks, DEADLINE_S)
                summary = await _or_fail(work, background)
            episodes = controller.orders.evaluations.episodes(f"eval_{mode}")
            if summary.failed == summary.tasks:
                last = episodes[-1].error
                raise EnvFailed(f"all {summary.tasks} evaluation tasks failed; the last: {last}")
            found[mode] = (summary, episodes)
        worker.stop()
        await controller.stop()
        await asyncio.wait(background, timeout=10.0)
        return found
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await router.aclose()
        await pool.close()
        await engine.close()


async def _or_fail(work: Any, background: Sequence[asyncio.Task[None]]) -> Any:
    """Await ``work`` unless a background task ends first."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task, *background}, return_when=asyncio.FIRST_COMPLETED)
    if task not in done:
        task.cancel()
        next(iter(done)).result()
        raise ConfigError("a component ended during the evaluation")
    return task.result()
