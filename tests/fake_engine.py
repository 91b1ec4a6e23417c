"""An engine without a model, and a gate before it, for tests of admission at the gate."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from actors.gate import Gate
from actors.mailbox import Mailboxes
from actors.pending import refused
from actors.scripted import ScriptedPolicy
from cluster.config import AdmissionConfig
from cluster.messages import GeneratorHealth
from cluster.types import Completion, Request, Sampling, Weights, pack_ids

LOADED = Weights(version=1, location="", checksum="x", nbytes=0)


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Answers after ``delay_s``, or when told to (``answer``); its memory is a number."""

    def __init__(self, capacity_tokens: int, delay_s: float | None = None, name: str = "g0") -> None:
        self.name = name
        self.capacity_tokens = capacity_tokens
        self.delay_s = delay_s
        self.version = 0
        self.healthy = False
        self.preemptions = 0
        self.kv_usage = 0.0
        self.dead = asyncio.Event()
        self.reason = ""
        self.hand_over = asyncio.Event()  # requests enter while it is set
        self.hand_over.set()
        self.entered: list[str] = []  # ids in order of entry
        self.requests: list[Request] = []
        self.released: list[str] = []
        self.most = 0  # requests inside at once
        self.policy = ScriptedPolicy(lambda prompt, rng: reply(prompt.tobytes()))
        self._inside: dict[tuple[str, str], Request] = {}
        self._boxes = Mailboxes(600.0)

    async def start(self, version: int = 0) -> None:
        self.version, self.healthy = version, True

    async def close(self) -> None:
        self.die("closed")

    def die(self, reason: str) -> None:
        self.healthy, self.reason = False, reason
        for caller, name in list(self._inside):
            request = self._inside.pop((caller, name))
            self._boxes.put(caller, refused(request, f"EngineFailed: {reason}", self.name, retryable=True))
        self.dead.set()

    async def run_until_dead(self) -> str:
        await self.dead.wait()
        return self.reason

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        await self.hand_over.wait()
        for request in requests:
            if (caller, request.id) in self._inside:
                continue
            if not self.healthy:
                error = f"EngineFailed: {self.reason or 'not started'}"
                self._boxes.put(caller, refused(request, error, self.name, retryable=True))
                continue
            self.entered.append(request.id)
            self.requests.append(request)
            self._inside[caller, request.id] = request
            self.most = max(self.most, len(self._inside))
            if self.delay_s is not None:
                asyncio.get_running_loop().call_later(self.delay_s, self.answer, request.id, caller)

    def answer(self, name: str, caller: str = "w") -> None:
        request = self._inside.pop((caller, name), None)
        if request is not None:
            self.policy.version = self.version
            self._boxes.put(caller, self.policy.answer(request, 0.0))

    def inside(self) -> list[str]:
        return [name for _, name in self._inside]

    async def collect(self, caller: str, wait_s: float) -> list[Completion]:
        return await self._boxes.take(caller, wait_s)

    async def cancel(self, caller: str) -> int:
        return len(await self.withdraw(caller, [name for owner, name in self._inside if owner == caller]))

    async def withdraw(self, caller: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._inside.pop((caller, name), None) is not None]

    async def release(self, sessions: Sequence[str]) -> None:
        self.released += sessions

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        self.version = weights.version
        return self.version

    async def checksums(self) -> dict[str, str]:
        return {}

    def stats(self) -> GeneratorHealth:
        return GeneratorHealth(
            name=self.name, instance="i", ready=self.healthy, version=self.version,
            running=len(self._inside), kv_usage=self.kv_usage, preemptions=self.preemptions,
        )  # fmt: skip


def reply(prompt: bytes) -> list[int]:
    """Ids that depend on the prompt alone: 4 to 11 letters, then the end of turn."""
    seed = zlib.crc32(prompt)
    return [40 + (seed >> shift) % 50 for shift in range(4 + seed % 8)] + [2]


def request(name: str, session: str, tokens: int = 1000, growth: int = 100, **more: object) -> Request:
    asked = Request(
        id=name, prompt=pack_ids([5] * tokens), sampling=Sampling(max_tokens=growth, stop_ids=(2,)),
        session=session, group=session.partition(".")[0],
    )  # fmt: skip
    return replace(asked, **more)


@asynccontextmanager
async def opened(
    capacity: int = 3000,
    timeout_s: float = 5.0,
    delay_s: float | None = None,
    prefill_tok_s: float = 1000.0,
    clock: Callable[[], float] = time.monotonic,
    name: str = "g0",
    **settings: object,
) -> AsyncIterator[tuple[Gate, FakeEngine]]:
    engine = FakeEngine(capacity, delay_s, name)
    config = AdmissionConfig(**{"headroom": 0.0} | settings)  # type: ignore[arg-type]
    gate = Gate(engine, config, timeout_s, prefill_tok_s=lambda: prefill_tok_s, clock=clock)
    await gate.start()
    try:
        yield gate, engine
    finally:
        await gate.close()


async def answers(gate: Gate, count: int, caller: str = "w") -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    async with asyncio.timeout(5):
        while len(found) < count:
            found |= {completion.id: completion for completion in await gate.collect(caller, 1.0)}
    return found


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not fact():
            await asyncio.sleep(0.005)
