"""A plain tree read beside the types of its sections, so that a message can name the nearest valid choice."""

import difflib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from cluster.errors import ConfigError, nearest

Struct = type[msgspec.Struct]
PLAIN = {int, float, str, bool, type(None)}
"""Types of parameters that a recipe's value is held to; others are the callee's to check."""


def check_tree(tree: dict[str, Any], kind: Struct) -> None:
    """Every key is one of ``kind``'s, every word of a closed list one of that list. Raises ConfigError."""
    _check(tree, kind, "", kind)


def _check(tree: dict[str, Any], kind: Struct, where: str, top: Struct) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"unknown key {where}{key}{_hint(key, fields, top)}")
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{key} is a section, not a value ({value!r})")
            _check(value, inner, f"{where}{key}.", top)
        for word, words in _closed(value, inner):
            if word not in words:
                raise ConfigError(f"{where}{key} = {word!r} is unknown{_one_of(str(word), words)}")


def _closed(value: Any, kind: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Words of a value that come from a closed list, each with the list."""
    if get_origin(kind) is Literal:
        yield value, get_args(kind)
    elif get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        for item in value:
            yield from _closed(item, get_args(kind)[0])


def _one_of(word: str, valid: tuple[str, ...]) -> str:
    """``" (did you mean 'greedy'? valid: greedy, sampled)"``"""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f" ({meant}valid: {', '.join(valid)})"


def _hint(key: str, fields: dict[str, Any], top: Struct) -> str:
    """The nearest key here, or the very key in another section."""
    elsewhere = [
        f"{section.name}.{key}"
        for section in msgspec.structs.fields(top)
        if isinstance(section.type, type)
        and issubclass(section.type, msgspec.Struct)
        and key in section.type.__struct_fields__
    ]
    if elsewhere:
        return f" (did you mean {' or '.join(map(repr, elsewhere))}?)"
    return nearest(key, fields)


def check_types(where: str, values: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Values for a function (a class: its ``__init__``) fit its annotations, as far as these are plain.

    Raises ConfigError naming ``where`` + the parameter.
    """
    try:
        hints = get_type_hints(function)
    except Exception:  # a foreign module's annotations may mean nothing at run time, in any way
        return
    for name, value in values.items():
        kind = hints.get(name)
        kinds = set(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else {kind}
        if kinds <= PLAIN:
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{where}{name} = {value!r}: {error}") from error
