"""A request on its way through an engine: the check before, the completion after."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cluster.types import Completion, Request, StopReason, VersionSpan, ids, pack_floats, pack_ids

_STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class Pending:
    """One request inside the engine; vLLM's output processor calls ``put`` when it ends."""

    __slots__ = ("answer", "caller", "core_id", "deadline", "request", "submitted", "withdrawn")

    def __init__(
        self, caller: str, request: Request, deadline: float, answer: Callable[["Pending", Any], None]
    ) -> None:
        self.caller = caller
        self.request = request
        self.deadline = deadline
        self.answer = answer
        self.core_id = ""
        self.submitted = 0.0
        self.withdrawn = False  # taken back from the core, to be entered again

    def put(self, output: Any) -> None:
        """Receive a finished ``RequestOutput`` or the engine's exception."""
        if not self.withdrawn:
            self.answer(self, output)


def problem(request: Request, vocabulary: int, max_model_len: int) -> str:
    """Why no generator can serve this request; empty when it is sound."""
    prompt, sampling = ids(request.prompt), request.sampling
    if len(prompt) == 0:
        return "the prompt is empty"
    if sampling.max_tokens < 1:
        return f"max_tokens = {sampling.max_tokens}: must be at least 1"
    if not 0 <= sampling.temperature < 100:
        return f"temperature = {sampling.temperature}: must be 0 (greedy) or positive, below 100"
    if len(prompt) + sampling.max_tokens > max_model_len:
        return f"{len(prompt)} prompt ids + max_tokens {sampling.max_tokens} exceed {max_model_len}"
    for what, low, high in (
        ("prompt", int(prompt.min()), int(prompt.max())),
        ("stop", min(sampling.stop_ids, default=0), max(sampling.stop_ids, default=0)),
    ):
        if low < 0 or high >= vocabulary:
            return f"{what} id {low if low < 0 else high} is outside [0, {vocabulary})"
    return ""


def completed(pending: Pending, output: Any, vocabulary: int, generator: str) -> Completion:
    """The completion for vLLM's finished ``RequestOutput``, or for the exception in its place."""
    request = pending.request
    if isinstance(output, Exception):
        return refused(request, f"EngineFailed: {output!r}", generator, retryable=True)
    sample = output.outputs[0]
    stop = _STOPS.get(sample.finish_reason)
    chosen = list(sample.token_ids)
    if stop is None or not chosen or not sample.weight_versions:
        text = f"EngineFailed: ended by {sample.finish_reason!r} after {len(chosen)} ids"
        return refused(request, text, generator, retryable=True)
    logprobs = np.array([step[i].logprob for i, step in zip(chosen, sample.logprobs, strict=True)])
    if max(chosen) >= vocabulary or not np.isfinite(logprobs).all():
        text = "EngineFailed: sampled a padded id or a log-prob that is not finite"
        return refused(request, text, generator, retryable=True)
    start, end = _times(pending, output)
    return Completion(
        id=request.id,
        output=pack_ids(chosen),
        logprobs=pack_floats(logprobs),
        versions=tuple(VersionSpan(int(s.version), s.start, s.end) for s in sample.weight_versions),
        stop=stop,
        cached_tokens=output.num_cached_tokens or 0,
        t_start=start,
        t_end=end,
        generator=generator,
    )


def refused(request: Request, error: str, generator: str, *, retryable: bool) -> Completion:
    """The completion of a request that brought no tokens."""
    return Completion(id=request.id, generator=generator, error=error, retryable=retryable)


def _times(pending: Pending, output: Any) -> tuple[float, float]:
    """(first scheduled, last token) in seconds since the epoch, from the core's monotonic clock."""
    metrics, offset = output.metrics, time.time() - time.monotonic()
    if metrics is None or not metrics.scheduled_ts:
        return pending.submitted, time.time()
    return metrics.scheduled_ts + offset, metrics.last_token_ts + offset
