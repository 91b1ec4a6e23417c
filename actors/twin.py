"""A timed twin of a generator: the engine's contract, the times of a profile, and no model.

The service model is the simulator's own (cluster/sim/service.py), driven by the wall clock times
``twin.speed``: queueing, prefill, decoding, KV memory, prefix cache and weight updates take what they
take there. What it answers is in ``actors/twin_replies.py``.

Nothing here imports torch or vLLM.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from actors.pending import problem
from actors.replica import Replica
from actors.twin_replies import Plans, Words, tile, turn_of
from cluster.config import Config
from cluster.errors import EngineFailed, WeightsFailed
from cluster.messages import GeneratorHealth
from cluster.sim.catalogue import load_profile
from cluster.sim.engine_request import EngineRequest
from cluster.sim.profile import Profile
from cluster.sim.service import GeneratorModel
from cluster.types import Completion, Request, Weights, pack_floats, pack_ids

_WATCH_S = 0.5  # how often deadlines are looked for


class _Asked(NamedTuple):
    """A request inside."""

    caller: str
    request: Request
    deadline: float  # monotonic
    output: int  # ids that it will get
    since: float  # wall clock
    spans: list[tuple[int, int]]  # (ids sampled when the version changed, the version until then)


class TwinEngine(Replica):
    """One replica; see the module docstring."""

    def __init__(
        self,
        config: Config,
        model: str | Path,
        name: str,
        seed: int,
        *,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``profile`` overrides ``twin.profile``; ``clock`` (seconds) is the wall clock unless given.

        Raises ConfigError for an unknown profile or a folder without a tokenizer.
        """
        super().__init__(name, config.generator.request_timeout_s)
        self.profile = profile or load_profile(config.twin.profile)
        self._config = config
        self._path = Path(model)
        self._speed = config.twin.speed
        self._clock = clock
        self._origin = clock()
        self._longest = config.harness.max_context
        self._words = Words(self._path, config.run.seed)
        self.vocabulary = self._words.size
        self._plans = Plans(config)
        self._model: GeneratorModel | None = None
        self._asked: dict[tuple[str, str], _Asked] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def started(self) -> bool:
        """The service model runs."""
        return self._model is not None

    @property
    def version(self) -> int:
        """The version of the live weights."""
        return self._model.version if self._model is not None else 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.profile.generator.kv_tokens

    # -- life -------------------------------------------------------------------------------

    async def start(self, version: int = 0) -> None:
        """Be ready at once, with weights of ``version``."""
        self._model = GeneratorModel(self.profile.generator, self._now(), version)
        self._watcher = asyncio.create_task(self._watch(), name=f"watch:{self.name}")

    async def close(self) -> None:
        """Outstanding requests are answered with a retryable error."""
        self._fail("closed")
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    # -- requests ---------------------------------------------------------------------------

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """Queue requests; every one is answered in ``collect``, malformed ones with their error.

        Sending a request again while it is outstanding changes nothing.
        """
        for request in requests:
            if (caller, request.id) in self._asked:
                continue
            wrong = problem(request, self.vocabulary, self._longest)
            if wrong:
                self._refuse(caller, request, f"BadRequest: {wrong}", retryable=False)
            elif not self.healthy:
                self._refuse(caller, request, self._why_not(), retryable=True)
            else:
                self._enter(caller, request)
        self._turn_over()

    async def cancel(self, caller: str) -> int:
        """Stop everything that a caller has outstanding; nothing is answered. Returns how many."""
        found = [key for key in self._asked if key[0] == caller]
        for key in found:
            self._withdraw(key)
        self._turn_over()
        return len(found)

    async def withdraw(self, caller: str, names: Sequence[str]) -> list[str]:
        """Stop these requests of a caller without an answer; returns those that were outstanding."""
        found = [name for name in names if (caller, name) in self._asked]
        for name in found:
            self._withdraw((caller, name))
        self._turn_over()
        return found

    async def release(self, sessions: Sequence[str]) -> None:
        """These tasks have ended: what the cache holds of them is dropped. Unknown ones are ignored."""
        if self.healthy:
            for session in sessions:
                self._live.release(self._now(), session)

    def stats(self) -> GeneratorHealth:
        """Counters since the start, and the busy intervals since the last call."""
        model = self._model
        if model is None:
            return self._report()
        self._turn_over()
        model.settle(self._now())
        return self._report(
            running=model.running,
            waiting=model.waiting,
            kv_usage=model.kv_used / self.capacity_tokens,
            starved_s=model.starved_s / self._speed,
            preemptions=model.preemptions,
        )

    # -- weights ----------------------------------------------------------------------------

    async def checksums(self) -> dict[str, str]:
        """What the live weights were published with."""
        return {"twin": self._checksum}

    async def _update(self, weights: Weights) -> None:
        """Stand still for ``sync.load_s``, then change the version."""
        if not weights.location.startswith("twin:"):
            raise WeightsFailed(f"{self.name}: a twin cannot load {weights.location!r}")
        model = self._live
        self._turn_over()
        model.pause(self._now())
        try:
            await asyncio.sleep(self.profile.sync.load_s / self._speed)
            for key in list(self._asked):
                self._mark(key)
            if weights.version < model.version:  # another history: the one before is gone
                model.version = 0
            model.sync(self._now(), weights.version, self._config.generator.kv_on_sync == "keep")
            self._checksum = weights.checksum
        finally:
            model.resume(self._now())
            self._turn_over()

    def _mark(self, key: tuple[str, str]) -> None:
        """Ids sampled so far carry the version that is about to go."""
        asked, made = self._asked[key], self._live.sampled(key)
        if made > 0 and (not asked.spans or asked.spans[-1][0] < made):
            asked.spans.append((min(made, asked.output - 1), self._live.version))

    # -- one request ------------------------------------------------------------------------

    def _enter(self, caller: str, request: Request) -> None:
        """Hand a checked request to the model."""
        key = (caller, request.id)
        now = self._now()
        prompt = len(request.prompt) // 4
        plan, turn = self._plans.of(request)
        output = self._words.count(request) if plan is None else plan.turns[turn].output
        output = min(output, request.sampling.max_tokens)
        shared = min(plan.turns[0].added, prompt) if plan is not None else 0
        try:
            self._live.submit(
                now, key, request.session or request.id, prompt, output, self._live.version,
                group=(request.session.rpartition(".")[0], "root") if shared else None,
                shared=shared, urgent=request.evaluation or request.priority < 0,
            )  # fmt: skip
        except ValueError as error:  # larger than the whole cache
            self._refuse(caller, request, f"BadRequest: {error}", retryable=False)
            return
        deadline = time.monotonic() + self._request_timeout_s
        self._asked[key] = _Asked(caller, request, deadline, output, time.time(), [])

    def _turn_over(self) -> None:
        """Hand out what has finished and set the timer for what comes next."""
        model = self._model
        if model is None or self.dead.is_set():
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for done in model.advance(self._now()):
            self._finished(done)
        wait_s = (model.next_event() - self._now()) / self._speed
        if wait_s < inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._turn_over)

    def _finished(self, done: EngineRequest) -> None:
        asked = self._asked.pop(done.key, None)  # type: ignore[call-overload]
        if asked is None:
            return
        request, count = asked.request, asked.output
        session, turn = request.session or request.id, turn_of(request)
        chosen, logprobs, stop = self._words.reply(request, session, turn, count)
        ago = (self._now() - done.t_first) / self._speed
        end = time.time()
        completion = Completion(
            id=request.id,
            output=pack_ids(chosen),
            logprobs=pack_floats(logprobs),
            versions=tile(asked.spans, done.last_version, count),
            stop=stop,
            cached_tokens=done.cached_tokens,
            t_start=max(asked.since, end - ago),
            t_end=end,
            generator=self.name,
        )
        self._busy.add(completion.t_start, completion.t_end)
        self._count(request, completion, len(request.prompt) // 4)
        self._boxes.put(asked.caller, completion)

    def _withdraw(self, key: tuple[str, str]) -> None:
        """Take a request back without an answer."""
        if self._asked.pop(key, None) is not None and self.healthy:
            self._live.cancel(self._now(), key)

    async def _watch(self) -> None:
        """End requests past their deadline, forget callers that left."""
        while not self.dead.is_set():
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            for key in [key for key, asked in self._asked.items() if asked.deadline < now]:
                request = self._asked[key].request
                self._withdraw(key)
                self._refuse_late(key[0], request)
            self._forget_callers()

    def _fail(self, reason: str) -> None:
        """Die: answer everything outstanding, once."""
        if self.dead.is_set():
            return
        self.reason = reason
        self.dead.set()
        outstanding = list(self._asked.values())
        self._asked.clear()
        for asked in outstanding:
            self._refuse(asked.caller, asked.request, f"EngineFailed: {reason}", retryable=True)

    def _now(self) -> float:
        """Profile seconds since this engine was made."""
        return (self._clock() - self._origin) * self._speed

    @property
    def _live(self) -> GeneratorModel:
        if self._model is None:
            raise EngineFailed(f"{self.name} has not been started")
        return self._model
