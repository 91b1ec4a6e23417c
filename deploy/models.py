"""Makers of initial policies: one literal table; each is called with (folder, **model.params)."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import ConfigError, nearest
from cluster.keys import check_types

MAKERS = {
    "tiny": "deploy.tiny:make_tiny",
    "smollm2": "deploy.smollm2:make_smollm2",
    "tokens": "deploy.tokens:make_tokens",
}
"""Name -> "module:function"; resolved late because makers import torch."""


def check_maker(name: str, params: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError naming the nearest valid maker or parameter, or a value of another type."""
    if name not in MAKERS:
        raise ConfigError(f"model.maker = {name!r} is unknown{nearest(name, MAKERS)}")
    if params:
        maker = resolve_maker(name)
        valid = list(inspect.signature(maker).parameters)[1:]  # the first is the folder
        for key in params:
            if key not in valid:
                raise ConfigError(f"model.params.{key} is unknown{nearest(key, valid)}")
        check_types("model.params.", params, maker)


def resolve_maker(name: str) -> Callable[..., Any]:
    """The maker of that name. Raises ConfigError for an unknown one."""
    check_maker(name)
    module, _, function = MAKERS[name].partition(":")
    maker: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return maker
