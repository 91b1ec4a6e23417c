"""Publishing weights: from the learner's shards to where generators find them.

Every rank calls ``publish`` (gathering is collective); rank 0 returns the handle.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster.errors import WeightsFailed
from cluster.types import Weights
from cluster.weights_file import write_weights
from learner.export import full_tensors
from learner.model import parameter_name


class Publisher(Protocol):
    """Makes a version of the weights available to generators."""

    def publish(self, model: nn.Module, version: int) -> Weights | None:
        """Collective. The handle on rank 0, None elsewhere. Raises WeightsFailed."""

    def close(self) -> None:
        """Free what publishing holds."""


class SharedMemoryPublisher:
    """One safetensors file per version in ``folder`` (in ``/dev/shm``, or any shared folder).

    A file appears whole, by rename. The newest ``keep`` versions stay: a generator may still be
    reading the one before. Parameters are gathered one by one; rank 0 holds the whole model on
    the CPU only while it writes.
    """

    def __init__(
        self, folder: str | Path, dtype: str = "float32", policy: str = "policy", keep: int = 2
    ) -> None:
        self.folder = Path(folder)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._policy = policy
        self._keep = max(1, keep)

    def publish(self, model: nn.Module, version: int) -> Weights | None:
        """Write ``v<version>.safetensors``; see ``Publisher``. Publishing a version again replaces it."""
        held: dict[str, Tensor] = {}
        for name, whole in full_tensors(model, self._dtype):
            if self._rank == 0:
                held[name] = whole.cpu().contiguous()
        if self._rank != 0:
            return None
        path = self.folder / f"v{version}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            nbytes, checksum = write_weights(path, held)
            self._prune(version)
        except (OSError, ValueError) as error:
            raise WeightsFailed(f"publishing version {version} to {path} failed: {error}") from error
        return Weights(
            version=version, location=str(path), checksum=checksum, nbytes=nbytes, policy=self._policy
        )

    def close(self) -> None:
        """Remove every published file; generators that have one open keep their mapping."""
        if self._rank == 0:
            for file in self.folder.glob("v*.safetensors"):
                file.unlink(missing_ok=True)

    def _prune(self, newest: int) -> None:
        """Keep versions in ``(newest - keep, newest]``; ones above are left of a rewound run."""
        for file in self.folder.glob("v*.safetensors"):
            number = file.stem[1:]
            if number.isdigit() and not newest - self._keep < int(number) <= newest:
                file.unlink(missing_ok=True)


class SyncClient(Protocol):
    """The generators' control plane, as vLLM's trainer engine calls it: blocking, plain dicts."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class NcclPublisher:
    """Broadcast to the generators' GPUs over NCCL, with vLLM's own transfer engine.

    ``world`` counts rank 0 of the learner and every generator worker. Built after the model is
    sharded; the handle's location is ``nccl:`` and it carries no checksum, as no file exists.
    Needs CUDA on both sides; it has been written against vLLM 0.32 and not run on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        client: SyncClient,
        master_addr: str,
        port: int,
        world: int,
        rank: int,
        dtype: str = "bfloat16",
        policy: str = "policy",
    ) -> None:
        if not torch.cuda.is_available():
            raise WeightsFailed('generator.backend = "nccl" needs CUDA; use "shared_memory" on a CPU')
        # Imported here: vllm takes seconds and gigabytes, and only this publisher needs it.
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        sent: torch.dtype = getattr(torch, dtype)

        class ShardedSource(WeightSource):  # type: ignore[misc]
            """Declared dtype equals sent dtype: both come from ``sent``."""

            def metadata(self) -> list[Any]:
                return [
                    ParamMeta(parameter_name(name), sent, tuple(parameter.shape))
                    for name, parameter in model.named_parameters()
                ]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return full_tensors(model, sent)

        self._rank = rank
        self._policy = policy
        self._client = _VersionedClient(client)
        self._bytes = sum(p.numel() for p in model.parameters()) * sent.itemsize
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(master_address=master_addr, master_port=port, world_size=world, rank=rank),
            client=self._client,
            source=ShardedSource(),
        )

    def publish(self, model: nn.Module, version: int) -> Weights | None:
        """Send the weights and tell the generators their version; see ``Publisher``."""
        self._client.version = version
        try:
            self._engine.send_weights()
        except (RuntimeError, ValueError) as error:
            raise WeightsFailed(f"sending version {version} over NCCL failed: {error}") from error
        if self._rank != 0:
            return None
        return Weights(
            version=version, location="nccl:", checksum="", nbytes=self._bytes, policy=self._policy
        )

    def close(self) -> None:
        """Leave the transfer group."""
        self._engine.shutdown()


class _VersionedClient:
    """Adds the version to the last call of a round, which vLLM's engine makes without one."""

    def __init__(self, inner: SyncClient) -> None:
        self._inner = inner
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._inner.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._inner.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._inner.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._inner.finish_weight_update(weight_version or str(self.version))
