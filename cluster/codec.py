"""Wire format: one version byte, then msgpack (msgspec). Never pickle.

``decode(encode(x), type(x)) == x``; any msgpack reader can read the bytes after the first.
Text is sanitised on the way in: a lone surrogate (half of a character, which models and
environments do emit) becomes U+FFFD instead of killing the writer.
"""

import re
from typing import Any, TypeVar

import msgspec

WIRE_VERSION = 1
_PREFIX = bytes([WIRE_VERSION])
_SURROGATE = re.compile("[\ud800-\udfff]")
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

T = TypeVar("T")


def encode(record: Any) -> bytes:
    """Encode a record. Lone surrogates in text must have been removed by ``clean``."""
    return _PREFIX + _encoder.encode(record)


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode bytes written by ``encode``.

    Raises ValueError when the wire version is foreign or the bytes do not fit ``kind``.
    """
    if not raw or raw[0] != WIRE_VERSION:
        got = raw[0] if raw else "nothing"
        raise ValueError(f"wire version {got} where {WIRE_VERSION} was expected")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value: T = decoder.decode(memoryview(raw)[1:])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
    return value


def clean(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot carry, by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)
