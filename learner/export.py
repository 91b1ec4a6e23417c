"""Full weights out of a sharded model, one parameter at a time, in Hugging Face names."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.model import parameter_name

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".safetensors.index.json",
    ".bin.index.json",
)


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor in ``dtype``) of each parameter. Collective: all ranks iterate.

    At most one parameter is whole at a time. A tied parameter is yielded once, under its first
    name, and readers tie it again as the model's config says.
    """
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield parameter_name(name), whole.to(dtype)


def export_hf(model: nn.Module, folder: Path, source: Path, dtype: torch.dtype, write: bool) -> None:
    """Write the model as a Hugging Face folder: config and tokenizer from ``source``, weights anew.

    Collective; only the rank with ``write`` touches the disk, and holds all weights on the CPU.
    """
    tensors = {name: value.cpu().contiguous() for name, value in full_tensors(model, dtype) if write}
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, folder / file.name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
