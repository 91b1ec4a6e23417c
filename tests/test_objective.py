"""Surrogates and penalties against slow loops, exact gradients, and hostile masked values."""

import math

import pytest
import torch

from cluster.config import ObjectiveConfig
from learner.objective.kl import kl_penalty
from learner.objective.loss import TokenInputs, max_log_ratios, token_loss
from learner.objective.surrogate import surrogate

CORRECTIONS = ("none", "token_tis", "decoupled", "double_sided")


def tokens(size: int = 40, spread: float = 0.4, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(size, generator=generator, dtype=dtype) * 4
    behaviour = logprobs + spread * torch.randn(size, generator=generator, dtype=dtype)
    advantage = torch.randn(size, generator=generator, dtype=dtype)
    prox = logprobs + 0.3 * torch.randn(size, generator=generator, dtype=dtype)
    return logprobs, behaviour, advantage, prox


def slow(
    logp: float, mu: float, advantage: float, prox: float, config: ObjectiveConfig
) -> tuple[float, float]:
    """(loss, d loss / d logp) of one token, written out case by case."""
    low, high = 1 - config.clip_low, 1 + config.clip_high

    def ppo(old: float) -> tuple[float, float]:
        ratio = math.exp(logp - old)
        if advantage >= 0 and ratio > high:
            return -high * advantage, 0.0
        if advantage < 0 and ratio < low:
            return -low * advantage, 0.0
        return -ratio * advantage, -ratio * advantage

    if config.correction == "none":
        return ppo(mu)
    if config.correction == "double_sided":
        ratio = math.exp(logp - mu)
        factor = ratio if low < ratio < high else 0.0
        return -factor * advantage * logp, -factor * advantage
    weight = math.exp(prox - mu)
    if config.correction == "token_tis":
        weight = min(weight, config.tis_cap)
    loss, slope = ppo(prox)
    return weight * loss, weight * slope


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_surrogate_against_the_slow_loop(correction: str) -> None:
    config = ObjectiveConfig(correction=correction, tis_cap=1.2)
    logprobs, behaviour, advantage, prox = tokens()
    logprobs.requires_grad_()
    term = surrogate(logprobs, behaviour, advantage, config, prox)
    term.loss.sum().backward()
    rows = zip(logprobs.tolist(), behaviour.tolist(), advantage.tolist(), prox.tolist(), strict=True)
    want = [slow(*row, config) for row in rows]
    assert term.loss.tolist() == pytest.approx([loss for loss, _ in want], rel=1e-9)
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in want], rel=1e-9)
    zeroed = [slope == 0 for _, slope in want]
    assert term.clipped.tolist() == zeroed and any(zeroed) and not all(zeroed)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_without_prox_it_is_the_policy_before_the_update(correction: str) -> None:
    config = ObjectiveConfig(correction=correction)
    logprobs, behaviour, advantage, _ = tokens()
    implied = surrogate(logprobs, behaviour, advantage, config)
    given = surrogate(logprobs, behaviour, advantage, config, logprobs.clone())
    assert torch.equal(implied.loss, given.loss)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_at_lag_zero_every_correction_is_plain_policy_gradient(correction: str) -> None:
    logprobs, _, advantage, _ = tokens()
    logprobs.requires_grad_()
    term = surrogate(logprobs, logprobs.detach().clone(), advantage, ObjectiveConfig(correction=correction))
    term.loss.sum().backward()
    assert torch.allclose(logprobs.grad, -advantage) and (term.ratio == 1).all() and not term.clipped.any()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_outside_the_mask_never_arrives(correction: str, poison: float) -> None:
    config = ObjectiveConfig(correction=correction)
    logprobs, behaviour, advantage, prox = tokens()
    mask = torch.arange(40) % 3 != 0
    clean = surrogate(logprobs, behaviour, advantage, config, prox, mask)
    dirty = [torch.where(mask, t, torch.full_like(t, poison)) for t in (logprobs, behaviour, advantage, prox)]
    dirty[0].requires_grad_()
    term = surrogate(dirty[0], dirty[1], dirty[2], config, dirty[3], mask)
    term.loss.sum().backward()
    assert torch.equal(term.loss, clean.loss) and not term.loss[~mask].any()
    assert torch.isfinite(dirty[0].grad).all() and not dirty[0].grad[~mask].any()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_extreme_ratios_stay_finite(correction: str, gap: float) -> None:
    logprobs = torch.full((2,), -600.0, requires_grad=True)
    behaviour = logprobs.detach() - gap
    config = ObjectiveConfig(correction=correction)
    surrogate(logprobs, behaviour, torch.tensor([1.0, -1.0]), config).loss.sum().backward()
    assert torch.isfinite(logprobs.grad).all()


