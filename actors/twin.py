"""A timed twin of a generator: the engine's contract, the times of a profile, and no model.

The service model is the simulator's own (cluster/sim/service.py), driven by the wall clock times
``twin.speed``: queueing, prefill, decoding, KV memory, prefix cache and weight updates take what they
take there. Replies are ids drawn by (seed, session, turn) alone, so that a trajectory is the same
whatever was paused, retried or synced on its way. Their lengths are those of the workload's plan when
the environment is ``load``, else drawn like the ids.

Nothing here imports torch or vLLM.
"""

import asyncio
import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.mailbox import BusyTime, Mailboxes
from actors.pending import problem, refused
from cluster.config import Config
from cluster.errors import ConfigError, EngineFailed, StaleEpoch, WeightsFailed
from cluster.messages import GeneratorHealth
from cluster.model_folder import ids_in_use
from cluster.sim.catalogue import load_profile
from cluster.sim.profile import Profile
from cluster.sim.scenario import Plan, Workload
from cluster.sim.service import Done, GeneratorModel
from cluster.types import (
    Completion,
    Request,
    StopReason,
    VersionSpan,
    Weights,
    pack_floats,
    pack_ids,
)
from envs.load import MEMBERS, place_of, workload

_log = logging.getLogger(__name__)
_WATCH_S = 0.5  # how often deadlines are looked for


class _Asked(NamedTuple):
    """A request inside."""

    caller: str
    request: Request
    deadline: float  # monotonic
    output: int  # ids that it will get
    since: float  # wall clock
    spans: list[tuple[int, int]]  # (ids sampled when the version changed, the version until then)


class TwinEngine:
    """One replica. ``dead`` is set when it can serve no more; ``reason`` says why."""

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
        self.name = name
        self.instance = uuid.uuid4().hex
        self.dead = asyncio.Event()
        self.reason = ""
        self.profile = profile or load_profile(config.twin.profile)
        self._config = config
        self._path = Path(model)
        self._speed = config.twin.speed
        self._clock = clock
        self._origin = clock()
        self._longest = config.harness.max_context
        self._words = _Words(self._path, config.run.seed)
        self.vocabulary = self._words.size
        self._plans = _Plans(config)
        self._model: GeneratorModel | None = None
        self._asked: dict[tuple[str, str], _Asked] = {}
        self._boxes = Mailboxes(keep_s=max(600.0, 2 * config.generator.request_timeout_s))
        self._busy = BusyTime()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._sync = asyncio.Lock()
        self._epoch = 0
        self._checksum = ""
        self._loads = 0
        self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._sync_s = 0.0

    @property
    def healthy(self) -> bool:
        """Started and not dead."""
        return self._model is not None and not self.dead.is_set()

    @property
    def version(self) -> int:
        """The version of the live weights."""
        return self._live.version

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

    async def run_until_dead(self) -> str:
        """Wait until the engine can serve no more; returns the reason."""
        await self.dead.wait()
        return self.reason

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
                self._refuse(caller, request, f"EngineFailed: {self.reason or 'not started'}", retryable=True)
            else:
                self._enter(caller, request)
        self._turn_over()

    async def collect(self, caller: str, wait_s: float) -> list[Completion]:
        """All completions of a caller since its last collect; waits at most ``wait_s`` for one."""
        return await self._boxes.take(caller, wait_s)

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
        if model is not None:
            self._turn_over()
            model.settle(self._now())
        return GeneratorHealth(
            name=self.name,
            instance=self.instance,
            ready=self.healthy,
            version=model.version if model is not None else 0,
            running=model.running if model is not None else 0,
            waiting=model.waiting if model is not None else 0,
            kv_usage=model.kv_used / self.capacity_tokens if model is not None else 0.0,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sync_s=self._sync_s,
            busy=self._busy.drain(),
            error=self.reason,
            capacity_tokens=self.capacity_tokens,
            starved_s=model.starved_s / self._speed if model is not None else 0.0,
            preemptions=model.preemptions if model is not None else 0,
        )

    # -- weights ----------------------------------------------------------------------------

    async def load_weights(self, weights: Weights, epoch: int) -> int:
        """Take ``sync.load_s`` to change the version, standing still; returns the version now live.

        The order of errors and repetitions is the real engine's: see ``actors.engine.Engine``.
        """
        async with self._sync:
            if epoch < self._epoch:
                raise StaleEpoch(f"{self.name}: order of epoch {epoch}, already at {self._epoch}")
            if not self.healthy:
                raise WeightsFailed(f"{self.name} is not running: {self.reason or 'not started'}")
            same_history = epoch == self._epoch
            self._epoch = epoch
            version = self._live.version
            if weights.version == version and weights.checksum == self._checksum:
                return version
            first = not self._checksum
            if same_history and weights.version < version + (0 if first else 1):
                raise WeightsFailed(
                    f"{self.name}: version {weights.version} after {version} in epoch {epoch}"
                )
            if not weights.location.startswith("twin:"):
                raise WeightsFailed(f"{self.name}: a twin cannot load {weights.location!r}")
            begun = time.monotonic()
            try:
                await self._update(weights)
            finally:
                self._sync_s += time.monotonic() - begun
            return self._live.version

    async def checksums(self) -> dict[str, str]:
        """What the live weights were published with."""
        return {"twin": self._checksum}

    async def _update(self, weights: Weights) -> None:
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
            self._loads += 1
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
        deadline = time.monotonic() + self._config.generator.request_timeout_s
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

    def _finished(self, done: Done) -> None:
        asked = self._asked.pop(done.key, None)  # type: ignore[call-overload]
        if asked is None:
            return
        request, count = asked.request, asked.output
        session, turn = request.session or request.id, _turn_of(request)
        chosen, logprobs, stop = self._words.reply(request, session, turn, count)
        ago = (self._now() - done.t_first) / self._speed
        end = time.time()
        completion = Completion(
            id=request.id,
            output=pack_ids(chosen),
            logprobs=pack_floats(logprobs),
            versions=_tile(asked.spans, done.last_version, count),
            stop=stop,
            cached_tokens=done.cached_tokens,
            t_start=max(asked.since, end - ago),
            t_end=end,
            generator=self.name,
        )
        self._busy.add(completion.t_start, completion.t_end)
        self._tokens += count
        self._prompt_tokens += len(request.prompt) // 4
        self._cached_tokens += done.cached_tokens
        self._boxes.put(asked.caller, completion)

    def _refuse(self, caller: str, request: Request, error: str, *, retryable: bool) -> None:
        self._boxes.put(caller, refused(request, error, self.name, retryable=retryable))

    def _withdraw(self, key: tuple[str, str]) -> None:
        """Take a request back without an answer."""
        if self._asked.pop(key, None) is not None and self.healthy:
            self._live.cancel(self._now(), key)

    async def _watch(self) -> None:
        """End requests past their deadline, forget callers that left."""
        limit = self._config.generator.request_timeout_s
        while not self.dead.is_set():
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            for key in [key for key, asked in self._asked.items() if asked.deadline < now]:
                request = self._asked[key].request
                self._withdraw(key)
                self._refuse(key[0], request, f"EngineFailed: no answer within {limit:g} s", retryable=True)
            forgotten = self._boxes.prune()
            if forgotten:
                _log.warning("%s forgot %d completions that nobody collected", self.name, forgotten)

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


