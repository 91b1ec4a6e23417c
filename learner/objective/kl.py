"""Penalties: KL to a frozen reference, and entropy. Pure functions over ``N`` selected tokens.

With ``d = log pi - log ref`` of a token sampled by ``pi``:

====  ==========================  ==========================  ===========================
name  value                       gradient                    in expectation
====  ==========================  ==========================  ===========================
k1    ``d``                       ``d * grad log pi``         gradient of KL(pi || ref)
k2    ``d**2 / 2``                ``d * grad log pi``         gradient of KL(pi || ref)
k3    ``exp(-d) - 1 + d``         ``(1 - exp(-d)) grad ...``  gradient of KL(ref || pi)
====  ==========================  ==========================  ===========================

The naive gradient of ``k1`` (``grad log pi``) has expectation zero: it penalises nothing. So k1
keeps its value, which is unbiased for KL(pi || ref), and takes the gradient of k2. k2's value is
biased, its gradient exact; k3's value is unbiased for KL(pi || ref), while its gradient is that
of the *forward* KL. Tokens sampled by an older ``mu`` need the importance weight ``pi/mu``, held
constant and capped, for these expectations to hold.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.objective.surrogate import LOG_RATIO_LIMIT, ratio_of

Estimator = Literal["k1", "k2", "k3"]


def kl_penalty(
    logprobs: Tensor,
    reference: Tensor,
    behaviour: Tensor,
    estimator: Estimator,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """KL loss per token [N] and, detached, the unweighted value of the estimator [N].

    ``cap`` bounds the importance weight ``pi/mu`` of the loss.
    """
    value = _estimate(logprobs, reference, estimator)
    weight = ratio_of(logprobs.detach(), behaviour).clamp(max=cap)
    return weight * value, value.detach()


def _estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    difference = logprobs - reference.detach()
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        limited = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.exp(-limited) - 1 + limited
    if estimator == "k1":
        half_square = difference.square() / 2
        return difference.detach() + (half_square - half_square.detach())
    raise ValueError(f"KL estimator {estimator!r} is unknown (valid: k1, k2, k3)")
