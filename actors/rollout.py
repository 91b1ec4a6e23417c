"""One trajectory: render -> generate -> parse -> step -> stream, until it ends.

Every way an episode can go wrong is data: a failed environment, engine or request ends this
trajectory with ``failed(boundary)``, the group's deadline with ``abandoned("deadline")``. Only
cancellation leaves ``run_trajectory`` as an exception. Whatever happens, the environment handle is
released.

``Episode`` is the context that topologies programme against: ``call`` asks the policy, ``env``
passes the actions on and records the turn.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from actors.harness.chat import ChatHarness, History, Prompt, Reply
from cluster.codec import clean
from cluster.errors import BadRequest, EngineFailed, SpringtideError
from cluster.ports import Policy
from cluster.types import (
    Call,
    Completion,
    End,
    EndKind,
    Order,
    Purpose,
    Request,
    Sampling,
    Segment,
    StopReason,
    Task,
    Turn,
    ids,
)
from envs.base import StepResult

_log = logging.getLogger(__name__)

OnTurn = Callable[[Segment], None]
Delay = Callable[[int, int], float]  # (trajectory seed, turn) -> seconds
Progress = Callable[[], float]  # share of the group's members that have ended


class EnvSession(Protocol):
    """One live environment, held by one trajectory. Errors are EnvFailed and EnvTimeout."""

    async def start(self, task: Task, seed: int) -> str:
        """Begin the episode; returns the first observation."""

    async def step(self, actions: list[str]) -> StepResult:
        """Apply the actions of one turn."""

    async def pause(self) -> None:
        """The next step may be long in coming; nothing for an environment that cannot pause."""

    async def resume(self) -> None:
        """The next step comes now; called after ``pause``."""

    async def release(self) -> None:
        """Give the environment back; called once on every path."""


class Environments(Protocol):
    """Where sessions come from; acquiring waits for a free one."""

    async def acquire(self) -> EnvSession:
        """A session for one episode. Raises EnvFailed when none can be made."""


def _none_ended() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Tools:
    """What all trajectories of a worker share."""

    harness: ChatHarness
    policy: Policy
    environments: Environments
    max_turns: int
    delay: Delay | None = None  # injected environment latency
    seeded: bool = False  # give each request its own derived sampling seed
    pause_after_s: float = math.inf  # a turn that is longer in coming pauses the environment
    clock: Callable[[], float] = time.time


@dataclass(slots=True)
class Member:
    """A trajectory in memory: its turns so far and, at last, its end."""

    trajectory: str
    turns: list[Turn] = field(default_factory=list)
    end: End | None = None
    tool: str = ""  # what the environment did in its last step, if it says so


def derived_seed(seed: int, trajectory: str, attempt: int, turn: int) -> int:
    """Seed of one request, 31 bits, from the order's seed and the call's identity.

    Pure, so the order and the ids, which are recorded, record the seed too.
    """
    text = f"{seed}/{trajectory}/{attempt}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


class Episode:
    """Context of one trajectory. ``await call()`` then ``await env(...)``, turn after turn."""

    def __init__(
        self,
        tools: Tools,
        order: Order,
        member: Member,
        session: EnvSession,
        on_turn: OnTurn,
        progress: Progress = _none_ended,
    ) -> None:
        self.tools = tools
        self.order = order
        self.member = member
        self.session = session
        self.on_turn = on_turn
        self.progress = progress
        self.history: History | None = None
        self._seed = derived_seed(order.seed, member.trajectory, 0, 0)

    @property
    def turn(self) -> int:
        """Index of the turn being played."""
        return len(self.member.turns)

    async def start(self) -> None:
        """Start the environment; members of a group share the task's seed. Raises EnvFailed."""
        observation = await self.session.start(self.order.task, self.order.task.seed)
        self.history = self.tools.harness.start(observation)

    async def call(self) -> tuple[Call, Reply] | None:
        """Ask the policy for the next reply; None when the context is full.

        Raises EngineFailed, BadRequest.
        """
        history = self._started()
        prompt = self.tools.harness.prompt(history)
        if prompt is None:
            return None
        submitted = self.tools.clock()
        completion = await self._answer(self._request(prompt))
        _check(completion)
        reply = self.tools.harness.reply(history, prompt, completion.output)
        return self._record(prompt, completion, reply, submitted), reply

    async def env(self, call: Call, reply: Reply) -> StepResult:
        """Pass the actions to the environment, record and stream the turn. Raises EnvFailed."""
        began = time.monotonic()
        if self.tools.delay is not None:
            await asyncio.sleep(self.tools.delay(self._seed, self.turn))
        result = await self.session.step(list(reply.actions))
        turn = Turn(
            turn=self.turn,
            calls=(call,),
            actions=tuple(clean(action) for action in reply.actions),
            observation=clean(result.observation),
            rewards=dict(result.rewards),
            valid=result.valid,
            changed=result.changed,
            state_key=result.state_key,
            env_s=time.monotonic() - began,
        )
        self.member.turns.append(turn)
        order = self.order
        self.member.tool = str(result.info.get("tool") or order.task.env)
        self.on_turn(
            Segment(trajectory=self.member.trajectory, group=order.group, attempt=order.attempt, turn=turn)
        )
        if not result.done:
            self.tools.harness.observe(self._started(), result.observation)
        return result

    def _started(self) -> History:
        assert self.history is not None, "start() comes first"
        return self.history

    def _request(self, prompt: Prompt) -> Request:
        order, trajectory = self.order, self.member.trajectory
        seed = derived_seed(order.seed, trajectory, order.attempt, self.turn) if self.tools.seeded else None
        extends = prompt.keep == len(self._started().ids) // 4  # else it begins a row
        return Request(
            id=f"{trajectory}/{order.attempt}/{self.turn}",
            prompt=prompt.ids,
            sampling=Sampling(
                max_tokens=prompt.max_tokens,
                stop_ids=self.tools.harness.stop_ids,
                temperature=order.temperature,
                seed=seed,
            ),
            session=trajectory,
            priority=-1 if order.purpose is Purpose.EVAL else 0,  # lower is sooner
            group=order.group,
            group_done=self.progress(),
            evaluation=order.purpose is Purpose.EVAL,
            kind=order.task.env,
            tool=self.member.tool,
            fresh=len(prompt.added if extends else prompt.ids) // 4,
        )

    async def _answer(self, request: Request) -> Completion:
        """Ask the policy; a turn that is long in coming pauses the environment meanwhile.

        Raises EngineFailed, BadRequest; EnvFailed when the environment fails to pause or to go on.
        """
        if self.tools.pause_after_s == math.inf:
            return await self.tools.policy.generate(request)
        asked = asyncio.ensure_future(self.tools.policy.generate(request))
        try:
            done, _ = await asyncio.wait([asked], timeout=self.tools.pause_after_s)
            if done:
                return asked.result()
            await self.session.pause()
            completion = await asked
            await self.session.resume()
            return completion
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait([asked])
            if not asked.cancelled():
                asked.exception()  # seen: what goes on from here is another error, or this one

    def _record(self, prompt: Prompt, completion: Completion, reply: Reply, submitted: float) -> Call:
        return Call(
            call=self.turn,
            keep=prompt.keep,
            added=prompt.added,
            output=completion.output,
            logprobs=completion.logprobs,
            versions=completion.versions,
            stop=completion.stop,
            temperature=self.order.temperature,
            op=prompt.op,
            spans=reply.spans,
            generator=completion.generator,
            cached_tokens=completion.cached_tokens,
            t_submit=submitted,
            t_start=completion.t_start,
            t_end=completion.t_end,
        )


