"""How a vLLM engine is made and ended: its settings, its process, its counters."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from cluster.config import GeneratorConfig

_CLOSE_S = 10.0


class Recorder:
    """The engine core's own counters, kept as of its last step (vLLM's stat logger interface)."""

    def __init__(self) -> None:
        self.kv_usage = 0.0
        self.preemptions = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any = None, **_: Any) -> None:
        """Called by vLLM after every batch of outputs."""
        if scheduler_stats is not None:
            self.kv_usage = float(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self.preemptions += int(iteration_stats.num_preempted_reqs)


def build(
    path: Path,
    config: GeneratorConfig,
    max_model_len: int,
    seed: int,
    recorder: Recorder,
    *,
    vocabulary: int,
    padded: bool,
) -> tuple[Any, Any]:
    """Import vLLM and start the engine process (blocking; runs in a thread).

    ``padded``: the model has more ids than ``vocabulary``, and those are masked. Returns the engine's client
    and vLLM's type of a request to its core.
    """
    _set_environment(config)
    with _owned(), deaf():
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        from actors import transfer

        arguments = AsyncEngineArgs(
            model=str(path),
            dtype=config.dtype,
            seed=seed,
            max_model_len=max_model_len,
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
                transfer.VOCABULARY_KEY: vocabulary,
            },
        )
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        llm = AsyncLLM(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=True,
            log_requests=False,
        )
    llm.logger_manager = recorder  # in the place of vLLM's own loggers
    return llm, EngineCoreRequest


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
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says before it has read that
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


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """What this thread starts inside never sees SIGINT; we end it ourselves.

    Ctrl-C goes to the whole process group: a child would die before it can be told to, with the traceback of
    a Python that is still starting. Signals that are blocked stay so in a child.
    """
    resource_tracker.ensure_running()  # its own start ends with SIGINT let through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def end_handler(llm: Any) -> None:
    """End the task that reads results; it would report the engine's orderly end as a crash."""
    handler = llm.output_handler
    if handler is not None:
        handler.cancel()
        await asyncio.wait([handler], timeout=_CLOSE_S)


def shut_down(llm: Any) -> None:
    llm.shutdown(timeout=_CLOSE_S)
    llm.shutdown = _nothing  # __del__ calls it again, at interpreter exit with noise


def _nothing() -> None:
    """In the place of a shutdown that is done."""


def shut_down_late(build: "asyncio.Task[tuple[Any, Any]]") -> None:
    """The engine came up after its start had been given up."""
    if not build.cancelled() and build.exception() is None:
        shut_down(build.result()[0])
