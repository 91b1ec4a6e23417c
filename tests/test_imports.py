"""Starting the command line, or reading a recipe, must not cost the seconds of the heavy libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "ray", "vllm", "transformers", "gymnasium", "matplotlib"}

REPORT = "; import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def loaded(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    command = [sys.executable, "-c", code + REPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module", ["cluster.config", "cluster.types", "cluster.metrics", "envs.registry", "deploy.cli"]
)
def test_module_is_light(module: str) -> None:
    assert loaded(f"import {module}") & HEAVY == set()


def test_help_is_light() -> None:
    code = (
        "import contextlib, io, sys; import deploy.cli\n"
        "sys.argv = ['springtide', '--help']; out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit): deploy.cli.main()\n"
        "assert 'train' in out.getvalue()"
    )
    modules = loaded(code)
    assert modules & HEAVY == set()


def test_the_probe_sees_heavy_modules() -> None:
    assert "matplotlib" in loaded("import matplotlib")
