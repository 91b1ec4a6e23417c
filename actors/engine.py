"""A vLLM engine behind the generator contract: token ids in, token ids out, weights in flight.

Requests bypass vLLM's per-request generator tasks: they are validated here, handed to the engine core
directly, and each result goes straight to its caller's mailbox. An id beyond the vocabulary would
kill the engine core, so nothing unchecked ever reaches it.

Log-probs are *processed*: the log-softmax of the logits after temperature (and after the mask of
padded ids), which is the distribution that was sampled. A greedy request (temperature 0) reports
the log-softmax of the unscaled logits, as if the temperature were 1; it is meant for evaluation.

Weights and KV. A prompt's cache key carries a salt that changes with every update, so a new
request never hits a prefix that older weights computed. During an update new requests are held;
requests that have no token yet are withdrawn and enter again with the new salt; those already
generating keep their KV (``kv_on_sync = "keep"``: their version spans say so) or are recomputed by the
new weights (``"recompute"``).

vLLM is imported by ``start`` and not by this module: the import takes seconds and fixes settings that it
reads from the environment (logging, threads, compilation).
"""

import asyncio
import contextlib
import copy
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.mailbox import BusyTime, Mailboxes
from actors.pending import Pending, completed, problem, refused
from cluster.config import GeneratorConfig
from cluster.errors import ConfigError, EngineFailed, StaleEpoch, WeightsFailed
from cluster.messages import GeneratorHealth
from cluster.model_folder import check_folder, ids_in_use
from cluster.types import (
    Completion,
    Request,
    Sampling,
    Weights,
    ids,
    pack_ids,
)

_log = logging.getLogger(__name__)
_WATCH_S = 0.25  # how often death and deadlines are looked for
_CLOSE_S = 10.0
_WARM_UP = "warm-up"


class _Recorder:
    """The engine core's own counters, kept as of its last step (vLLM's stat logger interface)."""

    def __init__(self) -> None:
        self.kv_usage = 0.0

    def record(self, scheduler_stats: Any, **_: Any) -> None:
        """Called by vLLM after every batch of outputs."""
        if scheduler_stats is not None:
            self.kv_usage = float(scheduler_stats.kv_cache_usage)


