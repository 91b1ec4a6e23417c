"""The built-in profiles and workloads, and reading those of one's own: a name or a TOML file."""

import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from cluster.config import Section
from cluster.errors import ConfigError, nearest
from cluster.sim.profile import Profile

HERE = Path(__file__).resolve().parent
S = TypeVar("S", bound=Section)


def names(shelf: str) -> list[str]:
    """What is built in on a shelf (``profiles`` or ``workloads``)."""
    return sorted(path.stem for path in (HERE / shelf).glob("*.toml"))


def find(name: str, shelf: str) -> Path:
    """The file of a built-in name, or the file that ``name`` is the path of.

    Raises ConfigError naming the nearest built-in one.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"no file {name}; built in are {', '.join(names(shelf))}")
        return path
    if name not in names(shelf):
        raise ConfigError(f"unknown {shelf.removesuffix('s')} {name!r}{nearest(name, names(shelf))}")
    return HERE / shelf / f"{name}.toml"


def load_profile(name: str) -> Profile:
    """A profile by name or file. Raises ConfigError with the field, its value and what is valid."""
    path = find(name, "profiles")
    profile = read(path, Profile)
    checks: list[tuple[str, float, bool]] = []
    for section in ("generator", "learner", "scorer", "sync", "switch"):
        struct = getattr(profile, section)
        for field in msgspec.structs.fields(struct):
            may_be_zero = section in ("sync", "switch") or field.name in (
                "swap_s", "passes", "step_base_s", "step_seq_s", "step_ctx_s", "step_fixed_s",
            )  # fmt: skip
            value = getattr(struct, field.name)
            checks.append((f"{section}.{field.name}", value, value > 0 or (may_be_zero and value == 0)))
    for key, value, ok in checks:
        if not ok:
            raise ConfigError(f"{path}: {key} = {value!r} must be positive")
    if not 0 < profile.generator.prefill_share < 1:
        share = profile.generator.prefill_share
        raise ConfigError(f"{path}: generator.prefill_share = {share!r} must lie between 0 and 1")
    return profile


def read(path: Path, kind: type[S]) -> S:
    """A TOML file as a ``kind``. Raises ConfigError naming the file, the key and the nearest valid one."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    refuse_unknown(tree, kind, str(path), "")
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        raise ConfigError(f"{path}: {key}: {text}" if key else f"{path}: {text}") from error


def refuse_unknown(tree: dict[str, Any], kind: type[msgspec.Struct], path: str, where: str) -> None:
    """Walk the tree beside the types, through lists of sections too."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"{path}: unknown key {where}{key}{nearest(key, fields)}")
        inner = _section(fields[key])
        if inner is None:
            continue
        items = value if isinstance(value, list) else [value]
        for number, item in enumerate(items):
            spot = f"{where}{key}[{number}]." if isinstance(value, list) else f"{where}{key}."
            if not isinstance(item, dict):
                raise ConfigError(f"{path}: {spot.rstrip('.')} is a section, not a value ({item!r})")
            refuse_unknown(item, inner, path, spot)


def _section(kind: Any) -> type[msgspec.Struct] | None:
    """The section type in ``Section``, ``tuple[Section, ...]`` or ``Section | None``; None for values."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if get_origin(kind) in (tuple, list, Union, UnionType):
        for part in get_args(kind):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                return part
    return None
