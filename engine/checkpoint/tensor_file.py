"""One rank's tensors in a safetensors file: written as a stream, summed on the way.

The format is 8 bytes with the length of a JSON header, the header, then the tensors' bytes. It is written
here because the package's own writer would hold a copy of everything; `CheckedFile` reads it.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ops.errors import UsageError
from .writer import BLOCK_BYTES, chunk_bytes_of, write_summed

HEADER_ALIGN = 64
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
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


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file: elements [start, stop) of `tensor`, flattened."""

    name: str
    tensor: Tensor
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return (self.stop - self.start) * self.tensor.element_size()

    @property
    def shape(self) -> list[int]:
        is_whole = self.stop - self.start == self.tensor.numel()
        return list(self.tensor.shape) if is_whole else [self.stop - self.start]


@dataclass(frozen=True)
class Sums:
    """The length of a written file and the CRC-32 of every `chunk_bytes` of it."""

    size_bytes: int
    crc32: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        return chunk_bytes_of(self.size_bytes)


# -- writing ------------------------------------------------------------------------------------------------


def write_tensors(path: Path, entries: Sequence[Entry]) -> Sums:
    """Write a safetensors file and make it durable.

    Memory:  one chunk where tensors lie on a device; one tensor where its elements are not in order.
    Raises OSError: as the file system does; the file may be there in part.
    """
    size_bytes = image_bytes(entries)
    return Sums(size_bytes, tuple(write_summed(path, size_bytes, _pieces_of(_in_order(entries)))))


def image_bytes(entries: Sequence[Entry]) -> int:
    """The length that the file of `entries` will have."""
    ordered = _in_order(entries)
    return len(_header(ordered)) + sum(entry.size_bytes for entry in ordered)


@torch.no_grad()
def copy_image(entries: Sequence[Entry], memory: Tensor) -> None:
    """Put the bytes of the file of `entries` into `memory` [image_bytes], uint8, on the CPU."""
    ordered = _in_order(entries)
    header = _header(ordered)
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    at = len(header)
    for entry in ordered:
        target = memory[at : at + entry.size_bytes].view(entry.tensor.dtype)
        target.copy_(entry.tensor.detach().reshape(-1)[entry.start : entry.stop])
        at += entry.size_bytes


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Widest elements first: every tensor then begins at a multiple of its element's size."""
    return sorted(entries, key=lambda entry: -entry.tensor.element_size())


def _pieces_of(entries: Sequence[Entry]) -> Iterator[memoryview]:
    """The file's bytes, in order. A view is valid until the next one is asked for."""
    yield memoryview(_header(entries))
    for entry in entries:
        flat = entry.tensor.detach().reshape(-1)[entry.start : entry.stop]
        if flat.device.type == "cpu":
            yield bytes_of(flat)
            continue
        step = BLOCK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            here = flat[start : start + step].cpu()
            yield bytes_of(here)


def _header(entries: Sequence[Entry]) -> bytes:
    table: dict[str, Any] = {}
    at = 0
    for entry in entries:
        dtype = DTYPES.get(entry.tensor.dtype)
        if dtype is None:
            raise UsageError(
                f"{entry.name} is {entry.tensor.dtype}: safetensors files have no such dtype; convert it"
            )
        stop = at + entry.size_bytes
        table[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGN)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor is."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
