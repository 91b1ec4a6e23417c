"""Checkpoints: sharded weights and moments (DCP), the rest beside them, checksums over all.

A folder ``step-000020`` appears whole or not at all: ranks write into ``.step-000020.part``, rank
0 adds ``manifest.json`` with the SHA-256 of every file, last, and renames. DCP itself notices
neither a flipped byte nor a surplus key, and its error is no ``Exception``; both are handled
here. Moments are written by parameter name, for every parameter, so that they load at any world
size and whether or not the optimizer has stepped.

::

    step-000020/  manifest.json  meta.msgpack  state/ (DCP)  rng/rank-0.msgpack ...  hf/
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from cluster.errors import CheckpointDamaged
from learner.export import export_hf
from learner.manifest import MANIFEST, checkpoints, digest, step_of
from learner.mesh import Place
from learner.model import parameter_name

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself. ``extra`` is the caller's (builtins and bytes only).

    Fields that older ones have besides are ignored. Which settings may differ when a run goes on is for
    ``deploy.resume`` to say.
    """

    step: int
    world: int
    extra: dict[str, Any] = {}


def save_checkpoint(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: Place,
    meta: Meta,
    *,
    keep: int,
    source: Path | None = None,
) -> Path:
    """Write a checkpoint and return its folder. Collective, on storage that all ranks share.

    Keeps the newest ``keep`` folders. With ``source``, the weights are also exported as a
    Hugging Face folder ``hf`` beside its config and tokenizer. Saving a step again replaces it.
    Raises CheckpointDamaged when writing fails; the earlier checkpoints are untouched.
    """
    state = tensors_of(model, optimizer)
    final = root / f"step-{meta.step:06d}"
    part = root / f".step-{meta.step:06d}.part"
    chief = place.rank == 0
    try:
        if chief:
            shutil.rmtree(part, ignore_errors=True)
            (part / "rng").mkdir(parents=True)
        dist.barrier()
        save_tensors(state, checkpoint_id=part / "state")
        (part / "rng" / f"rank-{place.rank}.msgpack").write_bytes(random_state())
        if source is not None:
            export_hf(model, part / "hf", source, torch.float32, chief)
        dist.barrier()
        if chief:
            (part / "meta.msgpack").write_bytes(msgspec.msgpack.encode(meta))
            _write_manifest(part)
            _move_into_place(part, final)
            _prune(root, meta.step, keep)
        dist.barrier()
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointDamaged(f"writing {part} failed: {error}") from error
    return final


def _move_into_place(part: Path, final: Path) -> None:
    if final.exists():  # a step that was executed again
        replaced = final.with_name(f".{final.name}.replaced.part")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    part.rename(final)
    _sync(final.parent)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> Meta:
    """Load weights, moments and random state in place. Collective; any world size.

    A rank that the saving job did not have keeps the random state it has. The folder should have
    passed ``verify``. Raises CheckpointDamaged when parts are missing or do not fit the model.
    """
    state = tensors_of(model, optimizer)
    try:
        stored = set(FileSystemReader(folder / "state").read_metadata().state_dict_metadata)
        if stored != set(state):
            odd = sorted(stored ^ set(state))
            raise CheckpointDamaged(f"{folder} and the model differ in {len(odd)} tensors, first {odd[0]}")
        load_tensors(state, checkpoint_id=folder / "state")
        meta = msgspec.msgpack.decode((folder / "meta.msgpack").read_bytes(), type=Meta)
    except CheckpointDamaged:
        raise
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise CheckpointDamaged(f"reading {folder} failed: {error}") from error
    own = folder / "rng" / f"rank-{place.rank}.msgpack"
    if own.exists():
        restore_random_state(own.read_bytes())
    return meta


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors by stable name: ``model.*`` and, per parameter, each moment.

    Raises CheckpointDamaged if a parameter has no optimizer state (see ``make_optimizer``).
    """
    found: dict[str, Tensor] = {}
    for raw_name, parameter in model.named_parameters():
        name = parameter_name(raw_name)
        found[f"model.{name}"] = parameter.detach()
        if not parameter.requires_grad:
            continue
        state = optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            if moment not in state:
                raise CheckpointDamaged(f"parameter {name} has no optimizer state {moment!r}")
            found[f"{moment}.{name}"] = state[moment]
    return found


def _write_manifest(folder: Path) -> None:
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(file)
        files[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    path = folder / MANIFEST
    path.write_text(json.dumps({"files": files}, indent=1))
    _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, newest: int, keep: int) -> None:
    """Keep the last ``keep`` up to ``newest``. Later ones are of a history that was given up."""
    found = checkpoints(root)
    kept = [folder for folder in found if step_of(folder) <= newest][: max(1, keep)]
    for folder in found:
        if folder not in kept:
            shutil.rmtree(folder)
    for rest in root.glob(".step-*.part"):
        shutil.rmtree(rest)


def random_state() -> bytes:
    """State of every random generator of this process (python, numpy, torch, CUDA)."""
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(words).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b"",
    }
    return msgspec.msgpack.encode(state)


def restore_random_state(raw: bytes) -> None:
    """Go on where ``random_state`` was taken."""
    state = msgspec.msgpack.decode(raw)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, numbers, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(numbers, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))
