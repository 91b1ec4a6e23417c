"""Which environment a name means: one literal table, plus ``module:Class`` paths.

An environment and its task set share ``env.params``; each gets the parameters that its
constructor names, so that one table in the recipe configures both. A parameter that neither
accepts is refused with the nearest valid one.
"""

import importlib
import inspect
from typing import Any

import msgspec

from cluster.errors import ConfigError, EnvFailed, nearest
from cluster.keys import check_types
from envs.base import Env, TaskSet

ENVIRONMENTS: dict[str, tuple[str, str]] = {
    # name: (environment, task set), each "module:Class"
    "coin": ("envs.coin:Coin", "envs.coin:CoinTasks"),
    "factbook": ("envs.factbook:Factbook", "envs.factbook:FactbookTasks"),
    "frozenlake": ("envs.frozenlake:FrozenLake", "envs.frozenlake:FrozenLakeTasks"),
    "load": ("envs.load:Load", "envs.load:LoadTasks"),
}


class EnvBuilder(msgspec.Struct, frozen=True):
    """A picklable recipe of one environment: ``EnvBuilder("envs.coin:Coin", {"most": 20})``."""

    path: str  # "module:Class"
    params: dict[str, Any] = {}

    def build(self) -> Env:
        """Make a new environment. Raises EnvFailed with the original type and message."""
        try:
            env = load_class(self.path)(**self.params)
        except Exception as error:
            raise EnvFailed(f"cannot make {self.path}: {type(error).__name__}: {error}") from error
        if not isinstance(env, Env):
            raise EnvFailed(f"cannot make {self.path}: it is no envs.base.Env")
        return env


def paths(name: str) -> tuple[str, str]:
    """The (environment, task set) paths of a name.

    ``module:Class`` stands for itself, with the task set ``module:ClassTasks`` beside it.
    Raises ConfigError for an unknown name.
    """
    found = ENVIRONMENTS.get(name)
    if found is not None:
        return found
    module, colon, cls = name.partition(":")
    if colon and module and cls.isidentifier():
        return name, f"{name}Tasks"
    raise ConfigError(f"env.name = {name!r} is unknown{nearest(name, ENVIRONMENTS)}")


def builder(name: str, params: dict[str, Any] | None = None) -> EnvBuilder:
    """What the sandboxed child uses to make environments of this name."""
    path, _ = paths(name)
    return EnvBuilder(path, _split(name, params or {})[0])


def build_tasks(name: str, params: dict[str, Any] | None = None, seed: int = 0) -> TaskSet:
    """Make the task set of a name; ``seed`` is passed when its constructor names it."""
    _, path = paths(name)
    chosen = _split(name, params or {})[1]
    cls = _configured_class(path)
    accepted, everything = _accepted(cls)
    if everything or "seed" in accepted:
        chosen = {"seed": seed, **chosen}
    try:
        tasks = cls(**chosen)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"env.params: cannot make {path}: {type(error).__name__}: {error}") from error
    if not isinstance(tasks, TaskSet):
        raise ConfigError(f"env.name = {name!r}: {path} is no envs.base.TaskSet")
    return tasks


def load_class(path: str) -> type[Any]:
    """Import ``module:Class``. Raises ImportError or AttributeError as Python does."""
    module, _, name = path.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def _configured_class(path: str) -> type[Any]:
    try:
        return load_class(path)
    except Exception as error:  # whatever a foreign module raises while imported
        said = f"env.name: cannot load {path}: {type(error).__name__}: {error}"
        raise ConfigError(f"{said}{_remedy(path, error)}") from error


def _remedy(path: str, error: Exception) -> str:
    """What to do about a class that cannot be loaded; "" where the error says it."""
    module, _, name = path.partition(":")
    top = module.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == top:
        return f" (put {top}.py beside the recipe, into the current folder or on PYTHONPATH)"
    if isinstance(error, AttributeError) and name.endswith("Tasks"):
        return f" (an environment {path.removesuffix('Tasks')} needs its task set, {path}, beside it)"
    return ""


def _split(name: str, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Share ``params`` between the environment's and the task set's constructors."""
    env_path, tasks_path = paths(name)
    env, tasks = _configured_class(env_path), _configured_class(tasks_path)
    env_names, env_any = _accepted(env)
    task_names, task_any = _accepted(tasks)
    for key in params:
        if not (key in env_names or key in task_names or env_any or task_any):
            valid = (env_names | task_names) - {"seed"}
            hint = nearest(key, valid) if valid else f" ({name} takes no parameters)"
            raise ConfigError(f"env.params.{key} is unknown{hint}")
    for cls in (env, tasks):
        check_types("env.params.", params, cls.__init__)
    return (
        {key: value for key, value in params.items() if key in env_names or env_any},
        {key: value for key, value in params.items() if key in task_names or task_any},
    )


def _accepted(cls: type[Any]) -> tuple[set[str], bool]:
    """Names of a constructor's parameters, and whether it takes any keyword."""
    if cls.__init__ is object.__init__:
        return set(), False
    found = inspect.signature(cls).parameters.values()
    names = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names, any(p.kind is p.VAR_KEYWORD for p in found)
