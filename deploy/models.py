"""Makers of initial policies: one literal table; each is called with (folder, **model.params)."""

import importlib
from collections.abc import Callable
from typing import Any

from cluster.errors import ConfigError, nearest

MAKERS = {
    "tiny": "deploy.tiny:make_tiny",
    "smollm2": "deploy.smollm2:make_smollm2",
    "tokens": "deploy.tokens:make_tokens",
}
"""Name -> "module:function"; resolved late because makers import torch."""


def check_maker(name: str) -> None:
    """Raises ConfigError naming the nearest valid maker."""
    if name not in MAKERS:
        raise ConfigError(f"model.maker = {name!r} is unknown{nearest(name, MAKERS)}")


def resolve_maker(name: str) -> Callable[..., Any]:
    """The maker of that name. Raises ConfigError for an unknown one."""
    check_maker(name)
    module, _, function = MAKERS[name].partition(":")
    maker: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return maker
