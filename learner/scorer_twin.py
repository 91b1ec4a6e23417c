"""Timed twin of a scorer: its contract, the times of a profile, no model, no torch."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.config import build
from cluster.processes import announce
from cluster.sim.catalogue import load_profile
from learner.batch import RankBatch
from learner.clock import Busy
from learner.late import Key, Scored
from learner.segments import Ask, Context, KeptContexts, Told


class ScorerTwin:
    """A frozen forward pass that takes its time and says 0 of every token, one batch after the other.

    Of segments it runs the new tokens only; it has room for as many prefixes as a generator of the profile.
    """

    def __init__(self, tree: dict[str, Any], model: str) -> None:
        announce()
        config = build(tree)
        whole = load_profile(config.twin.profile)
        profile, generator = whole.scorer, whole.generator
        self._token_s = profile.passes / profile.forward_tok_s / config.twin.speed
        self._kept: KeptContexts[None] = KeptContexts(generator.kv_tokens)
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """A scorer has no loop of its own; it lives until it is ended."""
        await asyncio.Event().wait()

    async def ready(self) -> bool:
        """It can score."""
        return True

    async def score(self, batch: RankBatch, keys: Sequence[Key]) -> Scored:
        """Scores of the batch's samples; ``keys[i]`` names sample ``i``."""
        async with self._turn:
            busy = Busy()
            tokens = int((batch.segments > 0).sum())
            await asyncio.sleep(tokens * self._token_s)
            owner = batch.sample.reshape(-1)
            lengths = np.bincount(owner[owner >= 0], minlength=len(keys))
            values = tuple(np.zeros(int(length), np.float32) for length in lengths)
            return Scored(keys=tuple(keys), values=values, busy=busy.told(), tokens=tokens)

    async def score_segments(self, asks: Sequence[Ask], done: Sequence[str]) -> Told:
        """See ``learner.streaming.SegmentPort``."""
        async with self._turn:
            busy = Busy()
            self._kept.drop(done)
            tokens = [sum(self._new(ask.trajectory, context) for context in ask.contexts) for ask in asks]
            await asyncio.sleep(sum(tokens) * self._token_s)
            sizes = [sum(len(context.targets) for context in ask.contexts) for ask in asks]
            values = tuple(np.zeros(size, np.float32) for size in sizes)
            return Told(values, tuple(tokens), busy.told(), self._kept.room)

    def _new(self, trajectory: str, context: Context) -> int:
        """Tokens of a context that have to be run; it is kept."""
        start, _ = self._kept.take(trajectory, context)
        self._kept.keep(trajectory, context.ids, None, len(context.ids))
        return len(context.ids) - start

    def pid(self) -> int:
        """Process id (for fault injection)."""
        return os.getpid()
