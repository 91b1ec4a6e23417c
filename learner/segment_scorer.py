"""The forward pass of a scorer over segments: new tokens only, after the prefixes that it kept."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from learner.clock import Busy
from learner.model import FlatRows, PolicyModel
from learner.prefix import GROW, Continued, Part, Prefix
from learner.segments import Ask, Context, Floats, KeptContexts, Told

_Item = tuple[int, str, Context]  # number of the ask, trajectory, what to score


def kv_bytes(model: PolicyModel) -> int:
    """Bytes of the keys and values of one token."""
    config = model.hf.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next(model.parameters()).element_size()
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head * size)


class SegmentScorer:
    """Scores contexts; keeps up to ``room`` tokens of keys and values (exceeded during one pass by its own).

    The weights are frozen, so what it keeps never gets old.
    """

    def __init__(self, model: PolicyModel, device: torch.device, room: int) -> None:
        self._model = model
        self._device = device
        self.kept: KeptContexts[Prefix] = KeptContexts(room)

    def score(self, asks: Sequence[Ask], most_tokens: int, done: Sequence[str] = ()) -> Told:
        """Log-probs as in training: after the temperature the token was sampled with.

        A pass has up to ``most_tokens`` new tokens, or one context. Trajectories that are ``done`` are
        forgotten first.
        """
        busy = Busy()
        self.kept.drop(done)
        values: list[list[Floats]] = [[] for _ in asks]
        tokens = [0] * len(asks)
        for depth in range(max((len(ask.contexts) for ask in asks), default=0)):
            items = [
                (number, ask.trajectory, ask.contexts[depth])
                for number, ask in enumerate(asks)
                if depth < len(ask.contexts)
            ]
            for passed in self._passes(items, most_tokens):
                for (number, _, _), part, scores in zip(passed[0], *self._forward(*passed), strict=True):
                    values[number].append(scores)
                    tokens[number] += part.count
        joined = tuple(np.concatenate(one) if one else np.empty(0, np.float32) for one in values)
        return Told(joined, tuple(tokens), busy.told(), int(self.kept.room / GROW))

    def _passes(
        self, items: Sequence[_Item], most_tokens: int
    ) -> Iterator[tuple[list[_Item], list[Part]]]:
        """Items and where their new tokens begin, in portions."""
        chosen: list[_Item] = []
        parts: list[Part] = []
        for item in items:
            _, trajectory, context = item
            start, kept = self.kept.take(trajectory, context)
            part = Part(kept or Prefix(), start, len(context.ids) - start)
            if parts and sum(p.count for p in parts) + part.count > most_tokens:
                yield chosen, parts
                chosen, parts = [], []
            chosen.append(item)
            parts.append(part)
        if parts:
            yield chosen, parts

    def _forward(self, items: list[_Item], parts: list[Part]) -> tuple[list[Part], list[Floats]]:
        """Scores of each item's targets."""
        contexts = [context for _, _, context in items]
        for context, part in zip(contexts, parts, strict=True):
            part.prefix.reserve(len(context.ids))
        with torch.no_grad():
            logprobs, _ = self._model(self._rows(contexts, parts))
        for (_, trajectory, context), part in zip(items, parts, strict=True):
            self.kept.keep(trajectory, context.ids, part.prefix, part.prefix.capacity)
        ends = np.cumsum([len(context.targets) for context in contexts])[:-1]
        return parts, np.split(logprobs.cpu().numpy(), ends)

    def _rows(self, contexts: Sequence[Context], parts: Sequence[Part]) -> FlatRows:
        """The new tokens side by side."""
        begins = np.cumsum([0, *(part.count for part in parts)])[:-1]
        ids = [context.ids[part.start :] for context, part in zip(contexts, parts, strict=True)]
        places = [np.arange(part.start, part.start + part.count) for part in parts]
        select = [
            context.targets - 1 - part.start + begin
            for context, part, begin in zip(contexts, parts, begins, strict=True)
        ]
        targets = [context.ids[context.targets] for context in contexts]

        def put(arrays: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(self._device)

        temperature = np.concatenate([context.temperature for context in contexts])
        return FlatRows(
            ids=put(ids)[None],
            positions=put(places)[None],
            layout=Continued(parts),
            select=put(select),
            targets=put(targets),
            temperature=torch.from_numpy(temperature).to(self._device),
            flat=np.empty(0, np.int64),
        )