class _Plans:
    """Planned lengths of the replies, when the environment follows plans."""

    def __init__(self, config: Config) -> None:
        self._source: Workload | None = None
        self._seed = config.run.seed
        self._known: dict[str, Plan] = {}
        if config.env.name == "load":
            self._source = workload(str(config.env.params.get("workload", "twin")))
            self._seed = int(config.env.params.get("seed", config.run.seed))

    def of(self, request: Request) -> tuple[Plan | None, int]:
        """The plan that a request's session follows, None if it follows none, and the turn."""
        turn = _turn_of(request)
        place = place_of(request.session) if self._source is not None else None
        if place is None or self._source is None:
            return None, turn
        plan = self._known.get(request.session)
        if plan is None:
            if len(self._known) > 4096:
                self._known.clear()
            plan = self._known[request.session] = self._source.plan(self._seed, place.group, place.member)
        return (plan, turn) if turn < len(plan.turns) else (None, turn)


class _Words:
    """Ids that a reply is made of: seeded, never special."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.size = ids_in_use(folder)
        tree = msgspec.json.decode((folder / "tokenizer.json").read_bytes())
        vocabulary = tree["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            vocabulary = {entry[0]: at for at, entry in enumerate(vocabulary)}
        special = {token["id"] for token in tree.get("added_tokens", ())}
        self._members = [vocabulary[word] for word in MEMBERS if word in vocabulary]
        self._plain = sorted(set(vocabulary.values()) - special - set(self._members))
        if not self._plain:
            raise ConfigError(f"{folder}/tokenizer.json has no word that is not special")
        self._seed = seed

    def count(self, request: Request) -> int:
        """A length for a reply that no plan gives one."""
        raw = hashlib.blake2b(f"{self._seed}/{request.session}/{request.id}".encode(), digest_size=4).digest()
        return 1 + int.from_bytes(raw, "little") % request.sampling.max_tokens

    def reply(
        self, request: Request, session: str, turn: int, count: int
    ) -> tuple[list[int], list[float], StopReason]:
        """``count`` ids, their log-probs and why they end: the member's word first, a stop id last."""
        rng = random.Random(f"{self._seed}/{session}/{turn}")
        stops = request.sampling.stop_ids
        forbidden = set(stops)
        chosen = [token for token in rng.choices(self._plain, k=count + 8) if token not in forbidden]
        chosen = (chosen or [self._plain[0]]) * (1 + count // max(1, len(chosen)))
        chosen = chosen[:count]
        place = place_of(session)
        if place is not None and place.member < len(self._members):
            chosen[0] = self._members[place.member]
        stop = StopReason.LENGTH
        if stops and count < request.sampling.max_tokens and count > 1:
            chosen[-1], stop = stops[0], StopReason.STOP
        return chosen, [-rng.expovariate(2.0) for _ in chosen], stop


def _turn_of(request: Request) -> int:
    """The turn in a request's name (``g0000001.0/attempt/turn``, ``#n`` when asked again), 0 without one."""
    last = request.id.partition("#")[0].rpartition("/")[2]
    return int(last) if last.isdigit() and "/" in request.id else 0


def _tile(marks: list[tuple[int, int]], last: int, count: int) -> tuple[VersionSpan, ...]:
    """Spans that cover ``count`` ids: up to each mark the version before it, then ``last``."""
    spans: list[VersionSpan] = []
    at = 0
    for upto, version in [*marks, (count, last)]:
        if upto <= at:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, upto)
        else:
            spans.append(VersionSpan(version, at, upto))
        at = upto
    return tuple(spans)
