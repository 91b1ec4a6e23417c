"""AdamW on sharded parameters, a learning rate that is a pure function of the step, clipping."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cluster.config import LearnerConfig


def learning_rate(step: int, steps: int, config: LearnerConfig) -> float:
    """Rate of optimizer step ``step`` (1 is the first) of ``steps``; resuming is exact.

    Linear warm-up over ``warmup_steps``, then constant, or linear or cosine decay to 0 just
    after the last step.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return config.lr * step / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - 1 - warmup) / max(1, steps - warmup))
    if config.schedule == "linear":
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model: nn.Module, config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW whose state exists from the start: zeros, also for parameters without a gradient.

    Checkpoints rely on it: an optimizer that has not stepped would save or load nothing.
    Weight decay applies to matrices only, not to norms and biases.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1]
    plain = [p for p in parameters if p.dim() <= 1]
    groups = [
        {"params": part, "weight_decay": decay}
        for part, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if part
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def local(tensor: Tensor) -> Tensor:
    """This rank's shard: the maths is elementwise, so dispatch through DTensor is saved."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Global 2-norm over all ranks' gradient shards (fp64 scalar on the parameters' device).

    Shards partition each parameter, so squares simply add up. A parameter without a gradient
    counts as zero. Collective: every rank must call it.
    """
    owned = list(parameters)
    shards = [local(p.grad) for p in owned if p.grad is not None]
    shards = [g for g in shards if g.numel()]  # a rank beyond a parameter's rows holds an empty shard
    total = torch.zeros((), dtype=torch.float64, device=owned[0].device)
    if shards:
        norms = torch._foreach_norm(shards)
        total = torch.stack(norms).double().square().sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient shard by ``factor``, in place."""
    shards = [local(p.grad) for p in parameters if p.grad is not None]
    if shards:
        torch._foreach_mul_(shards, factor)


def apply_step(
    optimizer: torch.optim.AdamW, parameters: Sequence[Tensor], rate: float, norm: float, clip: float
) -> bool:
    """Clip by the global norm and step. Returns False, leaving all untouched, if it is not finite.

    ``clip`` 0 clips nothing.
    """
    if not math.isfinite(norm):
        return False
    if 0 < clip < norm:
        scale_gradients(parameters, clip / norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return True
