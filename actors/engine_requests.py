"""Requests in a vLLM engine: in by ``submit``, out by ``collect``, each with its deadline.

The half of ``actors.engine.Engine`` that knows of requests; see there for the contract.
"""

import asyncio
import copy
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.engine_build import Recorder
from actors.pending import Pending, completed, problem
from actors.replica import Replica
from cluster.config import GeneratorConfig
from cluster.messages import GeneratorHealth
from cluster.types import Request, Sampling, ids

_WATCH_S = 0.25  # how often death and deadlines are looked for
WARM_UP = "warm-up"  # the caller of the first requests, which are not counted


class RequestCore(Replica):
    """State and calls of requests."""

    def __init__(self, name: str, config: GeneratorConfig, max_model_len: int, vocabulary: int) -> None:
        super().__init__(name, config.request_timeout_s)
        self.vocabulary = vocabulary
        self._config = config
        self._max_model_len = max_model_len
        self._llm: Any = None
        self._core_request_type: Any = None
        self._recorder = Recorder()
        self._templates: dict[Sampling, Any] = {}  # sampling -> checked vLLM parameters
        self._pending: dict[tuple[str, str], Pending] = {}
        self._held: list[Pending] | None = None  # a list while an update holds new requests
        self._serial = 0
        self._salt = ""
        self._version = 0
        self._loads = 0

    @property
    def started(self) -> bool:
        """There is an engine process."""
        return self._llm is not None

    @property
    def version(self) -> int:
        """The version of the live weights."""
        return self._version

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 before the start."""
        if self._llm is None:
            return 0
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    # -- requests ---------------------------------------------------------------------------

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """Queue requests; every one is answered in ``collect``, malformed ones with their error.

        Sending a request again while it is outstanding changes nothing.
        """
        deadline = time.monotonic() + self._config.request_timeout_s
        for request in requests:
            if (caller, request.id) in self._pending:
                continue
            pending = Pending(caller, request, deadline, self._finished)
            wrong = problem(request, self.vocabulary, self._max_model_len)
            if wrong:
                self._refuse(caller, request, f"BadRequest: {wrong}", retryable=False)
            elif not self.healthy:
                self._refuse(caller, request, self._why_not(), retryable=True)
            else:
                self._pending[caller, request.id] = pending
                if self._held is not None:
                    self._held.append(pending)
                else:
                    await self._enter(pending)

    async def cancel(self, caller: str) -> int:
        """Stop everything that a caller has outstanding; nothing is answered. Returns how many."""
        found = [pending for pending in self._pending.values() if pending.caller == caller]
        await self._withdraw(found)
        for pending in found:
            self._pending.pop((caller, pending.request.id), None)
        return len(found)

    async def withdraw(self, caller: str, names: Sequence[str]) -> list[str]:
        """Stop these requests of a caller without an answer; returns those that were outstanding."""
        found = [self._pending[caller, name] for name in names if (caller, name) in self._pending]
        await self._withdraw(found)
        for pending in found:
            self._pending.pop((caller, pending.request.id), None)
        return [pending.request.id for pending in found]

    async def release(self, sessions: Sequence[str]) -> None:
        """Tasks that ended need nothing: what the prefix cache has of them ages out."""

    def stats(self) -> GeneratorHealth:
        """Counters since the start, and the busy intervals since the last call."""
        running = len(self._pending) - len(self._held or ())
        return self._report(
            running=min(running, self._config.max_num_seqs),
            waiting=len(self._held or ()) + max(0, running - self._config.max_num_seqs),
            kv_usage=self._recorder.kv_usage,
            preemptions=self._recorder.preemptions,
        )

    # -- one request ------------------------------------------------------------------------

    async def _enter(self, pending: Pending) -> None:
        """Hand a checked request to the engine core."""
        self._serial += 1
        request, llm = pending.request, self._llm
        pending.core_id = f"{self._serial}"
        pending.submitted = time.time()
        try:
            core_request = self._core_request(pending)
            llm.output_processor.add_request(core_request, None, None, 0, pending)
            await llm.engine_core.add_request_async(core_request)
        except Exception as error:  # the core is gone, or refuses what we thought sound
            if self._pending.pop((pending.caller, request.id), None) is not None:
                self._refuse(pending.caller, request, f"EngineFailed: {error!r}", retryable=True)

    def _core_request(self, pending: Pending) -> Any:
        request = pending.request
        sampling = msgspec.structs.replace(request.sampling, seed=None)
        template = self._templates.get(sampling)
        if template is None:
            template = self._templates[sampling] = self._parameters(sampling)
        if request.sampling.seed is not None:
            template = copy.copy(template)
            template.seed = request.sampling.seed
        core_request = self._core_request_type(
            request_id=pending.core_id,
            prompt_token_ids=ids(request.prompt).tolist(),
            mm_features=None,
            sampling_params=template,
            pooling_params=None,
            arrival_time=pending.submitted,
            lora_request=None,
            cache_salt=self._salt if pending.caller != WARM_UP else WARM_UP,
            data_parallel_rank=None,
            priority=request.priority,
        )
        core_request.external_req_id = pending.core_id
        return core_request

    def _parameters(self, sampling: Sampling) -> Any:
        """vLLM's form of ``sampling``, checked by vLLM once: only the given stop ids stop."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # the sampled id's alone
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._llm.input_processor.process_inputs(
            "template",
            {"type": "token", "prompt_token_ids": [0]},
            parameters,
            supported_tasks=("generate",),
        ).sampling_params

    def _finished(self, pending: Pending, output: Any) -> None:
        """A result from vLLM: into its caller's mailbox."""
        if self._pending.pop((pending.caller, pending.request.id), None) is None:
            return
        completion = completed(pending, output, self.vocabulary, self.name)
        if not completion.error:
            self._busy.add(completion.t_start, completion.t_end)
            if pending.caller != WARM_UP:
                self._count(pending.request, completion, len(output.prompt_token_ids))
        self._boxes.put(pending.caller, completion)

    async def _withdraw(self, group: list[Pending]) -> None:
        """Take requests back from the core without an answer."""
        for pending in group:
            pending.withdrawn = True
        inside = [pending.core_id for pending in group if pending.core_id]
        if inside and self.healthy:
            await self._llm.abort(inside, internal=True)

    # -- watching ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Notice death, end requests past their deadline, forget callers that left.

        An engine that nobody can watch any more is dead: it would seem healthy for ever.
        """
        try:
            while not self.dead.is_set():
                await asyncio.sleep(_WATCH_S)
                if self._llm is None or self._llm.errored:
                    await self._fail("the engine process ended")
                    return
                await self._end_late()
                self._forget_callers()
        except Exception as error:
            await self._fail(f"it cannot be watched: {error!r}")

    async def _end_late(self) -> None:
        now = time.monotonic()
        late = [pending for pending in self._pending.values() if pending.deadline < now]
        await self._withdraw(late)
        for pending in late:
            self._pending.pop((pending.caller, pending.request.id), None)
            self._refuse_late(pending.caller, pending.request)

    async def _fail(self, reason: str) -> None:
        """Die: answer everything outstanding, once."""
        if self.dead.is_set():
            return
        self.reason = reason
        self.dead.set()
        outstanding = list(self._pending.values())
        self._pending.clear()
        for pending in outstanding:
            pending.withdrawn = True
            self._refuse(pending.caller, pending.request, f"EngineFailed: {reason}", retryable=True)