class Engine:
    """One replica. ``dead`` is set when it can serve no more; ``reason`` says why."""

    def __init__(
        self,
        model_path: str | Path,
        config: GeneratorConfig,
        max_model_len: int,
        name: str,
        seed: int,
        *,
        vocabulary: int | None = None,
        sync_timeout_s: float = 120.0,
    ) -> None:
        """``max_model_len`` bounds prompt + output ids. ``seed`` must differ between replicas.

        ``vocabulary`` is the number of ids that may occur; by default the tokenizer's, or the
        model's if it has no ``tokenizer.json``.
        """
        self.name = name
        self.instance = uuid.uuid4().hex
        self.dead = asyncio.Event()
        self.reason = ""
        self.vocabulary = vocabulary or 0
        self._path = Path(model_path)
        self._config = config
        self._max_model_len = max_model_len
        self._seed = seed
        self._sync_timeout_s = sync_timeout_s
        self._llm: Any = None
        self._recorder = _Recorder()
        self._templates: dict[Sampling, Any] = {}  # sampling -> checked vLLM parameters
        self._pending: dict[tuple[str, str], Pending] = {}
        self._held: list[Pending] | None = None  # a list while an update holds new requests
        self._boxes = Mailboxes(keep_s=max(600.0, 2 * config.request_timeout_s))
        self._busy = BusyTime()
        self._watcher: asyncio.Task[None] | None = None
        self._sync = asyncio.Lock()
        self._serial = 0
        self._salt = ""
        self._loads = 0
        self._epoch = 0
        self._version = 0
        self._checksum = ""
        self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._sync_s = 0.0

    @property
    def healthy(self) -> bool:
        """Started and not dead."""
        return self._llm is not None and not self.dead.is_set()

    @property
    def version(self) -> int:
        """The version of the live weights."""
        return self._version

    # -- life -------------------------------------------------------------------------------

    async def start(self, version: int = 0) -> None:
        """Load the model, which has ``version``, and warm up.

        Raises ConfigError when the folder is no model, EngineFailed when the engine does not start
        within ``start_timeout_s``.
        """
        model_vocabulary = check_folder(self._path)
        if not self.vocabulary:
            self.vocabulary = ids_in_use(self._path)
        if self.vocabulary > model_vocabulary:
            raise ConfigError(f"vocabulary = {self.vocabulary} exceeds the model's {model_vocabulary} ids")
        build = asyncio.create_task(asyncio.to_thread(self._build, self.vocabulary < model_vocabulary))
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._llm = await asyncio.shield(build)
                self._llm._run_output_handler()
                await self._llm.update_weight_version(str(version))
                self._version = version
                self._salt = f"{version}.0"
                self._watcher = asyncio.create_task(self._watch(), name=f"watch:{self.name}")
                await self._warm_up()
        except BaseException as error:
            build.add_done_callback(_shut_down_late)
            await self._fail(f"start failed: {error!r}")
            if isinstance(error, TimeoutError):
                limit = self._config.start_timeout_s
                raise EngineFailed(f"{self.name} did not start within {limit:g} s") from error
            if isinstance(error, Exception):
                raise EngineFailed(f"{self.name} did not start: {error}") from error
            raise

    async def close(self) -> None:
        """End the engine process; outstanding requests are answered with a retryable error."""
        await self._fail("closed")
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher], timeout=_CLOSE_S)
        llm, self._llm = self._llm, None
        if llm is not None:
            await _end_handler(llm)
            await asyncio.to_thread(_shut_down, llm)

    async def run_until_dead(self) -> str:
        """Wait until the engine can serve no more; returns the reason."""
        await self.dead.wait()
        return self.reason

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
                self._refuse(pending, f"BadRequest: {wrong}", retryable=False)
            elif not self.healthy:
                self._refuse(pending, f"EngineFailed: {self.reason or 'not started'}", retryable=True)
            else:
                self._pending[caller, request.id] = pending
                if self._held is not None:
                    self._held.append(pending)
                else:
                    await self._enter(pending)

    async def collect(self, caller: str, wait_s: float) -> list[Completion]:
        """All completions of a caller since its last collect; waits at most ``wait_s`` for one."""
        return await self._boxes.take(caller, wait_s)

    async def cancel(self, caller: str) -> int:
        """Stop everything that a caller has outstanding; nothing is answered. Returns how many."""
        found = [pending for pending in self._pending.values() if pending.caller == caller]
        await self._withdraw(found)
        for pending in found:
            self._pending.pop((caller, pending.request.id), None)
        return len(found)

    def stats(self) -> GeneratorHealth:
        """Counters since the start, and the busy intervals since the last call."""
        running = len(self._pending) - len(self._held or ())
        return GeneratorHealth(
            name=self.name,
            instance=self.instance,
            ready=self.healthy,
            version=self._version,
            running=min(running, self._config.max_num_seqs),
            waiting=len(self._held or ()) + max(0, running - self._config.max_num_seqs),
            kv_usage=self._recorder.kv_usage,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sync_s=self._sync_s,
            busy=self._busy.drain(),
            error=self.reason,
        )

    # -- weights ----------------------------------------------------------------------------

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Replace the weights while requests are in flight; returns the version now live.

        Repeating an order changes nothing. Raises StaleEpoch for an order older than one seen, and
        WeightsFailed with the old version still live. If an update broke off half way, the
        engine is dead as well: half a model serves nobody.
        """
        async with self._sync:
            if epoch < self._epoch:
                raise StaleEpoch(f"{self.name}: order of epoch {epoch}, already at {self._epoch}")
            if not self.healthy:
                raise WeightsFailed(f"{self.name} is not running: {self.reason or 'not started'}")
            same_history = epoch == self._epoch
            self._epoch = epoch
            if weights.version == self._version and weights.checksum == self._checksum:
                return self._version
            first = not self._checksum  # version may equal the start's, whose checksum is unknown
            if same_history and weights.version < self._version + (0 if first else 1):
                raise WeightsFailed(
                    f"{self.name}: version {weights.version} after {self._version} in epoch {epoch}"
                )
            started = time.monotonic()
            try:
                await self._update(weights)
            finally:
                self._sync_s += time.monotonic() - started
            return self._version

    async def checksums(self) -> dict[str, str]:
        """Digest of every tensor of the live model, by worker and vLLM's parameter name.

        On the CPU vLLM packs the linear layers into opaque kernels and leaves empty parameters, so
        their digests are those of nothing: only embeddings and norms are covered there.
        """
        async with asyncio.timeout(self._sync_timeout_s):
            workers = await self._llm.compute_weight_checksums()
        return {name: digest for worker in workers for name, digest in worker.items()}

    async def init_nccl(self, master_address: str, port: int, world_size: int, rank_offset: int) -> None:
        """Join the trainer's NCCL group (``generator.backend = "nccl"``, CUDA).

        ``world_size`` counts the trainer (rank 0) and every engine worker; this engine's workers
        take the ranks from ``rank_offset``. Call it while the trainer joins as rank 0.
        """
        if self._config.backend != "nccl":
            raise ConfigError(f'generator.backend is "{self._config.backend}": NCCL was not chosen')
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest  # see module text

        info = {
            "master_address": master_address,
            "master_port": port,
            "world_size": world_size,
            "rank_offset": rank_offset,
            "packed": True,  # the trainer side's default; both must agree
        }
        async with asyncio.timeout(self._sync_timeout_s):
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def _update(self, weights: Weights) -> None:
        info = _update_info(self._config.backend, weights)
        self._held = []
        try:
            async with asyncio.timeout(self._sync_timeout_s):
                await self._exchange(info, weights.version)
        except Exception as error:
            if not await self._resume() or not await self._unchanged():
                await self._fail(f"update to version {weights.version} broke off half way: {error!r}")
            raise WeightsFailed(
                f"{self.name} stays at version {self._version}, not {weights.version}: {error}"
            ) from error
        except BaseException:
            await self._fail("an update was cancelled half way")
            raise
        else:
            self._version, self._checksum = weights.version, weights.checksum
            self._loads += 1
            self._salt = f"{weights.version}.{self._loads}"
            if not await self._resume():
                raise WeightsFailed(f"{self.name}: {self.reason}")
        finally:
            await self._release()

    async def _exchange(self, info: dict[str, Any], version: int) -> None:
        """Pause, withdraw what has no token yet, load, label. Generation stays paused."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        await llm.pause_generation(mode="keep", clear_cache=self._config.kv_on_sync == "recompute")
        states = llm.output_processor.request_states
        fresh = [p for p in self._pending.values() if p.core_id in states and states[p.core_id].is_prefilling]
        await self._withdraw(fresh)
        if self._held is not None:
            self._held[:0] = fresh
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await llm.finish_weight_update(weight_version=str(version))

    async def _resume(self) -> bool:
        """Resume generation; False (and dead) when the engine does not answer."""
        try:
            async with asyncio.timeout(self._sync_timeout_s):
                await self._llm.resume_generation()
        except Exception as error:
            await self._fail(f"generation did not resume after an update: {error!r}")
            return False
        return True

    async def _unchanged(self) -> bool:
        """Do all workers still hold, whole, the weights that our version names?"""
        try:
            async with asyncio.timeout(self._sync_timeout_s):
                loaded = await self._llm.collective_rpc("springtide_loaded")
                return all(checksum == self._checksum for checksum in loaded)
        except Exception as error:
            _log.error("%s does not say whether its weights are whole: %r", self.name, error)
            return False

    async def _release(self) -> None:
        """Let in the requests that waited for the update."""
        held, self._held = self._held or [], None
        for pending in held:
            if (pending.caller, pending.request.id) not in self._pending:
                continue  # cancelled, timed out or failed meanwhile
            pending.withdrawn = False
            await self._enter(pending)

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
                self._refuse(pending, f"EngineFailed: {error!r}", retryable=True)

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
            cache_salt=self._salt if pending.caller != _WARM_UP else _WARM_UP,
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
            if pending.caller != _WARM_UP:
                self._tokens += len(output.outputs[0].token_ids)
                self._prompt_tokens += len(output.prompt_token_ids)
                self._cached_tokens += completion.cached_tokens
        self._boxes.put(pending.caller, completion)

    def _refuse(self, pending: Pending, error: str, *, retryable: bool) -> None:
        self._boxes.put(pending.caller, refused(pending.request, error, self.name, retryable=retryable))

    async def _withdraw(self, group: list[Pending]) -> None:
        """Take requests back from the core without an answer."""
        for pending in group:
            pending.withdrawn = True
        inside = [pending.core_id for pending in group if pending.core_id]
        if inside and self.healthy:
            await self._llm.abort(inside, internal=True)

    # -- watching and building --------------------------------------------------------------

    async def _watch(self) -> None:
        """Notice death, end requests past their deadline, forget callers that left."""
        while not self.dead.is_set():
            await asyncio.sleep(_WATCH_S)
            if self._llm is None or self._llm.errored:
                await self._fail("the engine process ended")
                return
            now = time.monotonic()
            late = [pending for pending in self._pending.values() if pending.deadline < now]
            await self._withdraw(late)
            for pending in late:
                self._pending.pop((pending.caller, pending.request.id), None)
                limit = self._config.request_timeout_s
                self._refuse(pending, f"EngineFailed: no answer within {limit:g} s", retryable=True)
            forgotten = self._boxes.prune()
            if forgotten:
                _log.warning("%s forgot %d completions that nobody collected", self.name, forgotten)

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
            self._refuse(pending, f"EngineFailed: {reason}", retryable=True)

    async def _warm_up(self) -> None:
        """Small and full batches, sampled and greedy, so that the first real request is quick."""
        length = min(48, self._max_model_len - 2)
        for size in (1, min(8, self._config.max_num_seqs), self._config.max_num_seqs):
            batch = [
                Request(
                    id=f"{size}.{n}",
                    prompt=pack_ids([(n + k) % self.vocabulary for k in range(length)]),
                    sampling=Sampling(max_tokens=2, temperature=float(n % 2)),
                )
                for n in range(size)
            ]
            await self.submit(_WARM_UP, batch)
            answered = 0
            while answered < size:
                for completion in await self.collect(_WARM_UP, self._config.start_timeout_s):
                    answered += 1
                    if completion.error:
                        raise EngineFailed(f"warm-up failed: {completion.error}")
        await self._llm.reset_prefix_cache()
        self._busy.drain()

    def _build(self, padded: bool) -> Any:
        """Import vLLM and start the engine process (blocking; runs in a thread)."""
        config = self._config
        _set_environment(config)
        with _owned():
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine import EngineCoreRequest
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.executor import Executor

            from actors import transfer

            self._core_request_type = EngineCoreRequest
            arguments = AsyncEngineArgs(
                model=str(self._path),
                dtype=config.dtype,
                seed=self._seed,
                max_model_len=self._max_model_len,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                kv_cache_memory_bytes=int(config.kv_cache_gb * (1 << 30)),
                enforce_eager=config.enforce_eager,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                scheduling_policy="priority",
                generation_config="vllm",  # never the folder's own sampling defaults
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                disable_log_stats=False,
                weight_transfer_config=WeightTransferConfig(backend=config.backend),
                worker_extension_cls="actors.transfer.WorkerExtension",
                logits_processors=[transfer.PaddedIdsMask] if padded else None,
                additional_config={
                    "springtide_anchor": transfer.ImportAnchor("watch"),
                    transfer.VOCABULARY_KEY: self.vocabulary,
                },
            )
            vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            llm = AsyncLLM(
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=True,
                log_requests=False,
            )
        llm.logger_manager = self._recorder  # in the place of vLLM's own loggers
        return llm


