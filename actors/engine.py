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
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from actors.engine_build import build, end_handler, shut_down, shut_down_late
from actors.engine_requests import WARM_UP, RequestCore
from cluster.config import GeneratorConfig
from cluster.errors import ConfigError, EngineFailed, WeightsFailed
from cluster.model_folder import check_folder, ids_in_use
from cluster.types import Request, Sampling, Weights, pack_ids

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0


class Engine(RequestCore):
    """One replica; see the module docstring."""

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
        super().__init__(name, config, max_model_len, vocabulary or 0)
        self._path = Path(model_path)
        self._seed = seed
        self._sync_timeout_s = sync_timeout_s
        self.prefill_tok_s = 0.0  # prompt tokens a second, as the warm-up measured them; 0 before

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
        making = asyncio.create_task(asyncio.to_thread(self._build, self.vocabulary < model_vocabulary))
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._llm, self._core_request_type = await asyncio.shield(making)
                self._llm._run_output_handler()
                await self._llm.update_weight_version(str(version))
                self._version = version
                self._salt = f"{version}.0"
                self._watcher = asyncio.create_task(self._watch(), name=f"watch:{self.name}")
                await self._warm_up()
        except BaseException as error:
            making.add_done_callback(shut_down_late)
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
            await end_handler(llm)
            await asyncio.to_thread(shut_down, llm)

    # -- weights ----------------------------------------------------------------------------

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

    # -- building ---------------------------------------------------------------------------

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
            began = time.monotonic()
            await self.submit(WARM_UP, batch)
            answered = 0
            while answered < size:
                for completion in await self.collect(WARM_UP, self._config.start_timeout_s):
                    answered += 1
                    if completion.error:
                        raise EngineFailed(f"warm-up failed: {completion.error}")
            # Two decoding steps are in it as well: a little less than the true rate.
            self.prefill_tok_s = size * length / max(1e-6, time.monotonic() - began)
        await self._llm.reset_prefix_cache()
        self._busy.drain()

    def _build(self, padded: bool) -> tuple[Any, Any]:
        return build(
            self._path,
            self._config,
            self._max_model_len,
            self._seed,
            self._recorder,
            vocabulary=self.vocabulary,
            padded=padded,
        )


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
