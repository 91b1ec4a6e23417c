"""Chat harness: history -> exact prompt ids, reply ids -> actions.

The ids of a trajectory only grow. The first prompt is the rendered chat up to the generation
prompt; the sampled ids are appended as they came; then follows the *glue*: what the template
writes between a reply and the next generation prompt, with the observation inside. The glue is
found by rendering a short fixed chat that ends in the new observation and taking the text after
the fixed part, so the cost of a turn is linear in its own tokens, whatever the history.

If the reply ended with the template's own end-of-turn token, the glue starts after it; if it was
cut by length or ended on another stop token, the glue brings the end-of-turn token as a token
that nobody sampled. Either way what follows it (often a newline) enters once, outside the loss.

Some templates rewrite the past (most often: reasoning of earlier turns is dropped). Whether they
do is probed at construction (``rewrites``). Where the past would change, the whole chat is
rendered again and the context *forks*: ``keep`` is the length of the common prefix, ``op`` is
``evict``, and the learner starts a new row there. Nothing drifts silently; such a turn costs as
much as its whole chat.
"""

from dataclasses import dataclass, field
from typing import Literal

from actors.tokenizer import Message, Tokenizer
from cluster.config import HarnessConfig
from cluster.errors import ConfigError
from cluster.types import ContextOp, Span, ids, pack_ids

_PROBE_USER = "Qobs"
_PROBE_REPLY = "Zrep"
_REASONING_END = "</think>"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send, and how it follows from what was sent before.

    ``ids`` (int32) is ``previous[:keep] + added``, where previous is prompt + output of the last call.
    """

    ids: bytes
    keep: int
    added: bytes
    op: ContextOp
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed reply: actions as stripped text, labelled spans over the output ids."""

    text: str
    actions: tuple[str, ...]
    spans: tuple[Span, ...] = ()


@dataclass(slots=True)
class History:
    """Mutable state of one trajectory; only the harness writes it."""

    ids: bytearray  # int32: every id that the model has seen or sampled, in order
    pending: bytes  # int32: ids to add before the next call
    keep: int = 0  # ids of ``ids`` that the next prompt keeps
    op: ContextOp = ContextOp.APPEND
    messages: list[Message] = field(default_factory=list)
    cut: bool = False  # the last reply lacks the template's end-of-turn token

    @property
    def length(self) -> int:
        """Ids of the next prompt."""
        return self.keep + len(self.pending) // 4


