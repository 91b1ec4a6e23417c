"""The generator's worker side: weights from a file, the parent watch, the padded-id mask.

vLLM imports this module into the process that holds the model (``worker_extension_cls``), which
registers the ``shared_memory`` weight transfer. An update is all-or-nothing: the whole file
is checksummed, then names and shapes are compared with the checkpoint the model was built from, and
only then is the first tensor loaded. Names are in Hugging Face layout; the model's own
``load_weights`` maps and fuses them.
"""

import mmap
import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from cluster.weights_file import TensorEntry, checksum_bytes, read_entries, read_header

BACKEND = "shared_memory"
OWNER_VARIABLE = "SPRINGTIDE_ENGINE_OWNER"  # pid of the process whose end must end the engine
VOCABULARY_KEY = "springtide_vocabulary"  # in vLLM's additional_config: ids below this may be sampled
_POLL_S = 0.5
_TIED = "lm_head.weight"  # absent from, or a copy in, a checkpoint that ties it to the embedding
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_RECOMPUTED = "rotary_emb.inv_freq"  # buffers that old checkpoints carry and no model loads


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on before the first update."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One update: the path of a safetensors file and the checksum that its bytes must have."""

    location: str
    checksum: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a whole model from one file on a filesystem that both sides see."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded: str | None = ""  # checksum of the last update; None while half loaded
        self._tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        self._parameters = {name for name, _ in self.model.named_parameters()}
        self._expected = self._shapes(
            entry
            for path in sorted(Path(self.model_config.model).glob("*.safetensors"))
            for entry in read_header(path)
        )

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays untouched until the file is verified."""

    def finish_weight_update(self) -> None:
        """Nothing left: ``receive_weights`` returns with the model whole."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Verify, then load. Raises ValueError or OSError with the model as it was before.

        RuntimeError after loading began leaves ``loaded`` None: the engine must be replaced.
        """
        path = Path(update_info.location)
        with path.open("rb") as file:
            # A private map: pages are read once, for the checksum, and loaded from the cache.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        view = memoryview(data)
        found = checksum_bytes(view)
        if found != update_info.checksum:
            raise ValueError(f"{path} has checksum {found}, published as {update_info.checksum}")
        entries = read_entries(view)
        self._compare(self._shapes(entries))
        tensors = dict(_tensors(entries, view))
        if self._tied:
            # On the CPU the head keeps a packed copy of its own. It is packed anew only when its name
            # arrives, and would otherwise go on with the old weights, silently.
            tensors[_TIED] = tensors[_embedding_name(tensors)]
        self.loaded = None
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        missing = self._parameters - set(loaded) if loaded is not None else set()
        if missing - ({_TIED} if self._tied else set()):
            raise RuntimeError(f"no weights arrived for {_some(missing)}")
        if self._tied:
            self._check_head(tensors[_TIED])
        self.loaded = found

    def _check_head(self, embedding: torch.Tensor) -> None:
        """Raise RuntimeError unless the tied head computes with the embedding [ids, width] just loaded."""
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if head is None or method is None or self.parallel_config.tensor_parallel_size > 1:
            return
        weight = embedding.to(head.weight.device, head.weight.dtype)
        probe = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
        found = method.apply(head, probe)[:, : weight.shape[0]].float()
        expected = torch.nn.functional.linear(probe, weight).float()
        if not torch.allclose(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max())):
            raise RuntimeError("the output head does not follow the tied embedding")

    def _shapes(self, entries: Any) -> dict[str, tuple[int, ...]]:
        return {
            entry.name: entry.shape
            for entry in entries
            if not entry.name.endswith(_RECOMPUTED) and not (self._tied and entry.name == _TIED)
        }

    def _compare(self, offered: dict[str, tuple[int, ...]]) -> None:
        """Unmatched names on either side are fatal, and so are other shapes."""
        if not self._expected:
            raise ValueError(f"{self.model_config.model} has no safetensors to compare names with")
        unknown, missing = offered.keys() - self._expected, self._expected.keys() - offered
        if unknown or missing:
            raise ValueError(f"names differ: unknown {_some(unknown)}; missing {_some(missing)}")
        for name, shape in offered.items():
            if shape != self._expected[name]:
                raise ValueError(f"{name} has shape {shape}, the model {self._expected[name]}")


class WorkerExtension:
    """Methods that the engine may call on the worker (by ``collective_rpc``)."""

    weight_transfer_engine: Any

    def springtide_loaded(self) -> str | None:
        """Checksum of the weights now live ("" before the first update), None if they are not whole.

        Always None for a transfer that does not keep account of it (NCCL).
        """
        loaded: str | None = getattr(self.weight_transfer_engine, "loaded", None)
        return loaded


class PaddedIdsMask(LogitsProcessor):
    """Ids of an embedding that is padded beyond the tokenizer are never sampled.

    Applied before the log-probs are computed, so these are normalised over the real ids;
    a learner must mask the same columns.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._first_padded = int(vllm_config.additional_config[VOCABULARY_KEY])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask columns of logits [requests, model vocabulary] in place."""
        logits[:, self._first_padded :] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        """Greedy choice could be a padded id."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The mask is the same for every request."""


class ImportAnchor(str):
    """A string whose unpickling imports this module.

    It travels in the engine's config, so that an engine process watches its owner from the moment it
    reads its arguments, before the slow start, and not only once a worker exists.
    """


def watch_owner(owner: int) -> None:
    """End this process when process ``owner`` ends, however it ends (kill -9 included)."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without pidfd: a changed parent tells the same
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll()
    os._exit(1)


def _tensors(entries: list[TensorEntry], data: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        flat = torch.frombuffer(data[entry.start : entry.end], dtype=dtype)
        yield entry.name, flat.reshape(entry.shape)


def _embedding_name(tensors: dict[str, torch.Tensor]) -> str:
    """The input embedding's name. Raises ValueError if there is not exactly one candidate."""
    names = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if len(names) != 1:
        raise ValueError(f"a tied head needs one input embedding, found {_some(names)}")
    return names[0]


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "") or "none"


def _start() -> None:
    """Run at import, in every process that vLLM starts for the engine."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner and owner != os.getpid():
        threading.Thread(target=watch_owner, args=(owner,), name="owner-watch", daemon=True).start()


_start()
