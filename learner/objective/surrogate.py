"""Token surrogates with off-policy corrections. Pure functions over ``N`` selected tokens.

Notation: ``pi`` is the policy being trained, ``mu`` the one that sampled (its recorded
log-probs), ``prox`` the policy as it was before this optimizer step. A batch gets one update, so
``prox`` has the value of ``pi`` and is simply its detached log-probs: no extra forward pass. With
several updates per batch the caller would pass the log-probs kept from before the first.

Masked tokens are never multiplied away (``NaN * 0`` is NaN): ``select`` replaces them before any
``exp``, so that neither value nor gradient can be touched by what lies outside the mask.
"""

import dataclasses

import torch
from torch import Tensor

from cluster.config import ObjectiveConfig

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond, a ratio is saturated and passes no gradient


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """Loss per token [N] (to be minimised) and what happened to it, detached."""

    loss: Tensor
    ratio: Tensor  # pi / mu
    clipped: Tensor  # bool: the token passes no gradient because of a bound


def select(mask: Tensor, values: Tensor, filler: float = 0.0) -> Tensor:
    """``values`` where ``mask``, else ``filler``; the gradient outside the mask is exactly 0."""
    return torch.where(mask, values, torch.full_like(values, filler))


def ratio_of(log_new: Tensor, log_old: Tensor) -> Tensor:
    """``exp(log_new - log_old)``, saturated at ``exp(+-20)``."""
    return (log_new - log_old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def surrogate(
    logprobs: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    config: ObjectiveConfig,
    prox: Tensor | None = None,
    mask: Tensor | None = None,
) -> Surrogate:
    """The policy loss per token, all arguments ``[N]`` and fp32.

    - ``none``: PPO (arXiv:1707.06347), ratio ``pi/mu`` clipped to ``[1-clip_low, 1+clip_high]``.
    - ``token_tis``: PPO on ``pi/prox``, weighted by ``min(prox/mu, tis_cap)``, no gradient through
      the weight (truncated importance sampling).
    - ``decoupled``: the same with the weight ``prox/mu`` uncapped (arXiv:2505.24298).
    - ``double_sided``: ``-f A log pi`` with ``f = pi/mu`` inside the bounds and 0 outside, no
      gradient through ``f``.
    """
    if mask is not None:
        logprobs, behaviour = select(mask, logprobs), select(mask, behaviour)
        advantage = select(mask, advantage)
        prox = None if prox is None else select(mask, prox)
    prox = logprobs.detach() if prox is None else prox.detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = ratio_of(logprobs.detach(), behaviour)
    if config.correction == "none":
        loss, clipped = _ppo(logprobs, behaviour, advantage, low, high)
    elif config.correction == "double_sided":
        inside = (ratio > low) & (ratio < high)
        factor = torch.where(inside, ratio, torch.zeros_like(ratio))
        loss, clipped = -factor * advantage * logprobs, ~inside
    else:
        weight = ratio_of(prox, behaviour)
        if config.correction == "token_tis":
            weight = weight.clamp(max=config.tis_cap)
        plain, clipped = _ppo(logprobs, prox, advantage, low, high)
        loss = weight * plain
    if mask is not None:
        loss, clipped = select(mask, loss), clipped & mask
    return Surrogate(loss=loss, ratio=ratio, clipped=clipped)


def _ppo(logprobs: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    ratio = ratio_of(logprobs, old)
    free, bound = ratio * advantage, ratio.clamp(low, high) * advantage
    clipped = (bound < free).detach()
    return -torch.minimum(free, bound), clipped
