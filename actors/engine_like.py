"""What the gate needs of an engine."""

from collections.abc import Sequence
from typing import Protocol

from cluster.messages import GeneratorHealth
from cluster.types import Completion, Request, Weights


class EngineLike(Protocol):
    """What the gate needs of an engine: vLLM's or its timed twin."""

    name: str

    @property
    def version(self) -> int:
        """The version of the live weights."""

    @property
    def healthy(self) -> bool:
        """Started and not dead."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 if unknown."""

    async def start(self, version: int = 0) -> None:
        """Load the model, which has ``version``."""

    async def close(self) -> None:
        """End it; outstanding requests are answered with a retryable error."""

    async def run_until_dead(self) -> str:
        """Wait until it can serve no more; returns the reason."""

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """Queue requests; each is answered in ``collect``."""

    async def collect(self, caller: str, wait_s: float) -> list[Completion]:
        """Completions of a caller since its last collect; waits at most ``wait_s`` for one."""

    async def cancel(self, caller: str) -> int:
        """Stop everything that a caller has outstanding, without answers."""

    async def withdraw(self, caller: str, names: Sequence[str]) -> list[str]:
        """Stop these requests of a caller, without answers; returns those that were outstanding."""

    async def release(self, sessions: Sequence[str]) -> None:
        """These tasks have ended; what is kept for them may go."""

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Replace the weights; returns the version now live."""

    async def checksums(self) -> dict[str, str]:
        """Digests of the live weights."""

    def stats(self) -> GeneratorHealth:
        """Counters since the start, and the busy intervals since the last call."""
