"""How a command line is read: overrides stand anywhere, also between and after options."""

import pytest

from deploy.cli import parse


@pytest.mark.parametrize(
    ("line", "recipe", "overrides"),
    [
        ("train R a.b=1 c.d=2", "R", ["a.b=1", "c.d=2"]),
        ("train R --address h:1 queue.url=redis://:p@h:2/0", "R", ["queue.url=redis://:p@h:2/0"]),
        ("train R --dry-run run.steps=50", "R", ["run.steps=50"]),
        ("train R a.b=1 --dry-run a.b=2", "R", ["a.b=1", "a.b=2"]),
        ("train --address h:1 R a.b=1 --dry-run c.d=2", "R", ["a.b=1", "c.d=2"]),
        ("train a.b=1 R", "R", ["a.b=1"]),
        ("train a.b=1 --dry-run c.d=-2 R", "R", ["a.b=1", "c.d=-2"]),
        ("train a.b=1 c.d=2", None, ["a.b=1", "c.d=2"]),
        ("eval R --checkpoint base env.name=x", "R", ["env.name=x"]),
        ("eval --checkpoint base R env.name=x --json f a.b=1", "R", ["env.name=x", "a.b=1"]),
    ],
)
def test_overrides_anywhere(line: str, recipe: str | None, overrides: list[str]) -> None:
    found = parse(line.split())
    assert (found.recipe, found.overrides) == (recipe, overrides)


def test_resume_takes_overrides_before_and_after_options() -> None:
    found = parse(["train", "--resume", "runs/x", "run.steps=9", "--address", "h:1", "learner.lr=1e-4"])
    assert (found.resume, found.recipe) == ("runs/x", None)
    assert found.overrides == ["run.steps=9", "learner.lr=1e-4"]


def test_the_last_of_two_overrides_wins_whatever_stands_between() -> None:
    found = parse(["train", "R", "run.steps=1", "--dry-run", "run.steps=2"])
    assert found.overrides[-1] == "run.steps=2"


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("train R --adress h:1 run.steps=2", "--adress h:1"),
        ("train R --dry-run other.toml", "other.toml"),
        ("report runs/x run.steps=2", "run.steps=2"),
        ("train R --steps=2", "--steps=2"),
    ],
)
def test_what_is_neither_is_refused(line: str, unknown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 2
    assert f"unrecognized arguments: {unknown}" in capsys.readouterr().err
