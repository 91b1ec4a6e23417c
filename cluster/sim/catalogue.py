"""The built-in profiles and workloads, and reading those of one's own: a name or a TOML file."""

import re
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
    if _is_file(name):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"no file {name}; built in are {', '.join(names(shelf))}")
        return path
    if name not in names(shelf):
        file = Path(f"{name}.toml")
        meant = f" (did you mean the file {file}?)" if file.is_file() else nearest(name, names(shelf))
        raise ConfigError(f"unknown {shelf.removesuffix('s')} {name!r}{meant}")
    return HERE / shelf / f"{name}.toml"


def _is_file(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def load_profile(name: str) -> Profile:
    """A profile by name or file. Raises ConfigError with the field, its value and what is valid."""
    path = find(name, "profiles")
    profile = read(path, Profile)
    check_profile(profile, str(path) if _is_file(name) else f"profile {name}")
    return profile


def check_profile(profile: Profile, where: str) -> None:
    """Raises ConfigError naming ``where``, the field and its value if that is out of range."""
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
            raise ConfigError(f"{where}: {key} = {value!r} must be positive")
    if not 0 < profile.generator.prefill_share < 1:
        share = profile.generator.prefill_share
        raise ConfigError(f"{where}: generator.prefill_share = {share!r} must lie between 0 and 1")
    if not 0 < profile.learner.scaling <= 1:
        raise ConfigError(f"{where}: learner.scaling = {profile.learner.scaling!r} must lie in 0..1")


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
        key, text = where.rstrip("`").lstrip("."), _in_words(text)
        raise ConfigError(f"{path}: {key}: {text}" if key else f"{path}: {text}") from error


def _in_words(text: str) -> str:
    """What msgspec says, for somebody who writes TOML."""
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        return f"{missing[1]} is missing"
    wrong = re.fullmatch(r"Expected `(.*)`, got `(.*)`", text)
    if not wrong:
        return text
    kinds = {
        "int": "a whole number", "float": "a number", "str": "text in quotes", "array": "a list",
        "float | array": "a number, or a list of [percent, value] pairs", "object": "a section",
    }  # fmt: skip
    want, got = (kinds.get(kind, kind) for kind in wrong.groups())
    return f"must be {want}, not {got}"


def refuse_unknown(tree: dict[str, Any], kind: type[msgspec.Struct], path: str, where: str) -> None:
    """Walk the tree beside the types, through lists of sections too."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"{path}: unknown key {where}{key}{nearest(key, fields)}")
        inner = _section(fields[key])
        if inner is None:
            continue
        many = get_origin(fields[key]) is tuple
        if many != isinstance(value, list):
            bare = re.sub(r"\[[0-9]+\]", "", f"{where}{key}")
            right = f"[[{bare}]]" if many else f"[{bare}]"
            kind_of = "list of sections" if many else "section"
            raise ConfigError(f"{path}: {where}{key} is a {kind_of}: write {right}")
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
