"""Recipes: what is wrong is refused by name, what is right comes back the same."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.config import Config, Section, apply_override, build, dump, load
from cluster.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "deploy" / "recipes").glob("*.toml"))
SMALLEST: dict[str, Any] = {"env": {"name": "coin"}, "model": {"path": "model"}}


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    """The smallest valid tree with some sections added to."""
    names = SMALLEST.keys() | sections.keys()
    return {name: {**SMALLEST.get(name, {}), **sections.get(name, {})} for name in names}


def sections() -> list[tuple[str, type[Section]]]:
    return [
        (field.name, field.type)
        for field in msgspec.structs.fields(Config)
        if isinstance(field.type, type) and issubclass(field.type, Section)
    ]


def test_there_are_recipes() -> None:
    assert ROOT / "deploy" / "recipes" / "frozenlake.toml" in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_round_trips(path: Path) -> None:
    config = load(path)
    assert build(dump(config)) == config


def test_smallest_tree_is_valid_and_derives_capacity() -> None:
    config = build(tree(run={"max_lag": 3, "groups_per_step": 5}))
    assert config.capacity == 20
    assert config.run.steps == 100


@pytest.mark.parametrize(("name", "kind"), sections())
def test_unknown_keys_name_the_nearest(name: str, kind: type[Section]) -> None:
    """In every section: each key with a letter doubled is refused, and the right key is named."""
    for field in msgspec.structs.fields(kind):
        typo = field.name + field.name[-1]
        with pytest.raises(ConfigError) as caught:
            build(tree(**{name: {typo: 1}}))
        assert f"unknown key {name}.{typo} (did you mean {field.name!r}?)" in str(caught.value)


@pytest.mark.parametrize(
    ("sections_", "words"),
    [
        ({"steps": 5}, "unknown key steps (did you mean 'run.steps'?)"),
        ({"run": {"lr": 1.0}}, "unknown key run.lr (did you mean 'learner.lr'?)"),
        ({"replicas": 2}, "unknown key replicas (did you mean 'generator.replicas' or 'scorer.replicas'?)"),
    ],
)
def test_a_key_of_another_section_is_named_with_its_section(sections_: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({**tree(), **sections_})
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("objective", "correction", "foo", "'foo' is unknown (valid: none, token_tis, decoupled, "),
        ("objective", "correction", "decopled", "(did you mean 'decoupled'? valid: none, token_tis, "),
        ("env", "sandbox", "docker", "'docker' is unknown (valid: bwrap, process, inline)"),
        ("eval", "modes", ["sampled", "gready"], "'gready' is unknown (did you mean 'greedy'? valid: "),
        ("learner", "schedule", 3, "3 is unknown (valid: constant, linear, cosine)"),
    ],
)
def test_a_word_of_a_closed_list_names_the_list(section: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tree(**{section: {key: value}}))
    assert str(caught.value).startswith(f"{section}.{key} = ")
    assert words in str(caught.value)


def test_unknown_section_and_strange_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key lerner \(did you mean 'learner'\?\)"):
        build(tree(lerner={"lr": 1.0}))
    with pytest.raises(ConfigError, match=r"unknown key scorer\.zzzz \(valid: kv_cache_gb, mode, path,"):
        build(tree(scorer={"zzzz": 1}))
    with pytest.raises(ConfigError, match=r"run is a section, not a value \(5\)"):
        build({**tree(), "run": 5})


@pytest.mark.parametrize(
    ("sections_", "words"),
    [
        ({"run": {"steps": "many"}}, "run.steps: Expected `int`, got `str`"),
        ({"run": {"steps": 0}}, "run.steps = 0: must be at least 1"),
        ({"run": {"max_lag": -1}}, "run.max_lag = -1"),
        ({"run": {"group_size": 1}}, "run.group_size = 1"),
        ({"run": {"group_size": 4, "min_members": 5}}, "run.min_members = 5: must lie in 1..group_size (4)"),
        ({"run": {"checkpoint_every": 0}}, "run.checkpoint_every = 0"),
        ({"harness": {"max_new_tokens": 512}}, "harness.max_new_tokens = 512"),
        ({"learner": {"row_tokens": 511}}, "learner.row_tokens = 511"),
        ({"learner": {"lr": 0.0}}, "learner.lr = 0.0"),
        ({"learner": {"threads": 0}}, "learner.threads = 0: must be at least 1"),
        ({"eval": {"tasks": 0}}, "eval.tasks = 0: must be at least 1"),
        ({"eval": {"modes": []}}, "eval.modes = (): name at least one"),
        ({"env": {"step_timeout_s": 0.0}}, "env.step_timeout_s = 0.0: must be positive"),
        ({"cluster": {"object_store_mb": 1}}, "cluster.object_store_mb = 1: Ray takes no less than 75"),
        ({"generator": {"temperature": 0.0}}, "generator.temperature = 0.0"),
        ({"generator": {"kv_on_sync": "forget"}}, "generator.kv_on_sync"),
        ({"objective": {"kl_coef": 0.1}}, "needs scorer.replicas >= 1"),
        ({"scorer": {"replicas": 1}}, "does nothing while objective.kl_coef is 0"),
        ({"objective": {"constant": 5.0}}, "objective.constant is unused"),
        ({"model": {"maker": "m:f"}}, "exactly one of model.path"),
        ({"model": {"path": ""}}, "exactly one of model.path"),
        ({"model": {"warm_params": {"games": 5}}}, "model.warm_params is unused"),
        ({"env": {"latency": {"mean": 1.0}}}, "env.latency.mean is unknown (did you mean 'mean_s'?)"),
    ],
)
def test_contradictions_name_field_and_value(sections_: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tree(**sections_))
    assert words in str(caught.value)


def test_missing_required_section_is_named() -> None:
    with pytest.raises(ConfigError, match="env"):
        build({"model": {"path": "model"}})


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("run.steps=5", "run", "steps", 5),
        ("run.name=demo", "run", "name", "demo"),
        ('run.name="5"', "run", "name", "5"),
        ("run.record=true", "run", "record", True),
        ("learner.betas=[0.8, 0.9]", "learner", "betas", (0.8, 0.9)),
        ("queue.url=redis://host:6379/0?a=b", "queue", "url", "redis://host:6379/0?a=b"),
    ],
)
def test_overrides(text: str, section: str, key: str, value: Any) -> None:
    plain = tree()
    apply_override(plain, text)
    assert getattr(getattr(build(plain), section), key) == value


def test_override_reaches_into_free_tables() -> None:
    plain = tree()
    apply_override(plain, "env.params.size=6")
    assert build(plain).env.params == {"size": 6}


@pytest.mark.parametrize("text", ["run.steps", "=5", "run.=5", ".steps=5", "env.name.deep=1"])
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        apply_override(tree(), text)


def test_override_with_a_typo_names_the_nearest() -> None:
    plain = tree()
    apply_override(plain, "run.step=5")
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        build(plain)


def test_bad_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("run = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(broken)


def test_load_applies_overrides_in_order(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[env]\nname = "coin"\n[model]\npath = "model"\n[run]\nsteps = 3\n')
    assert load(path).run.steps == 3
    assert load(path, ["run.steps=4", "run.steps=5"]).run.steps == 5
