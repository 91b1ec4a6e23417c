"""``springtide keys``: every key of a recipe with its type, default and meaning, out of the code itself.

The meaning is the comment beside the field in ``cluster/sections.py``, so there is no second place that could
tell something else.
"""

import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.config import Config
from cluster.errors import ConfigError, nearest
from cluster.sections import Section

_FIELD = re.compile(r" {4}(\w+): ")


@dataclass(frozen=True)
class Key:
    """``Key("run.max_lag", "int", "2", "hard bound on ...")``; ``default`` is "required" if there is none."""

    name: str
    kind: str
    default: str
    meaning: str


def keys(prefix: str = "") -> list[Key]:
    """All keys that begin with ``prefix``. Raises ConfigError when none does."""
    found = [key for key in _all() if key.name.startswith(prefix)]
    if not found:
        sections = {field.name for field in msgspec.structs.fields(Config)}
        names = sections | {key.name for key in _all()} if "." in prefix else sections
        raise ConfigError(f"no key begins with {prefix!r}{nearest(prefix, names)}")
    return found


def show(prefix: str = "", console: Console | None = None) -> int:
    """Print a table per section; the exit code."""
    console = console or Console()
    chosen = keys(prefix)
    for field in msgspec.structs.fields(Config):
        rows = [key for key in chosen if key.name.startswith(f"{field.name}.")]
        if not rows:
            continue
        head = " ".join((field.type.__doc__ or "").split())
        console.print(Text(f"[{field.name}]  {head}", style="bold"))
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("key", "type", "default", "meaning"):
            table.add_column(column, no_wrap=column == "key", header_style="dim")
        for key in rows:
            table.add_row(*(Text(text) for text in (key.name, key.kind, key.default, key.meaning)))
        console.print(table)
        console.print()
    return 0


def _all() -> Iterator[Key]:
    for section in msgspec.structs.fields(Config):
        meanings = _comments(section.type)
        for field in msgspec.structs.fields(section.type):
            default: Any = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            shown = "required" if default is msgspec.NODEFAULT else _toml(default)
            yield Key(f"{section.name}.{field.name}", _kind(field.type), shown, meanings.get(field.name, ""))


def _comments(section: type[Section]) -> dict[str, str]:
    """Field name -> the comment on its line and on the lines below it."""
    found: dict[str, str] = {}
    name = ""
    source = inspect.getsource(section)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and (match := _FIELD.match(token.line)) and token.start[1] == 4:
            name = match.group(1)
        elif token.type == tokenize.COMMENT and name:
            text = token.string.lstrip("# ")
            if not text.startswith(("type:", "noqa", "fmt:")):
                found[name] = f"{found[name]} {text}" if name in found else text
    return found


def _kind(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(_toml(value) for value in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table of {_kind(arguments[1])}"
    if origin is Union:
        return " or ".join(_kind(argument) for argument in arguments)
    return {Any: "anything", str: "text", float: "number", int: "integer", bool: "true | false"}[kind]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml(item)}' for name, item in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)