async def play(episode: Episode) -> tuple[EndKind, str]:
    """The plain programme: turns until done, ``max_turns`` or a full context; done wins over limits.

    Raises EnvFailed, EngineFailed, BadRequest (also when not even the first call fits the context:
    such an episode has no sampled token, so it cannot count as truncated).
    """
    await episode.start()
    while episode.turn < episode.tools.max_turns:
        answer = await episode.call()
        if answer is None:
            if episode.turn == 0:
                raise BadRequest(_too_long(episode))
            return EndKind.TRUNCATED, "context"
        result = await episode.env(*answer)
        if result.done:
            return EndKind.FINISHED, ""
    return EndKind.TRUNCATED, "turns"


async def run_trajectory(
    tools: Tools,
    order: Order,
    trajectory: str,
    on_turn: OnTurn,
    deadline: float,
    progress: Progress = _none_ended,
) -> Member:
    """Play one member of an order to its end. ``deadline`` is in the event loop's time.

    Returns turns and end, without outcome (rewards belong to the whole group). Failures are data;
    only cancellation escapes, after the environment has been released.
    """
    member = Member(trajectory)
    timer = asyncio.timeout_at(deadline)
    try:
        async with timer:
            kind, reason, detail = await _guarded(tools, order, member, on_turn, progress)
    except TimeoutError:
        kind, reason, detail = EndKind.ABANDONED, "deadline", ""
    member.end = End(
        trajectory=trajectory,
        group=order.group,
        attempt=order.attempt,
        kind=kind,
        turns=len(member.turns),
        reason=reason,
        detail=clean(detail)[:2000],
    )
    return member


async def _guarded(
    tools: Tools, order: Order, member: Member, on_turn: OnTurn, progress: Progress
) -> tuple[EndKind, str, str]:
    """Turn errors into (failed, boundary, detail)."""
    try:
        session = await tools.environments.acquire()
        try:
            kind, reason = await play(Episode(tools, order, member, session, on_turn, progress))
        finally:
            # Shielded: a cancelled trajectory must not leave its environment behind.
            await asyncio.shield(session.release())
    except SpringtideError as error:
        return EndKind.FAILED, error.boundary, f"{type(error).__name__}: {error}"
    except Exception as error:
        _log.exception("trajectory %s hit an unforeseen error", member.trajectory)
        return EndKind.FAILED, "internal", f"{type(error).__name__}: {error}"
    return kind, reason, ""


def _check(completion: Completion) -> None:
    """Refuse an answer whose parts don't fit together: it must never reach the learner."""
    fault = completion_fault(completion)
    if fault:
        raise EngineFailed(f"request {completion.id} got a malformed answer: {fault}")


def completion_fault(completion: Completion) -> str:
    """What is wrong with a completion, "" when ids, log-probs and version spans agree."""
    count = len(ids(completion.output))
    if completion.stop is StopReason.ABORT:
        return "aborted by the engine"
    if count == 0:
        return "no output ids"
    if len(completion.logprobs) != 4 * count:
        return f"{count} ids with {len(completion.logprobs) // 4} log-probs"
    at = 0
    for span in completion.versions:
        if span.start != at or span.end <= span.start:
            return f"version spans do not tile the output: {span.start}..{span.end} after {at}"
        at = span.end
    return "" if at == count else f"version spans cover {at} of {count} ids"


def _too_long(episode: Episode) -> str:
    config = episode.tools.harness.config
    length = episode.history.length if episode.history is not None else 0
    return (
        f"the first prompt has {length} ids: with harness.max_new_tokens = {config.max_new_tokens} it exceeds"
        f" harness.max_context = {config.max_context}"
    )
