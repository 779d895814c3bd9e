"""One rank's tensors in a safetensors file: written as a stream, summed on the way, read by range.

The format is 8 bytes with the length of a JSON header, the header, then the tensors' bytes. It is written
here because the package's own writer would hold a copy of everything, and read here so that every byte is
checked before it is used.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ...ops.errors import DamagedError, UsageError
from ...zero.ranges import Copy
from .format import FileRecord
from .writer import CHUNK_BYTES, write_summed

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
    """The length of a written file and the CRC-32 of every CHUNK_BYTES of it."""

    size_bytes: int
    crc32: tuple[int, ...]


# -- writing ------------------------------------------------------------------------------------------------


def write_tensors(path: Path, entries: Sequence[Entry]) -> Sums:
    """Write a safetensors file and make it durable.

    Memory:  one chunk where tensors lie on a device; one tensor where its elements are not in order.
    Raises OSError: as the file system does; the file may be there in part.
    """
    size, crcs = write_summed(path, _pieces_of(_in_order(entries)))
    return Sums(size, tuple(crcs))


def image_bytes(entries: Sequence[Entry]) -> int:
    """The length that the file of `entries` will have."""
    ordered = _in_order(entries)
    return len(_header(ordered)) + sum(entry.size_bytes for entry in ordered)


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
        step = CHUNK_BYTES // flat.element_size()
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


# -- reading ------------------------------------------------------------------------------------------------


@final
class CheckedFile:
    """One file of a checkpoint, opened for reading. `verify` what will be read, then read it.

    Raises:
        DamagedError: the file is missing, has another length than the manifest says, a sum is wrong, or the
            disk cannot read it.
    """

    def __init__(self, folder: Path, record: FileRecord) -> None:
        self.path = folder / record.path
        self._record = record
        self._verified: set[int] = set()
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedError(f"{self.path} is missing: the checkpoint is damaged") from None
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size, expected = os.fstat(self._fd).st_size, self._record.size_bytes
        if size != expected:
            raise DamagedError(
                f"{self.path} has {size} bytes and should have {expected}: the checkpoint is damaged"
            )
        self._buffer = torch.empty(self._record.chunk_bytes, dtype=torch.uint8)
        length = struct.unpack("<Q", self._checked(0, 8))[0]
        self._data_at = 8 + length
        self._table: dict[str, Any] = json.loads(self._checked(8, length))

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, start: int, view: memoryview) -> None:
        """Fill `view` with the file's bytes from `start`."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], start + done)
            except OSError as error:  # a bad sector
                raise DamagedError(f"{self.path} cannot be read: {error}") from error
            if count == 0:
                raise DamagedError(f"{self.path} ends too early: the checkpoint is damaged")
            done += count

    def _checked(self, start: int, size: int) -> bytes:
        if not 0 <= size <= self._record.size_bytes - start:
            raise DamagedError(f"{self.path} is damaged: its header is too long")
        self._verify_bytes(start, start + size)
        out = bytearray(size)
        self._read(start, memoryview(out))
        return bytes(out)

    def _verify_bytes(self, start: int, stop: int) -> None:
        size = self._record.chunk_bytes
        for number in range(start // size, -(-stop // size)):
            if number in self._verified:
                continue
            here = bytes_of(self._buffer)[: min(size, self._record.size_bytes - number * size)]
            self._read(number * size, here)
            if zlib.crc32(here) != self._record.crc32[number]:
                raise DamagedError(
                    f"{self.path} is damaged: bytes {number * size} to {number * size + len(here)} do not "
                    "match their checksum; load another checkpoint"
                )
            self._verified.add(number)

    def _entry(self, name: str) -> Any:
        if name not in self._table:
            raise UsageError(
                f"{self.path} has no tensor {name!r}: the checkpoint contradicts itself"
            )
        return self._table[name]

    def _span(self, copy: Copy) -> tuple[int, torch.dtype]:
        """Where in the file the elements of `copy` begin, and their dtype."""
        entry = self._entry(copy.tensor)
        dtype = TORCH_DTYPES[entry["dtype"]]
        return self._data_at + entry["data_offsets"][0] + copy.source * dtype.itemsize, dtype

    def verify(self, copy: Copy) -> None:
        """Check the sums of everything that `copy` will read. Each chunk is read once."""
        start, dtype = self._span(copy)
        self._verify_bytes(start, start + copy.numel * dtype.itemsize)

    def fill(self, receiver: Tensor, copy: Copy) -> None:
        """Do what `copy` says; elements are converted where the receiver has another dtype."""
        start, dtype = self._span(copy)
        target = receiver[copy.target : copy.target + copy.numel]
        if target.device.type == "cpu" and target.dtype == dtype:
            self._read(start, bytes_of(target))
            return
        step = len(self._buffer) // dtype.itemsize
        for at in range(0, copy.numel, step):
            part = target[at : at + step]
            here = self._buffer[: part.numel() * dtype.itemsize]
            self._read(start + at * dtype.itemsize, bytes_of(here))
            part.copy_(here.view(dtype))

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, checked, on the CPU."""
        entry = self._entry(name)
        out = torch.empty(entry["shape"], dtype=TORCH_DTYPES[entry["dtype"]])
        whole = Copy(0, name, "", 0, 0, out.numel())
        self.verify(whole)
        self.fill(out.view(-1), whole)
        return out
