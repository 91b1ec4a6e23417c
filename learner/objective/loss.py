"""The loss of one micro-batch: a weighted sum over tokens, already globally normalised."""

import dataclasses

import torch
from torch import Tensor

from cluster.config import ObjectiveConfig
from learner.objective.kl import kl_penalty
from learner.objective.surrogate import surrogate


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """What the loss needs of ``N`` trained tokens besides the model's output, each [N]."""

    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    on_policy: Tensor  # bool: whole context sampled at the version being trained
    reference: Tensor | None = None  # log-probs of the frozen reference
    reference_valid: Tensor | None = None  # bool


def token_loss(
    logprobs: Tensor, entropy: Tensor, inputs: TokenInputs, config: ObjectiveConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scalar loss ``sum(weight * (surrogate + kl_coef * kl - entropy_coef * entropy))``.

    Also returns detached fp64 sums over the tokens, to be added over micro-batches and ranks.
    A term whose coefficient is 0 is left out altogether, so that switching it off gives the same
    bits as never having had it. A token without a valid reference gets no KL and is counted.
    """
    term = surrogate(logprobs, inputs.behaviour, inputs.advantage, config)
    policy = (inputs.weight * term.loss).sum()
    loss = policy
    sums = _statistics(logprobs.detach(), entropy.detach(), inputs, term.ratio, term.clipped)
    sums["loss_policy"] = policy.detach()
    if config.kl_coef > 0:
        if inputs.reference is None or inputs.reference_valid is None:
            raise ValueError("objective.kl_coef > 0, but the step was given no reference signal")
        valid = inputs.reference_valid
        reference = torch.where(valid, inputs.reference, logprobs.detach())
        penalty, value = kl_penalty(
            logprobs, reference, inputs.behaviour, config.kl_estimator, config.tis_cap
        )
        penalty = torch.where(valid, penalty, torch.zeros_like(penalty))
        kl = config.kl_coef * (inputs.weight * penalty).sum()
        loss = loss + kl
        sums["loss_kl"] = kl.detach()
        sums["kl_ref"] = torch.where(valid, value, torch.zeros_like(value)).sum()
        sums["kl_tokens"] = valid.sum()
    if config.entropy_coef != 0:
        bonus = config.entropy_coef * (inputs.weight * entropy).sum()
        loss = loss - bonus
        sums["loss_entropy"] = -bonus.detach()
    sums["loss"] = loss.detach()
    return loss, {name: value.double() for name, value in sums.items()}


def _statistics(
    logprobs: Tensor, entropy: Tensor, inputs: TokenInputs, ratio: Tensor, clipped: Tensor
) -> dict[str, Tensor]:
    log_ratio = logprobs - inputs.behaviour
    return {
        "tokens": torch.tensor(len(logprobs), device=logprobs.device),
        "entropy": entropy.sum(),
        "ratio": ratio.sum(),
        "ratio_square": ratio.double().square().sum(),
        "clipped": clipped.sum(),
        "mismatch_kl": (ratio - 1 - log_ratio.clamp(-20, 20)).sum(),  # k3 of KL(mu || pi)
        "lag0_tokens": inputs.on_policy.sum(),
    }


def max_log_ratios(logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    """Largest ``|log pi - log mu|`` over all tokens, and over those at lag 0 (0 if none)."""
    size = (logprobs.detach() - inputs.behaviour).abs().double()
    zero = torch.zeros(1, dtype=torch.float64, device=size.device)
    fresh = torch.where(inputs.on_policy, size, torch.zeros_like(size))
    return torch.cat([zero, size]).max(), torch.cat([zero, fresh]).max()
