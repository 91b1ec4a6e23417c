"""What every replica of a generator has, whatever samples the ids: its name and end, mailboxes, counters, and
the order in which weights may replace each other. ``Engine`` is vLLM's, ``TwinEngine`` its timed twin.
"""

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

from actors.mailbox import BusyTime, Mailboxes
from actors.pending import refused
from cluster.errors import StaleEpoch, WeightsFailed
from cluster.messages import GeneratorHealth
from cluster.types import Completion, Request, Weights

_log = logging.getLogger(__name__)


class Replica(ABC):
    """``dead`` is set when it can serve no more; ``reason`` says why."""

    def __init__(self, name: str, request_timeout_s: float) -> None:
        self.name = name
        self.instance = uuid.uuid4().hex
        self.dead = asyncio.Event()
        self.reason = ""
        self._request_timeout_s = request_timeout_s
        self._boxes = Mailboxes(keep_s=max(600.0, 2 * request_timeout_s))
        self._busy = BusyTime()
        self._watcher: asyncio.Task[None] | None = None
        self._sync = asyncio.Lock()
        self._epoch = 0
        self._checksum = ""
        self._tokens = self._prompt_tokens = self._cached_tokens = self._grown_tokens = 0
        self._sync_s = 0.0

    @property
    @abstractmethod
    def started(self) -> bool:
        """There is something that can sample."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the live weights; 0 before the start."""

    @property
    @abstractmethod
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 if it does not know yet."""

    @property
    def healthy(self) -> bool:
        """Started and not dead."""
        return self.started and not self.dead.is_set()

    async def run_until_dead(self) -> str:
        """Wait until it can serve no more; returns the reason."""
        await self.dead.wait()
        return self.reason

    # -- answers ----------------------------------------------------------------------------

    async def collect(self, caller: str, wait_s: float) -> list[Completion]:
        """All completions of a caller since its last collect; waits at most ``wait_s`` for one."""
        return await self._boxes.take(caller, wait_s)

    def _count(self, request: Request, completion: Completion, prompt_tokens: int) -> None:
        """A completion enters the counters."""
        sampled = len(completion.output) // 4
        self._tokens += sampled
        self._grown_tokens += 0 if request.evaluation else request.fresh + sampled
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += completion.cached_tokens

    def _refuse(self, caller: str, request: Request, error: str, *, retryable: bool) -> None:
        self._boxes.put(caller, refused(request, error, self.name, retryable=retryable))

    def _refuse_late(self, caller: str, request: Request) -> None:
        """A request past its deadline."""
        text = f"EngineFailed: no answer within {self._request_timeout_s:g} s"
        self._refuse(caller, request, text, retryable=True)

    def _why_not(self) -> str:
        """The error of a request while it serves nobody."""
        return f"EngineFailed: {self.reason or 'not started'}"

    def _forget_callers(self) -> None:
        """Boxes whose caller left."""
        forgotten = self._boxes.prune()
        if forgotten:
            _log.warning("%s forgot %d completions that nobody collected", self.name, forgotten)

    def _report(self, **figures: Any) -> GeneratorHealth:
        """Counters since the start, and the busy intervals since the last call."""
        return GeneratorHealth(
            name=self.name,
            instance=self.instance,
            ready=self.healthy,
            version=self.version,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            grown_tokens=self._grown_tokens,
            sync_s=self._sync_s,
            busy=self._busy.drain(),
            error=self.reason,
            capacity_tokens=self.capacity_tokens,
            **figures,
        )

    # -- weights ----------------------------------------------------------------------------

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Replace the weights while requests are in flight; returns the version now live.

        Repeating an order changes nothing. Raises StaleEpoch for an order older than one seen, and
        WeightsFailed with the old version still live. If an update broke off half way, the
        replica is dead as well: half a model serves nobody.
        """
        async with self._sync:
            if epoch < self._epoch:
                raise StaleEpoch(f"{self.name}: order of epoch {epoch}, already at {self._epoch}")
            if not self.healthy:
                raise WeightsFailed(f"{self.name} is not running: {self.reason or 'not started'}")
            same_history = epoch == self._epoch
            self._epoch = epoch
            version = self.version
            if weights.version == version and weights.checksum == self._checksum:
                return version
            first = not self._checksum  # version may equal the start's, whose checksum is unknown
            if same_history and weights.version < version + (0 if first else 1):
                raise WeightsFailed(
                    f"{self.name}: version {weights.version} after {version} in epoch {epoch}"
                )
            begun = time.monotonic()
            try:
                await self._update(weights)
            finally:
                self._sync_s += time.monotonic() - begun
            return self.version

    @abstractmethod
    async def _update(self, weights: Weights) -> None:
        """Make these weights live, and their checksum known. Raises WeightsFailed."""
