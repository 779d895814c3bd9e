"""The header of a safetensors file: writes it for files of xds, and reads it with checks from any file.

    8 bytes: the header's length | {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}} | data

Offsets count from the end of the header. The format lacks some of torch's dtypes. Elements of these are stored
as pairs of a dtype that it has; the header's metadata contains their real dtype.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import parse_json
from ..flat import numel_of

HEADER_ALIGN = 64
LENGTH_BYTES = 8  # before the header: its length
MAX_NUMEL = 1 << 58  # of a shape, without zeros: torch's arithmetic overflows beyond it
MAX_DIMS = 64
METADATA = "__metadata__"
NO_METADATA: Mapping[str, str] = MappingProxyType({})
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
PAIRS = {torch.complex128: "F64", torch.complex32: "F16"}  # an element is a pair of those
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, *PAIRS)}


@dataclass(frozen=True)
class Located:
    """A tensor of a file: bytes [start, stop) of the data after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return numel_of(self.shape)


def check_storable(where: str, tensor: Tensor) -> None:
    """Raises UsageError: a checkpoint cannot hold `tensor`; the message begins with `where`."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"of the layout {tensor.layout}"
        raise UsageError(
            f"{where} is a tensor {kind}: a checkpoint holds dense tensors with values; convert it, or leave "
            "it out"
        )
    if tensor.dtype not in DTYPES and tensor.dtype not in PAIRS:
        raise UsageError(
            f"{where} is a tensor of {tensor.dtype}, which a checkpoint cannot hold; convert it where it was "
            f"made to one of {', '.join(BY_NAME)}"
        )


# -- making -------------------------------------------------------------------------------------------------


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, list[int]]],
    align: int = HEADER_ALIGN,
    metadata: Mapping[str, str] = NO_METADATA,
) -> bytes:
    """The first bytes of a file with tensors of these names, dtypes and shapes, stored one after another."""
    table: dict[str, Any] = {}
    metadata = dict(metadata)
    offset = 0
    for name, dtype, shape in tensors:
        stop = offset + numel_of(shape) * dtype.itemsize
        text = DTYPES.get(dtype)
        if text is None:
            text, shape = PAIRS[dtype], [*shape, 2]
            metadata[name] = str(dtype).removeprefix("torch.")
        table[name] = {"dtype": text, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    if metadata:
        table[METADATA] = metadata
    text_bytes = json.dumps(table).encode()
    text_bytes += b" " * (-(len(text_bytes) + 8) % align)
    return struct.pack("<Q", len(text_bytes)) + text_bytes


# -- reading ------------------------------------------------------------------------------------------------


def read_header(
    read: Callable[[int, int], bytes], size_bytes: int, max_header_bytes: int | None = None
) -> tuple[dict[str, Located], int]:
    """The tensors of a file of `size_bytes`, and the offset of its data.

    Args:
        read: (start, size) -> the bytes of the file.
        max_header_bytes: refuse longer headers; None allows any length within the file.
    Raises ValueError: it is not a safetensors file, or it is damaged; the message gives the reason.
    """
    first = read(0, min(size_bytes, LENGTH_BYTES)).ljust(LENGTH_BYTES, b"\0")
    length = struct.unpack("<Q", first)[0]
    limit = size_bytes - LENGTH_BYTES
    if not 2 <= length <= (limit if max_header_bytes is None else min(limit, max_header_bytes)):
        raise ValueError("it is not a safetensors file, or is cut off")
    data_at = LENGTH_BYTES + length
    return read_table(read(LENGTH_BYTES, length), size_bytes - data_at), data_at


def read_table(text: bytes, data_bytes: int) -> dict[str, Located]:
    """The tensors that the header `text` names, all of them within `data_bytes`.

    Raises ValueError: it is not a valid header; the message gives the reason.
    """
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise ValueError(f"its header {error}") from None
    if not isinstance(raw, dict):
        raise ValueError("its header is not a table of tensors")
    for name in raw:
        if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
            raise ValueError(f"{shown(name)} is no text in UTF-8")
    metadata = raw.pop(METADATA, None)
    pairs = metadata if isinstance(metadata, dict) else {}
    table = {name: _located(name, entry, pairs, data_bytes) for name, entry in raw.items()}
    _check_apart(table)
    return table


def _check_apart(table: Mapping[str, Located]) -> None:
    """Check that no byte belongs to two tensors."""
    full = sorted(
        (located.start, located.stop, name) for name, located in table.items() if located.numel
    )
    for (_, stop, before), (start, _, after) in pairwise(full):
        if start < stop:
            raise ValueError(f"{shown(before)} and {shown(after)} have bytes in common")


def _located(name: str, entry: Any, pairs: Mapping[str, Any], data_bytes: int) -> Located:
    entry = entry if isinstance(entry, dict) else {}
    text, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = TORCH_DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        raise ValueError(f"{shown(name)} is of the dtype {shown(text)}, which torch does not have")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{shown(name)} has no shape and data_offsets of whole numbers")
    if not is_possible(shape) or offsets[1] - offsets[0] != numel_of(shape) * dtype.itemsize:
        raise ValueError(f"{shown(name)} has offsets that do not fit its shape")
    if offsets[1] > data_bytes:
        raise ValueError(f"{shown(name)} ends after the end of the file")
    whole = pairs.get(name)
    dtype_there = BY_NAME.get(whole) if isinstance(whole, str) else None
    if dtype_there in PAIRS:
        if text != PAIRS[dtype_there] or shape[-1:] != [2]:
            raise ValueError(f"{shown(name)} is declared as {whole}, but is not stored as such")
        dtype, shape = dtype_there, shape[:-1]
    return Located(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def is_possible(shape: Sequence[int]) -> bool:
    """Whether torch can count the elements of a tensor of this shape."""
    return len(shape) <= MAX_DIMS and prod(size or 1 for size in shape) <= MAX_NUMEL


def shown(value: Any) -> str:
    """A value from a file for a message: quoted and shortened."""
    return printable(repr(value), 100)
