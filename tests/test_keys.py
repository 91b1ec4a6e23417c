"""The reference of recipe keys: complete, and with a meaning wherever a name does not tell it."""

import io
import types

import msgspec
import pytest
from rich.console import Console

from cluster.config import Config, build, dump
from cluster.errors import ConfigError
from cluster.keys import check_types
from deploy.cli import main
from deploy.keys import keys, show


def test_every_key_of_the_configuration_is_told() -> None:
    tree = dump(build({"env": {"name": "coin"}, "model": {"path": "/nowhere"}}))
    names = {f"{section}.{name}" for section, values in tree.items() for name in values}
    assert {key.name for key in keys()} == names


def test_a_key_tells_type_default_and_meaning() -> None:
    found = {key.name: key for key in keys("run.")}
    lag = found["run.max_lag"]
    assert (lag.kind, lag.default) == ("integer", "2")
    assert lag.meaning.startswith("hard bound on") and "synchronous" in lag.meaning
    assert {key.name: key for key in keys("env.")}["env.name"].default == "required"
    sandbox = keys("env.sandbox")[0]
    assert sandbox.kind == '"bwrap" | "process" | "inline"' and sandbox.default == '"bwrap"'
    assert "inline" in sandbox.meaning, "a comment that goes on below its field belongs to it"
    assert keys("reward.weights")[0].default == "{success = 1}"


def test_every_key_has_a_meaning_in_words() -> None:
    assert not [key.name for key in keys() if len(key.meaning) < 5]
    assert not [key.name for key in keys() if key.meaning.startswith(("noqa", "fmt", "type"))]


def test_the_table_holds_every_key_and_its_section() -> None:
    out = io.StringIO()
    assert show("objective", Console(file=out, width=200)) == 0
    text = out.getvalue()
    assert "[objective]" in text and sum(
        line.startswith("objective.") for line in text.splitlines()
    ) == len(keys("objective."))
    assert "Surrogate, correction" in text


def test_a_wrong_prefix_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'objective'"):
        keys("objectiv.")
    assert main(["keys", "run.max_lagg"]) == 2
    assert "did you mean 'run.max_lag'" in capsys.readouterr().err
    assert main(["keys", "twin"]) == 0
    assert "twin.speed" in capsys.readouterr().out
    assert len(msgspec.structs.fields(Config)) > 10


FOREIGN = """
from __future__ import annotations
from decimal import Decimal
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Absent

class Words:
    def __init__(self, size: int, rate: float | None = None, price: Decimal = Decimal(1), other=0): ...

class Unknown:
    def __init__(self, size: int, other: Absent = None): ...

class Senseless:
    def __init__(self, size: int, other: 1 / 0 = None): ...
"""


def test_annotations_of_another_module_are_held_to_as_far_as_they_are_plain_and_known() -> None:
    module = types.ModuleType("foreign")
    exec(FOREIGN, module.__dict__)
    fitting = {"size": 3, "rate": 1, "price": "ten", "other": [], "unknown": {}}
    check_types("p.", fitting, module.Words.__init__)
    with pytest.raises(ConfigError, match=r"^p\.size = '3': Expected `int`, got `str`"):
        check_types("p.", {"size": "3"}, module.Words.__init__)
    with pytest.raises(ConfigError, match=r"^p\.rate = 'fast': Expected `float \| null`, got `str`"):
        check_types("p.", {"rate": "fast"}, module.Words.__init__)
    for kind in (module.Unknown, module.Senseless):  # nothing to hold them to: the callee's to refuse
        check_types("p.", {"size": "3", "other": 1}, kind.__init__)
