"""Stand-ins without a model, for tests and benchmarks: policy, generator, environments, tokenizer.

Each keeps the contract of what it stands for, so that the code under test cannot tell.
"""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from actors.tokenizer import Tokenizer
from cluster.types import Completion, Request, StopReason, Task, VersionSpan, ids, pack_floats, pack_ids
from envs.base import StepResult

Script = Callable[[NDArray[np.int32], random.Random], Sequence[int]]
Play = Callable[[Task, int, list[str]], StepResult]  # (task, turn, actions) -> result; may raise EnvFailed

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ScriptedPolicy:
    """``ScriptedPolicy(lambda prompt, rng: [5, 2])`` answers every request with ids 5, 2.

    The random source is seeded by (seed, request id), so answers do not depend on arrival order.
    Output longer than ``max_tokens`` is cut (stop reason LENGTH), and so is what follows a stop id.
    """

    def __init__(self, script: Script, version: int = 0, seed: int = 0, delay_s: float = 0.0) -> None:
        self.script = script
        self.version = version
        self.seed = seed
        self.delay_s = delay_s
        self.requests: list[Request] = []  # all that were asked, in order of arrival

    async def generate(self, request: Request) -> Completion:
        """Answer at once, or after ``delay_s``."""
        self.requests.append(request)
        began = time.time()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return self.answer(request, began)

    def answer(self, request: Request, began: float) -> Completion:
        """The completion, without waiting."""
        rng = random.Random(f"{self.seed}/{request.id}")
        sampling = request.sampling
        output: list[int] = []
        stop = StopReason.LENGTH
        for token in list(self.script(ids(request.prompt), rng))[: sampling.max_tokens]:
            output.append(int(token))
            if token in sampling.stop_ids:
                stop = StopReason.STOP
                break
        return Completion(
            id=request.id,
            output=pack_ids(output),
            logprobs=pack_floats([-rng.expovariate(2.0) for _ in output]),
            versions=(VersionSpan(self.version, 0, len(output)),),
            stop=stop,
            t_start=began,
            t_end=time.time(),
            generator="scripted",
        )


class ScriptedGenerator:
    """A generator with mailboxes, answered by a ``ScriptedPolicy``: ``submit`` then ``collect``."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.batches: list[int] = []  # sizes of submits
        self.released: list[str] = []  # sessions
        self._boxes: defaultdict[str, asyncio.Queue[Completion]] = defaultdict(asyncio.Queue)
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        """Start answering."""
        self.batches.append(len(requests))
        for request in requests:
            task = asyncio.create_task(self._serve(caller, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        """Everything that is ready for a caller; waits for the first at most ``wait_s``."""
        box = self._boxes[caller]
        try:
            async with asyncio.timeout(wait_s):
                ready = [await box.get()]
        except TimeoutError:
            return []
        while not box.empty():
            ready.append(box.get_nowait())
        return ready

    async def release(self, caller: str, sessions: Sequence[str]) -> None:
        """Note who left."""
        self.released += sessions

    async def _serve(self, caller: str, request: Request) -> None:
        self._boxes[caller].put_nowait(await self.policy.generate(request))


class ScriptedSession:
    """One episode of ``ScriptedEnvironments``."""

    def __init__(self, home: "ScriptedEnvironments") -> None:
        self._home = home
        self._task: Task | None = None
        self._turn = 0
        self._paused = False

    async def start(self, task: Task, seed: int) -> str:
        """First observation: the task's data under ``start``, or ``go``."""
        self._task = task
        if self._home.start is not None:
            return self._home.start(task, seed)
        return str(task.data.get("start", "go"))

    async def step(self, actions: list[str]) -> StepResult:
        """What the play function says, after ``delay_s``."""
        assert self._task is not None, "step before start"
        assert not self._paused, "step while paused"
        if self._home.delay_s:
            await asyncio.sleep(self._home.delay_s)
        result = self._home.play(self._task, self._turn, actions)
        self._turn += 1
        return result

    async def pause(self) -> None:
        """Count the pause."""
        self._home.pauses += 1
        self._paused = True

    async def resume(self) -> None:
        """The next step comes."""
        self._paused = False

    async def release(self) -> None:
        """Count the return."""
        self._home.live -= 1


class ScriptedEnvironments:
    """Environments in this process; ``live`` counts those not given back."""

    def __init__(
        self, play: Play, start: Callable[[Task, int], str] | None = None, delay_s: float = 0.0
    ) -> None:
        self.play = play
        self.start = start
        self.delay_s = delay_s
        self.live = 0
        self.acquired = 0
        self.pauses = 0

    async def acquire(self) -> ScriptedSession:
        """A new session at once."""
        self.live += 1
        self.acquired += 1
        return ScriptedSession(self)


def character_tokenizer(
    folder: Path, template: str = CHAT_TEMPLATE, merges: Sequence[tuple[str, str]] = (), bos: bool = False
) -> Tokenizer:
    """Write and load a tokenizer with one id per printable ASCII character, plus ``merges``.

    Ids 0..2 are <|endoftext|>, <|im_start|>, <|im_end|> (the declared end of turn). With ``bos`` its
    post-processor puts <|endoftext|> before every text that is encoded with special tokens.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    texts = special + ["\n"] + [chr(code) for code in range(32, 127)]
    vocab = {text: index for index, text in enumerate(texts)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    core: Any = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=list(merges), unk_token="?", fuse_unk=False)
    )
    core.decoder = tokenizers.decoders.Fuse()
    core.add_special_tokens(special)
    if bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return Tokenizer(folder)