def _set_environment(config: GeneratorConfig) -> None:
    """Settings that vLLM and torch read from the environment, for this and the engine process."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.update(
        {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),  # the engine process imports our worker side
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit this process's threads
            # One process for scheduler and model instead of two: measured no slower on an idle
            # machine, half the CPU time and half the start-up.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Pinning is per process: several engines would all pin to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads),
        }
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve the other processes
    if config.enforce_eager:
        # The sampler's helpers would still be compiled at the first request: 20 s for nothing.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


@contextlib.contextmanager
def _owned() -> Iterator[None]:
    """Name this process as owner of what is started inside; our other children are not engines."""
    variable = "SPRINGTIDE_ENGINE_OWNER"  # actors.transfer.OWNER_VARIABLE, before its heavy import
    os.environ[variable] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[variable]


def _update_info(backend: str, weights: Weights) -> dict[str, Any]:
    """What the worker needs. With NCCL, ``location`` is the trainer's JSON: names, dtypes, shapes."""
    if backend == "nccl":
        info: dict[str, Any] = msgspec.json.decode(weights.location)
        return info
    path = Path(weights.location)
    if not path.is_file() or path.stat().st_size != weights.nbytes:
        size = path.stat().st_size if path.is_file() else "none"
        raise WeightsFailed(f"version {weights.version}: {path} has {size} of {weights.nbytes} bytes")
    return {"location": str(path.resolve()), "checksum": weights.checksum}


async def _end_handler(llm: Any) -> None:
    """End the task that reads results; it would report the engine's orderly end as a crash."""
    handler = llm.output_handler
    if handler is not None:
        handler.cancel()
        await asyncio.wait([handler], timeout=_CLOSE_S)


def _shut_down(llm: Any) -> None:
    llm.shutdown(timeout=_CLOSE_S)
    llm.shutdown = _nothing  # __del__ calls it again, at interpreter exit with noise


def _nothing() -> None:
    """In the place of a shutdown that is done."""


def _shut_down_late(build: "asyncio.Task[Any]") -> None:
    """The engine came up after its start had been given up."""
    if not build.cancelled() and build.exception() is None:
        _shut_down(build.result())
