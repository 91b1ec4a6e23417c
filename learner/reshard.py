"""Whole state out of one sharding and into another, bit for bit: weights and AdamW's moments by name.

Gathering is collective, tensor by tensor, so that a device holds at most one whole tensor; rank 0 keeps
them on its CPU. Loading is not: a rank cuts its own shard out of each whole tensor, which the object
store of its machine holds once for all ranks there.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cluster.errors import LearnerLost
from learner.checkpoint import tensors_of
from learner.state import PART_BYTES

Part = dict[str, NDArray[np.float32]]


def gather_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool, part_bytes: int = PART_BYTES
) -> list[Part]:
    """Every tensor whole, fp32 on the CPU, in parts of about ``part_bytes``; [] unless ``keep``. Collective.

    The parts share no memory with the model.
    """
    parts: list[Part] = []
    size = part_bytes
    for name, tensor in tensors_of(model, optimizer).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not keep:
            continue
        if size >= part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = whole.detach().to("cpu", copy=True).numpy()
        size += parts[-1][name].nbytes
    return parts


@torch.no_grad()
def load_parts(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Iterable[Part]) -> None:
    """Copy this rank's shard of every whole tensor in place. Not collective.

    Raises LearnerLost when the parts are not exactly the model's tensors in name and shape: the
    state is somebody else's.
    """
    state = tensors_of(model, optimizer)
    missing = set(state)
    for part in parts:
        for name, array in part.items():
            target = state.get(name)
            whole = torch.from_numpy(np.array(array))  # the object store hands out read-only memory
            if target is None or target.shape != whole.shape or name not in missing:
                have = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
                raise LearnerLost(f"gathered state has {name} of shape {tuple(whole.shape)}, model: {have}")
            missing.discard(name)
            _copy(target, whole)
    if missing:
        raise LearnerLost(f"gathered state lacks {len(missing)} tensors, first {min(missing)}")


def _copy(target: Tensor, whole: Tensor) -> None:
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    source = distribute_tensor(
        whole.to(target.to_local().device), target.device_mesh, target.placements, src_data_rank=None
    )
    target.to_local().copy_(source.to_local())
