"""Weights on disk or in shared memory: one safetensors file and its checksum, without torch.

The layout is the safetensors one: eight bytes of header length (little-endian), a JSON header
``{name: {dtype, shape, data_offsets}}``, then the tensors without gaps. It is written in one pass
that also computes the checksum, and moved into place by a rename, so a reader sees a whole
file or none. Tensors are anything that knows its dtype, shape and address (torch on the CPU,
numpy), so the learner and the generator's worker share this file though only they load torch.

The checksum is CRC-32 over all bytes of the file (``"crc32:1a2b3c4d"``): it finds damage and mix-ups,
runs at memory speed (2.7 GB/s measured, BLAKE2b 0.6), and is no defence against an attacker.
"""

import ctypes
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_HEADER_LIMIT = 100_000_000  # bytes; the safetensors format's own bound
_CHUNK = 1 << 24  # bytes hashed and written at once
_ALIGN = 8  # bytes; the data section starts at a multiple

# dtype name (torch and numpy spell these alike) -> (safetensors code, bytes per element)
_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in _DTYPES.items()}


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a tensor lies: bytes ``[start, end)`` of the file, row-major, little-endian."""

    name: str
    dtype: str  # "float32", "bfloat16" ...
    shape: tuple[int, ...]
    start: int
    end: int


def write_weights(path: str | Path, tensors: Mapping[str, Any]) -> tuple[int, str]:
    """Write ``tensors`` (contiguous, on the CPU) as safetensors; return (bytes, checksum).

    The order of the mapping is kept. Raises ValueError naming the tensor that is not contiguous,
    not on the CPU, or of a dtype that the format lacks; OSError when the disk is full.
    """
    target = Path(path)
    header: dict[str, Any] = {}
    views: list[memoryview] = []
    offset = 0
    for name, tensor in tensors.items():
        code, view = _raw(name, tensor)
        header[name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + view.nbytes],
        }
        views.append(view)
        offset += view.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    pieces = [memoryview(len(text).to_bytes(8, "little") + text), *views]
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    crc = 0
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                for at in range(0, piece.nbytes, _CHUNK):
                    crc = zlib.crc32(piece[at : at + _CHUNK], crc)
                    file.write(piece[at : at + _CHUNK])
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return sum(piece.nbytes for piece in pieces), _label(crc)


def checksum_bytes(data: bytes | memoryview) -> str:
    """Checksum of a whole file already in memory (or mapped)."""
    return _label(zlib.crc32(data))


def checksum_file(path: str | Path) -> str:
    """Checksum of the file's bytes. Raises OSError when it cannot be read."""
    crc = 0
    with Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return _label(crc)


def read_entries(data: bytes | memoryview, total: int | None = None) -> list[TensorEntry]:
    """The tensors of a safetensors file, in file order, every bound checked.

    ``data`` holds the header at least; ``total`` is the file's size when ``data`` is only its start.
    Raises ValueError saying what is wrong with a damaged file.
    """
    total = len(data) if total is None else total
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_HEADER_LIMIT, len(data) - 8):
        raise ValueError(f"not a safetensors file: header of {length} bytes in a file of {total}")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        entries = [_entry(name, fields, 8 + length) for name, fields in header.items()]
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"damaged safetensors header: {error!r}") from error
    entries.sort(key=lambda entry: entry.start)
    at = 8 + length
    for entry in entries:
        if entry.start != at:
            raise ValueError(f"tensor {entry.name} starts at byte {entry.start}, expected {at}")
        at = entry.end
    if at != total:
        raise ValueError(f"tensors end at byte {at} of a file of {total} bytes")
    return entries


def read_header(path: str | Path) -> list[TensorEntry]:
    """Names, dtypes and shapes of a safetensors file without reading its tensors.

    Raises OSError when it cannot be read, ValueError when it is damaged.
    """
    with Path(path).open("rb") as file:
        head = file.read(8)
        head += file.read(min(int.from_bytes(head, "little"), _HEADER_LIMIT))
        return read_entries(head, os.fstat(file.fileno()).st_size)


def _entry(name: str, fields: dict[str, Any], base: int) -> TensorEntry:
    code = fields["dtype"]
    if code not in _NAMES:
        raise ValueError(f"tensor {name} has dtype {code!r} (valid: {', '.join(sorted(_NAMES))})")
    dtype = _NAMES[code]
    start, end = fields["data_offsets"]
    shape = tuple(fields["shape"])
    if end - start != math.prod(shape) * _DTYPES[dtype][1]:
        raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return TensorEntry(name, dtype, shape, base + start, base + end)


def _raw(name: str, tensor: Any) -> tuple[str, memoryview]:
    """(format code, bytes of the tensor without a copy); torch and numpy by their own words."""
    dtype = str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name} has dtype {dtype} (valid: {', '.join(sorted(_DTYPES))})")
    code, width = _DTYPES[dtype]
    size = math.prod(tensor.shape) * width
    if hasattr(tensor, "data_ptr"):
        if str(tensor.device) != "cpu":
            raise ValueError(f"tensor {name} is on {tensor.device}: move it to the CPU first")
        contiguous, address = bool(tensor.is_contiguous()), int(tensor.data_ptr())
    else:
        contiguous, address = bool(tensor.flags.c_contiguous), int(tensor.ctypes.data)
    if not contiguous:
        raise ValueError(f"tensor {name} is not contiguous: call .contiguous() first")
    if size == 0:
        return code, memoryview(b"")
    return code, memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _label(crc: int) -> str:
    return f"crc32:{crc:08x}"