THETA = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.1, 0.4, -0.2], dtype=torch.float64), -1)
BEHAVIOUR = torch.log_softmax(torch.tensor([-0.3, 0.2, 0.5], dtype=torch.float64), -1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_kl_gradient_is_the_documented_one(estimator: str, off_policy: bool) -> None:
    theta = THETA.clone().requires_grad_()
    policy = torch.log_softmax(theta, -1)
    sampler = BEHAVIOUR if off_policy else policy.detach()
    loss, value = kl_penalty(policy, REFERENCE, sampler, estimator, cap=1e9)
    (sampler.exp() * loss).sum().backward()

    exact = THETA.clone().requires_grad_()
    log_pi = torch.log_softmax(exact, -1)
    if estimator == "k3":
        (REFERENCE.exp() * (REFERENCE - log_pi)).sum().backward()
    else:
        (log_pi.exp() * (log_pi - REFERENCE)).sum().backward()
    assert theta.grad.tolist() == pytest.approx(exact.grad.tolist(), rel=1e-9)
    if estimator != "k2":
        kl = (log_pi.exp() * (log_pi - REFERENCE)).sum().item()
        assert (policy.exp() * value).sum().item() == pytest.approx(kl, rel=1e-9)


def test_kl_weight_is_capped() -> None:
    logprobs = torch.tensor([-0.1])
    loss, value = kl_penalty(logprobs, torch.tensor([-2.0]), torch.tensor([-5.0]), "k2", cap=2.0)
    assert loss.item() == pytest.approx(2 * value.item())


def inputs_of(size: int = 40, **changes) -> tuple[torch.Tensor, torch.Tensor, TokenInputs]:
    logprobs, behaviour, advantage, prox = tokens(size, dtype=torch.float32)
    fields = {
        "behaviour": behaviour,
        "advantage": advantage,
        "weight": torch.full((size,), 1 / max(1, size)),
        "on_policy": torch.arange(size) < 10,
        "reference": prox,
        "reference_valid": torch.ones(size, dtype=torch.bool),
    } | changes
    return logprobs.requires_grad_(), -logprobs.detach(), TokenInputs(**fields)


def test_switched_off_penalties_leave_no_bit() -> None:
    off = ObjectiveConfig()
    logprobs, entropy, inputs = inputs_of()
    base, _ = token_loss(logprobs, entropy, inputs, off)
    bare = TokenInputs(inputs.behaviour, inputs.advantage, inputs.weight, inputs.on_policy)
    other, sums = token_loss(logprobs, entropy, bare, off)
    plain = (inputs.weight * surrogate(logprobs, inputs.behaviour, inputs.advantage, off).loss).sum()
    assert torch.equal(base, other) and torch.equal(base, plain)
    assert "loss_kl" not in sums and "loss_entropy" not in sums
    on, _ = token_loss(logprobs, entropy, inputs, ObjectiveConfig(kl_coef=0.1, entropy_coef=0.1))
    assert not torch.equal(base, on)


def test_penalties_add_up() -> None:
    config = ObjectiveConfig(kl_coef=0.3, entropy_coef=0.2)
    logprobs, entropy, inputs = inputs_of()
    loss, sums = token_loss(logprobs, entropy, inputs, config)
    penalty, value = kl_penalty(logprobs, inputs.reference, inputs.behaviour, "k3", config.tis_cap)
    policy = (inputs.weight * surrogate(logprobs, inputs.behaviour, inputs.advantage, config).loss).sum()
    want = policy + 0.3 * (inputs.weight * penalty).sum() - 0.2 * (inputs.weight * entropy).sum()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    assert sums["kl_ref"].item() == pytest.approx(value.sum().item(), rel=1e-6)
    parts = sums["loss_policy"] + sums["loss_kl"] + sums["loss_entropy"]
    assert sums["loss"].item() == pytest.approx(parts.item(), rel=1e-6)


def test_kl_without_a_signal_is_refused_and_missing_tokens_are_left_out() -> None:
    config = ObjectiveConfig(kl_coef=0.3)
    logprobs, entropy, inputs = inputs_of(reference=None, reference_valid=None)
    with pytest.raises(ValueError, match="reference signal"):
        token_loss(logprobs, entropy, inputs, config)
    valid = torch.arange(40) % 2 == 0
    poisoned = torch.where(valid, tokens(dtype=torch.float32)[3], torch.full((40,), math.nan))
    logprobs, entropy, inputs = inputs_of(reference=poisoned, reference_valid=valid)
    loss, sums = token_loss(logprobs, entropy, inputs, config)
    loss.backward()
    assert torch.isfinite(logprobs.grad).all() and sums["kl_tokens"] == 20


def test_no_token_at_all_is_a_zero_with_a_gradient() -> None:
    logprobs, entropy, inputs = inputs_of(0)
    loss, sums = token_loss(logprobs, entropy, inputs, ObjectiveConfig(kl_coef=0.1, entropy_coef=0.1))
    loss.backward()
    assert loss == 0 and sums["tokens"] == 0
    assert [float(x) for x in max_log_ratios(logprobs, inputs)] == [0.0, 0.0]


def test_log_ratio_at_lag_zero_looks_only_at_fresh_tokens() -> None:
    logprobs, _, inputs = inputs_of()
    gaps = (logprobs.detach() - inputs.behaviour).abs()
    everything, fresh = max_log_ratios(logprobs, inputs)
    assert everything == gaps.max().double() and fresh == gaps[:10].max().double() and fresh < everything
