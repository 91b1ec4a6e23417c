"""Process group and sharding: one code path for one rank and for many, on CPU and on CUDA."""

import dataclasses
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cluster.errors import LearnerLost
from learner.model import PolicyModel


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its mesh, device and numbers."""

    mesh: DeviceMesh
    device: torch.device
    rank: int
    world: int


def rank_device() -> torch.device:
    """The device of this process: its one visible CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def join_mesh(master_addr: str, port: int, rank: int, world: int, timeout_s: float) -> Place:
    """Join the learner group at ``tcp://master_addr:port``; every collective has ``timeout_s``.

    Raises LearnerLost when the others do not arrive in time.
    """
    device = rank_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{master_addr}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise LearnerLost(f"rank {rank} of {world} could not join {master_addr}:{port}: {error}") from error
    return Place(init_device_mesh(device.type, (world,)), device, rank, world)


def leave_mesh() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: PolicyModel, mesh: DeviceMesh, compute: torch.dtype = torch.float32) -> None:
    """Shard parameters in place: each decoder layer is a unit, the rest is the root's.

    Parameters, gradients and moments stay fp32; ``compute`` is what forward and backward run in.
    Alone, a rank keeps its parameters gathered between forward and backward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None, reduce_dtype=torch.float32
    )
    alone = mesh.size() == 1
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not alone)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def set_last_micro_batch(model: PolicyModel, last: bool) -> None:
    """Reduce gradients only in the last backward; until then they accumulate unsharded."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