class ChatHarness:
    """Deterministic: the same observations and replies give the same ids, always.

    Raises ConfigError at construction when the template cannot carry the configured roles or a
    stop text is not a single token.
    """

    def __init__(self, tokenizer: Tokenizer, config: HarnessConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._system: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        probe = [*self._system, _user(_PROBE_USER), _assistant(_PROBE_REPLY)]
        self._probe = probe
        self._fixed = self._fixed_text(probe)
        self.end_of_turn = self._find_end_of_turn()
        self.stop_ids = self._find_stop_ids()
        self.rewrites: Literal["never", "reasoning", "always"] = self._find_rewrites()
        self._reasoning_id = tokenizer.token_id(_REASONING_END)

    def start(self, observation: str) -> History:
        """Begin a trajectory with the environment's first observation."""
        first = _user(self.tokenizer.defuse(observation))
        text = self.tokenizer.render([*self._system, first], add_generation_prompt=True)
        return History(bytearray(), pack_ids(self.tokenizer.encode(text)), messages=[*self._system, first])

    def prompt(self, history: History) -> Prompt | None:
        """The next call's prompt, None when it and a whole reply no longer fit ``max_context``."""
        if history.length + self.config.max_new_tokens > self.config.max_context:
            return None
        sent = bytes(history.ids[: 4 * history.keep]) + history.pending
        return Prompt(sent, history.keep, history.pending, history.op, self.config.max_new_tokens)

    def reply(self, history: History, prompt: Prompt, output: bytes) -> Reply:
        """Append sampled ids as they are and parse them.

        One action per reply: its text without special tokens and reasoning, stripped.
        """
        sampled = ids(output)
        history.ids = bytearray(prompt.ids + output)
        history.keep = len(history.ids) // 4
        history.pending = b""
        history.op = ContextOp.APPEND
        text = self.tokenizer.decode(sampled)
        history.cut = not len(sampled) or int(sampled[-1]) != self.end_of_turn
        history.messages.append(_assistant(text))
        action = text.rpartition(_REASONING_END)[2].strip()
        return Reply(text, (action,), self._spans(sampled.tolist()))

    def observe(self, history: History, observation: str) -> None:
        """Take the environment's answer to the last reply into the history."""
        message = _user(self.tokenizer.defuse(observation))
        reasoned = _REASONING_END in history.messages[-1]["content"]
        history.messages.append(message)
        if self.rewrites == "always" or (self.rewrites == "reasoning" and reasoned):
            self._fork(history)
            return
        glue = self._encode_glue(self._glue_text(message))
        if not history.cut and glue[0] == self.end_of_turn:
            glue = glue[1:]  # the policy sampled it
        history.pending = pack_ids(glue)

    def _fork(self, history: History) -> None:
        """Render the whole chat; keep the ids that did not change."""
        text = self.tokenizer.render(history.messages, add_generation_prompt=True)
        fresh = self.tokenizer.encode(text)
        previous = ids(bytes(history.ids)).tolist()
        keep = _common_prefix(previous, fresh)
        history.keep = keep
        history.pending = pack_ids(fresh[keep:])
        history.op = ContextOp.APPEND if keep == len(previous) else ContextOp.EVICT

    def _encode_glue(self, text: str) -> list[int]:
        glue = self.tokenizer.encode(text)
        if not glue:
            raise ConfigError("the chat template writes nothing between a reply and the next one")
        return glue

    def _glue_text(self, message: Message) -> str:
        """Text from the end of a reply up to the next generation prompt."""
        text = self.tokenizer.render([*self._probe, message], add_generation_prompt=True)
        if not text.startswith(self._fixed):  # the template looks ahead: caught by ``rewrites``
            raise ConfigError("the chat template changes a reply when a message follows it")
        return text[len(self._fixed) :]

    def _fixed_text(self, probe: list[Message]) -> str:
        """The rendered probe chat up to and including the placeholder reply."""
        text = self.tokenizer.render([*probe, _user(_PROBE_USER)], add_generation_prompt=True)
        head, mark, _ = text.rpartition(_PROBE_REPLY)
        if not mark:
            raise ConfigError("the chat template drops assistant messages: set model.template")
        return head + mark

    def _find_end_of_turn(self) -> int | None:
        """The special token that the template writes right after a reply, None if it writes none."""
        glue = self._encode_glue(self._glue_text(_user(_PROBE_USER)))
        return glue[0] if self.tokenizer.is_special(glue[0]) else None

    def _find_stop_ids(self) -> tuple[int, ...]:
        found = set(self.tokenizer.stop_ids)
        if self.end_of_turn is not None:
            found.add(self.end_of_turn)
        for text in self.config.stop:
            encoded = self.tokenizer.encode(text)
            if len(encoded) != 1:
                raise ConfigError(f"harness.stop = {text!r} is {len(encoded)} tokens: it must be one")
            found.add(encoded[0])
        if not found:
            raise ConfigError("no stop token: the model folder names no eos_token, set harness.stop")
        return tuple(sorted(found))

    def _find_rewrites(self) -> Literal["never", "reasoning", "always"]:
        """Compare text built turn by turn with the template's own rendering of the whole chat."""
        if not self._appends(_PROBE_REPLY):
            return "always"
        return "never" if self._appends(f"<think>\nW\n{_REASONING_END}\n\n{_PROBE_REPLY}") else "reasoning"

    def _appends(self, reply: str, turns: int = 3) -> bool:
        messages: list[Message] = [*self._system, _user("Qobs0")]
        text = self.tokenizer.render(messages, add_generation_prompt=True)
        for turn in range(turns):
            answer = _user(f"Qobs{turn + 1}")
            try:
                text += reply + self._glue_text(answer)
            except ConfigError:
                return False
            messages += [_assistant(reply), answer]
            if text != self.tokenizer.render(messages, add_generation_prompt=True):
                return False
        return True

    def _spans(self, sampled: list[int]) -> tuple[Span, ...]:
        if self._reasoning_id is None or self._reasoning_id not in sampled:
            return ()
        end = len(sampled) - sampled[::-1].index(self._reasoning_id)
        spans = (Span(0, end, "think"), Span(end, len(sampled), "action"))
        return spans if end < len(sampled) else spans[:1]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _common_prefix(left: list[int], right: list[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
