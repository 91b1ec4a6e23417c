"""What can be known to be wrong before anything is started.

Ray and the engines take most of a minute to come up, so everything that a recipe can get wrong and
this process can see is looked at first: environment and parameters, tokenizer and template against
the model, and a rehearsal, in which the real sandbox starts the first tasks and the harness
renders their prompts.
"""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from actors.harness.chat import ChatHarness
from actors.tokenizer import Tokenizer
from cluster.config import ClusterConfig, Config
from cluster.errors import ConfigError, EnvFailed
from cluster.model_folder import ids_in_use
from cluster.stream import RedisQueue
from deploy.paths import make_importable
from envs.base import TaskSet
from envs.inline import InlinePool, make_pool
from envs.pool import EnvPool
from envs.registry import build_tasks, builder

SCHEMES = ("redis://", "rediss://", "valkey://", "unix://")
CONNECT_S = 5.0
TRIES = 3
"""An environment may fail now and then; one whose first tasks all fail would spin for ever."""


def check_environment(config: Config) -> TaskSet:
    """Name, parameters, task set and the number of evaluation tasks. Raises ConfigError."""
    env = config.env
    make_importable(env.folder)
    builder(env.name, env.params)
    tasks = build_tasks(env.name, env.params, config.run.seed)
    evaluated = config.eval.before or config.eval.after
    available = tasks.size("eval")
    if evaluated and available is not None and config.eval.tasks > available:
        raise ConfigError(f"eval.tasks = {config.eval.tasks}: {env.name} has {available} evaluation tasks")
    return tasks


def check_address(address: str) -> None:
    """Somebody listens at ``cluster.address``. Raises ConfigError after ``CONNECT_S`` at most."""
    if address in ("", "auto"):
        return
    where = f"cluster.address = {address!r}"
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(f'{where}: give HOST:PORT of the head node, or "auto"')
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{where}: nobody answers there ({error})") from error


def check_queue(url: str) -> None:
    """The server of ``queue.url`` answers and lets us in. Raises ConfigError, StreamFailed."""
    if not url:
        return
    if not url.startswith(SCHEMES):
        raise ConfigError(f"queue.url = {url!r}: must start with {', '.join(SCHEMES)}")

    async def connect() -> None:
        queue = RedisQueue(url)
        try:
            await queue.connect()
        finally:
            await queue.aclose()

    asyncio.run(connect())


def check_dashboard_port(config: Config) -> None:
    """Refuse a chosen port that is in use; beside the default one Ray looks for the next free one."""
    port = config.cluster.dashboard_port
    if not config.cluster.dashboard or port == ClusterConfig().dashboard_port:
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cluster.dashboard_port = {port} cannot be used ({error}): "
                "choose another, or cluster.dashboard = false"
            ) from error


def check_transport(config: Config) -> None:
    """The way of weights to the generators. Raises ConfigError."""
    if config.generator.backend == "nccl":
        raise ConfigError(
            'generator.backend = "nccl": both ends exist (learner/publish.py, actors/engine.py), but a job '
            'does not join them yet; use "shared_memory"'
        )
    if not Path(config.cluster.weights_folder).is_dir():
        raise ConfigError(f"cluster.weights_folder = {config.cluster.weights_folder!r}: no such folder")


def check_model(config: Config, model: Path) -> ChatHarness:
    """Tokenizer, template and context against the model's own numbers. Raises ConfigError."""
    path = model / "config.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    ids_in_use(model)
    longest, wanted = facts.get("max_position_embeddings"), config.harness.max_context
    if isinstance(longest, int) and wanted > longest:
        raise ConfigError(
            f"harness.max_context = {wanted}: the model has {longest} positions (max_position_embeddings)"
        )
    return ChatHarness(Tokenizer(model, config.model.template), config.harness)


def rehearse(config: Config, tasks: TaskSet, harness: ChatHarness) -> None:
    """Start the first tasks in the sandbox until one starts, and fit its prompt into the context.

    Raises EnvFailed with the environment's own error when none of ``TRIES`` tasks starts,
    ConfigError when the sandbox cannot run here or the first prompt is too long.
    """
    asyncio.run(_rehearse(config, tasks, harness))


async def _rehearse(config: Config, tasks: TaskSet, harness: ChatHarness) -> None:
    pool = make_pool(config, size=1)
    try:
        await pool.start()
        observation = await _first_observation(pool, tasks)
    finally:
        await pool.close()
    length = harness.start(observation).length
    limits = config.harness
    if length + limits.max_new_tokens > limits.max_context:
        raise ConfigError(
            f"harness.max_context = {limits.max_context} is too small: the first prompt has {length} ids, a "
            f"reply up to harness.max_new_tokens = {limits.max_new_tokens}"
        )


async def _first_observation(pool: EnvPool | InlinePool, tasks: TaskSet) -> str:
    errors: list[EnvFailed] = []
    for index in range(TRIES):
        try:
            task = tasks.task("train", index)
        except Exception as error:  # a foreign task set may raise anything
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f'env.name: task("train", {index}) of its task set raised {what}') from error
        handle = await pool.acquire()
        try:
            return await handle.start(task, task.seed)
        except EnvFailed as error:
            errors.append(error)
        finally:
            await handle.release()
    raise EnvFailed(f"the first {TRIES} tasks did not start; the last said: {errors[-1]}") from errors[-1]
