"""Plain GRPO in one process, written from the papers: what a replayed run is held against.

Recorded groups in, losses out. Rows, advantages, loss and update are made here, one sequence at a time,
with a stock transformers model and ``torch.optim.AdamW``; nothing of the learner is used. It knows the
plain objective only (PPO clip or none, token mean, no penalty) and refuses any other.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), std unbiased (arXiv:2402.03300); 0 for a constant group
    loss = -1/N sum_t min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A),  rho = pi / mu
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.config import Config
from cluster.types import Group, Trajectory


@dataclass(frozen=True)
class Row:
    """One sequence: ids [T], which of them were sampled [T], their behaviour log-probs [T] (else 0)."""

    ids: Tensor
    sampled: Tensor
    behaviour: Tensor
    temperature: float


def rows_of(trajectory: Trajectory) -> list[Row]:
    """A new row begins wherever a prompt does not keep everything that came before it."""
    rows: list[Row] = []
    ids: list[int] = []
    sampled: list[bool] = []
    behaviour: list[float] = []
    temperature = 1.0

    def finish() -> None:
        if any(sampled):
            rows.append(Row(torch.tensor(ids), torch.tensor(sampled), torch.tensor(behaviour), temperature))

    for turn in trajectory.turns:
        for call in turn.calls:
            if call.keep < len(ids):
                finish()
                ids = ids[: call.keep]
                sampled, behaviour = [False] * call.keep, [0.0] * call.keep
            for raw, is_output in ((call.added, False), (call.output, True)):
                found = torch.frombuffer(bytearray(raw), dtype=torch.int32).tolist() if raw else []
                ids += found
                sampled += [is_output] * len(found)
            behaviour += [0.0] * (len(call.added) // 4)
            behaviour += torch.frombuffer(bytearray(call.logprobs), dtype=torch.float32).tolist()
            temperature = call.temperature
    finish()
    return rows


def group_advantages(rewards: Sequence[float], epsilon: float) -> list[float]:
    """Centred on the group's mean, divided by its standard deviation."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if values.max() == values.min():
        return [0.0] * len(rewards)
    return ((values - values.mean()) / (values.std(unbiased=True) + epsilon)).tolist()


class ReferenceLoop:
    """Model and optimizer; ``step`` trains one batch of groups and returns its loss."""

    def __init__(self, config: Config, model: Path, lr: float | None = None) -> None:
        _refuse_what_is_not_plain(config)
        torch.manual_seed(0)
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=lr or config.learner.lr,
            betas=config.learner.betas,
            eps=config.learner.eps,
            weight_decay=0.0,
        )

    def step(self, groups: Iterable[Group]) -> float:
        """One optimizer step on whole groups; the loss before the update."""
        work: list[tuple[Row, float]] = []
        for group in groups:
            rewards = [float(member.end.outcome or 0.0) for member in group.members]
            values = group_advantages(rewards, self.config.credit.epsilon)
            for member, value in zip(group.members, values, strict=True):
                work += [(row, value) for row in rows_of(member)]
        tokens = sum(int(row.sampled.sum()) for row, _ in work)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for row, value in work:
            loss = self._loss(row, value) / tokens
            loss.backward()
            total += float(loss.detach())
        self._clip()
        self.optimizer.step()
        return total

    def _loss(self, row: Row, advantage: float) -> Tensor:
        logits = self.model(row.ids[None], use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits / row.temperature, -1).gather(1, row.ids[1:, None])[:, 0]
        chosen = row.sampled[1:]
        ratio = (logprobs[chosen] - row.behaviour[1:][chosen]).exp()
        low, high = 1 - self.config.objective.clip_low, 1 + self.config.objective.clip_high
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()

    def _clip(self) -> None:
        """Scale the gradient to ``learner.grad_clip`` when its norm over all parameters is larger."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().item()
        most = self.config.learner.grad_clip
        if 0 < most < norm:
            for gradient in gradients:
                gradient.mul_(most / norm)


def _refuse_what_is_not_plain(config: Config) -> None:
    objective, credit, learner = config.objective, config.credit, config.learner
    plain = (
        objective.correction == "none"
        and objective.reduction == "token_mean"
        and objective.kl_coef == 0
        and objective.entropy_coef == 0
        and (credit.baseline, credit.scale, credit.spread) == ("mean", "std", "token")
        and (learner.schedule, learner.warmup_steps, learner.weight_decay) == ("constant", 0, 0)
    )
    if not plain:
        raise ValueError("the reference loop knows plain GRPO only: remove what the recipe adds to it")
