"""What must exist before a run starts: the policy's folder, made or found, warm-started or not.

Making a model needs torch, which the driver does without: it happens in a child process
(``python -m deploy.prepare``), and the result is cached by the hash of everything that went in.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.config import Config, build, dump
from cluster.errors import ConfigError, SpringtideError
from deploy.models import MAKERS, check_maker
from envs.registry import paths

CACHE = Path(".cache")
PREPARE_DEADLINE_S = 1800.0


def model_folder(config: Config, cache: Path = CACHE) -> Path:
    """The policy's initial weights as a folder in Hugging Face layout; made and cached if need be.

    Raises ConfigError when ``model.path`` is no such folder, or the maker fails.
    """
    if config.model.path:
        return check_folder(Path(config.model.path))
    check_maker(config.model.maker, config.model.params)
    folder = cache / "models" / fingerprint(config)
    if not (folder / "config.json").exists():
        make_in_child(config, folder)
    return check_folder(folder)


def check_folder(folder: Path, setting: str = "model.path") -> Path:
    """Refuse a folder that lacks what every process needs of it; ``setting`` is what named it."""
    if not folder.is_dir():
        raise ConfigError(f"{setting} = {str(folder)!r}: no such folder")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).exists():
            raise ConfigError(f"{setting} = {str(folder)!r}: it has no {name}")
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{setting} = {str(folder)!r}: it has no *.safetensors")
    return folder.resolve()


def fingerprint(config: Config) -> str:
    """Names the cache folder: everything that the prepared weights depend on, code included."""
    tree = dump(config)
    parts: dict[str, Any] = {"model": tree["model"]}
    modules = [MAKERS.get(config.model.maker, "")]
    if config.model.warm_start:
        parts |= {
            "env": tree["env"]["name"],
            "params": tree["env"]["params"],
            "harness": tree["harness"],
            "turns": config.env.max_turns,
            "seed": config.run.seed,
        }
        modules += [paths(config.env.name)[0], "deploy.warmstart", "learner.warmstart"]
    parts["code"] = [_digest_of_module(name.partition(":")[0]) for name in modules if name]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of_module(name: str) -> str:
    """SHA-256 of a module's source, found without importing it; "" when it has none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def make_in_child(config: Config, folder: Path) -> None:
    """Run this module in a process of its own; its progress goes to our terminal."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "deploy.prepare", str(folder)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([".", *sys.path[1:]]),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would starve whatever else runs here
    }
    try:
        done = subprocess.run(
            command,
            input=json.dumps(dump(config)).encode(),
            env=environment,
            stderr=subprocess.PIPE,
            timeout=PREPARE_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"model.maker took longer than {PREPARE_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"exit code {done.returncode}"
        raise ConfigError(f"making the model ({config.model.maker}) failed: {last}")


def make(config: Config, folder: Path) -> None:
    """Make the model, warm-start it if asked, and move the result into place at the end."""
    from deploy.models import resolve_maker  # torch and transformers: only in this process

    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    resolve_maker(config.model.maker)(partial, **config.model.params)
    if config.model.warm_start:
        from deploy.warmstart import warm_start

        warm_start(config, partial)
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
        shutil.rmtree(partial)  # another job has made the same meanwhile


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    try:
        make(build(json.load(sys.stdin)), parser.parse_args().folder)
    except SpringtideError as reason:
        sys.exit(str(reason))
