"""What README.md and docs/ name exists, what they tell to type is read, and the example environment runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from actors.tokenizer import Tokenizer
from cluster.config import load
from deploy import preflight
from deploy.cli import parse
from deploy.paths import with_environment
from deploy.prepare import model_folder
from deploy.tiny import UNKNOWN
from envs.registry import build_tasks, builder

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?<![\w./-])(?:actors|cluster|deploy|docs|envs|learner|tests)/[\w./*-]*[\w/*]")
LINK = re.compile(r"\]\(([^)#:]+)\)")
COMMAND = re.compile(r"^ *springtide (.*?)(?:\s+#.*)?$", re.MULTILINE)
INLINE = re.compile(r"`springtide (\w+ [^`\n]*)`")  # not the bare name of a command
README = PAGES[0].read_text()


def commands(page: Path) -> list[str]:
    """Command lines, those that go on behind a backslash joined; inline ones that hold no placeholder."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    inline = [words for words in INLINE.findall(text) if not re.search(r"\[|\.\.\.", words)]
    return [words for words in (*COMMAND.findall(text), *inline) if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    gone = [name for name in PATH.findall(text) if not list(ROOT.glob(name.rstrip("/")))]
    gone += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not gone
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)


def test_paths_and_commands_are_found() -> None:
    """The patterns see something: without this, the tests beside it could not fail."""
    named = PATH.findall("see `cluster/no_such.py`, deploy/recipes/*.toml.")
    assert named == ["cluster/no_such.py", "deploy/recipes/*.toml"]
    assert sum(len(PATH.findall(page.read_text())) for page in PAGES) > 40
    assert sum(len(commands(page)) for page in PAGES) > 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_read(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line)
        try:
            found = parse(words)
        except SystemExit:
            pytest.fail(f"springtide {line}")
        if words[0] in ("train", "eval"):
            assert found.overrides == [word for word in words if re.fullmatch(r"[a-z_]+\.[a-z_]+=.*", word)]


@pytest.mark.slow
def test_the_environment_of_the_readme_rehearses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as printed, into one folder: it is found, its prompt fits, and the model knows every word."""
    for kind in ("python", "toml"):
        block = re.search(rf"```{kind}\n# (\w+\.\w+)\n(.*?)```", README, re.DOTALL)
        assert block is not None
        (tmp_path / block[1]).write_text(block[2])
    recipe = next(tmp_path.glob("*.toml"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    config = with_environment(load(recipe), recipe)
    tasks = preflight.check_environment(config)
    try:
        model = model_folder(config, tmp_path / "cache")
        harness = preflight.check_model(config, model)
        preflight.rehearse(config, tasks, harness)
        env = builder(config.env.name).build()
        rewards = []
        for index in range(20):
            prompt = env.start(build_tasks(config.env.name).task("eval", index), index)
            tokens = Tokenizer(model)
            assert tokens.encode(UNKNOWN)[0] not in tokens.encode(f"{prompt} odd even")
            rewards.append(env.step(["odd"]).rewards["success"])
        assert set(rewards) == {0.0, 1.0}
    finally:
        sys.modules.pop(recipe.stem, None)
