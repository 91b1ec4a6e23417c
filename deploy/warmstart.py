"""The warm start of a recipe: scripted play -> the very ids that training would see -> supervised steps.

The environment's module offers ``scripted(observation, rng, **options) -> reply``. It plays the
tasks of the split ``warm`` (or ``train``, where a task set has no such split), and the harness of
the recipe turns the play into ids exactly as it does with sampled replies.
"""

import importlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from actors.harness.chat import ChatHarness
from actors.tokenizer import Tokenizer
from cluster.config import Config
from cluster.errors import ConfigError, nearest
from cluster.types import ids, pack_ids
from envs.base import Env, TaskSet
from envs.registry import build_tasks, builder, paths
from learner.warmstart import warm_start as train

Player = Callable[[str], str]
Row = tuple[NDArray[np.int32], NDArray[np.bool_]]  # token ids [T], imitated or not [T]


class WarmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``model.warm_params``."""

    episodes: int = 4000
    tasks: int = 1500  # different tasks among the episodes
    epochs: int = 2
    batch: int = 32  # episodes per step
    lr: float = 2e-3
    context_weight: float = 0.3  # of tokens that are no reply
    threads: int = 2
    player: dict[str, Any] = {}  # options of the scripted player


def warm_start(config: Config, folder: Path) -> float:
    """Train the fresh model in ``folder`` in place; returns the last loss.

    Deterministic by ``run.seed``. Raises ConfigError when the environment has no scripted player
    or a parameter is unknown.
    """
    warm = _warm_config(config.model.warm_params)
    tokenizer = Tokenizer(folder, config.model.template)
    with Progress(transient=True) as progress:
        playing = progress.add_task("warm start: scripted play", total=warm.episodes)
        rows = []
        for row in _play(config, warm, ChatHarness(tokenizer, config.harness)):
            rows.append(row)
            progress.advance(playing)
        training = progress.add_task("warm start: imitation", total=None)

        def report(step: int, total: int, loss: float) -> None:
            progress.update(training, completed=step, total=total, description=f"warm start: loss {loss:.3f}")

        return train(
            folder,
            [row for row, _ in rows],
            [mask for _, mask in rows],
            epochs=warm.epochs,
            batch=warm.batch,
            lr=warm.lr,
            context_weight=warm.context_weight,
            vocab_used=tokenizer.vocab_size,
            seed=config.run.seed,
            threads=warm.threads,
            report=report,
        )


def play_episode(
    env: Env, tasks: TaskSet, split: str, index: int, player: Player, harness: ChatHarness, turns: int
) -> Row | None:
    """One scripted episode as ids and a mask over the replies; None when not even one turn fits."""
    if harness.end_of_turn is None:
        raise ConfigError("model.warm_start needs a chat template that ends a reply with a special token")
    task = tasks.task(split, index)
    try:
        observation = env.start(task, task.seed)
        history = harness.start(observation)
        mask: list[bool] = []
        for _ in range(turns):
            prompt = harness.prompt(history)
            if prompt is None:
                break
            reply = player(observation)
            output = pack_ids([*harness.tokenizer.encode(reply), harness.end_of_turn])
            mask += [False] * (len(prompt.ids) // 4 - len(mask)) + [True] * (len(output) // 4)
            harness.reply(history, prompt, output)
            result = env.step([reply])
            if result.done:
                break
            observation = result.observation
            harness.observe(history, observation)
    finally:
        env.close()
    whole = ids(bytes(history.ids))
    return (whole, np.asarray(mask, dtype=np.bool_)) if mask else None


def _play(config: Config, warm: WarmConfig, harness: ChatHarness) -> Iterator[Row]:
    """Yield the rows of all episodes, in a fixed order."""
    if harness.rewrites != "never":
        raise ConfigError("model.warm_start needs a chat template that never rewrites the past")
    name = config.env.name
    module = importlib.import_module(paths(name)[0].partition(":")[0])
    scripted = getattr(module, "scripted", None)
    if scripted is None:
        raise ConfigError(f"model.warm_start: env.name = {name!r} has no scripted player")
    tasks = build_tasks(name, config.env.params, config.run.seed)
    split = "warm" if "warm" in tasks.splits else "train"
    maker = builder(name, config.env.params)
    for episode in range(warm.episodes):
        rng = random.Random(f"{config.run.seed}/{episode}")

        def player(observation: str, rng: random.Random = rng) -> str:
            return str(scripted(observation, rng, **warm.player))

        row = play_episode(
            maker.build(), tasks, split, episode % warm.tasks, player, harness, config.env.max_turns
        )
        if row is None:
            raise ConfigError("harness.max_context is too small for a single turn")
        yield row


def _warm_config(params: Mapping[str, Any]) -> WarmConfig:
    """Raises ConfigError naming the nearest valid parameter."""
    valid = [field.name for field in msgspec.structs.fields(WarmConfig)]
    for key in params:
        if key not in valid:
            raise ConfigError(f"model.warm_params.{key} is unknown{nearest(key, valid)}")
    try:
        warm = msgspec.convert(dict(params), WarmConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model.warm_params: {error}") from error
    for key in ("episodes", "tasks", "epochs", "batch", "threads"):
        if getattr(warm, key) < 1:
            raise ConfigError(f"model.warm_params.{key} = {getattr(warm, key)!r}: must be at least 1")
    return warm
