"""Text <-> token ids and chat templates, with ``tokenizers`` and jinja2 alone.

Nothing is ever added to what the text says: the template writes BOS where the model wants it,
so ``encode`` never asks the tokenizer for special tokens of its own (no doubled BOS).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import tokenizers

from cluster.codec import clean
from cluster.errors import ConfigError

_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

Message = Mapping[str, str]


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text in some templates: passed through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Tokenizer:
    """A folder in Hugging Face layout: ``tokenizer.json`` plus a chat template.

    ``template_override`` (jinja text) replaces the folder's own template. ``now`` is the date that
    templates see through ``strftime_now``; it is fixed at construction, so that rendering the same
    messages twice gives the same text. Raises ConfigError when a file is missing or unreadable.
    """

    def __init__(self, folder: str | Path, template_override: str = "", now: datetime | None = None) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model folder {self.folder} has no tokenizer.json")
        self._core: Any = tokenizers.Tokenizer.from_file(str(path))
        self._core.no_truncation()
        self._core.no_padding()
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        self._special = self._special_texts()
        self._now = now or datetime.now()
        self.template = template_override or self._find_template()
        self._compiled = _environment(self._now).from_string(self.template)
        self._variables = {
            key: text for key in _TOKEN_KEYS if (text := _token_text(self._settings.get(key))) is not None
        }

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a text; the model's embedding may be larger."""
        largest: int = max(self._core.get_vocab(with_added_tokens=True).values())
        return largest + 1

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-text and end-of-turn ids as the folder declares them, sorted."""
        found = set()
        eos = self._variables.get("eos_token")
        if eos is not None and (token := self.token_id(eos)) is not None:
            found.add(token)
        declared = _read_json(self.folder / "generation_config.json").get("eos_token_id")
        if declared is not None:
            found.update(declared if isinstance(declared, list) else [declared])
        return tuple(sorted(found))

    def token_id(self, text: str) -> int | None:
        """Id of one token, None when the vocabulary has no such token."""
        token: int | None = self._core.token_to_id(text)
        return token

    def is_special(self, token: int) -> bool:
        """Whether an id is a special token (control, not text)."""
        return self._core.id_to_token(token) in self._special

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens that are spelled out become their ids, none is added."""
        found: list[int] = self._core.encode(clean(text), add_special_tokens=False).ids
        return found

    def decode(self, ids: Sequence[int] | np.ndarray[Any, Any], skip_special: bool = True) -> str:
        """Text of ids. Ids without a text (embedding padding) are left out."""
        text: str = self._core.decode([int(token) for token in ids], skip_special_tokens=skip_special)
        return clean(text)

    def defuse(self, text: str) -> str:
        """Break special tokens spelled out in foreign text, so that an observation cannot end its turn."""
        for special in self._special:
            if special in text:
                text = text.replace(special, special[0] + " " + special[1:])
        return text

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Messages ``{"role", "content"}`` through the chat template.

        Raises ConfigError when the template refuses them (for instance a system message).
        """
        try:
            return self._compiled.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ConfigError(f"chat template of {self.folder} refuses roles {roles}: {error}") from error

    def _special_texts(self) -> tuple[str, ...]:
        added = self._core.get_added_tokens_decoder().values()
        # Longest first, so that a token that contains another is broken as a whole.
        return tuple(sorted((token.content for token in added if token.special), key=len, reverse=True))

    def _find_template(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"model folder {self.folder} has no chat template (chat_template.jinja, or chat_template in"
                " tokenizer_config.json): set model.template"
            )
        return template


def _environment(now: datetime) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The jinja dialect that published chat templates are written for."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__} where an object was expected")
    return value


def _token_text(value: Any) -> str | None:
    """Token settings are a text or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
