"""Writes one rank's tensors to a safetensors file as a stream, with checksums.

The format is 8 bytes with the length of a JSON header, the header, then the tensors' bytes. The writer of the
package safetensors is not used because it would hold a copy of everything. `CheckedFile` reads the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .tensor_table import make_header
from .writer import BLOCK_BYTES, chunk_bytes_of, write_summed


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file: elements [start, stop) of `tensor`, flattened.

    blocks: (start, stop) -> these elements, block by block, if the values are elsewhere; `tensor` then gives
        shape and dtype only. A block is valid until the next one.
    """

    name: str
    tensor: Tensor
    start: int
    stop: int
    blocks: Callable[[int, int], Iterator[Tensor]] | None = None

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
    """Write a safetensors file and fsync it.

    Memory:  one block for tensors on a device; one tensor if its elements are not contiguous.
    Raises OSError: from the file system; a partial file may remain.
    """
    size_bytes = image_bytes(entries)
    return Sums(size_bytes, tuple(write_summed(path, size_bytes, _pieces_of(_in_order(entries)))))


def image_bytes(entries: Sequence[Entry]) -> int:
    """The length that the file of `entries` will have."""
    ordered = _in_order(entries)
    return len(_header(ordered)) + sum(entry.size_bytes for entry in ordered)


@torch.no_grad()
def copy_image(entries: Sequence[Entry], memory: Tensor) -> None:
    """Put the bytes of the file of `entries` into `memory` [image_bytes], uint8, on the CPU.

    None of them has `blocks`. Waits once for a device.
    """
    ordered = _in_order(entries)
    header = _header(ordered)
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    at = len(header)
    for entry in ordered:
        target = memory[at : at + entry.size_bytes].view(entry.tensor.dtype)
        target.copy_(_part(entry), non_blocking=True)
        at += entry.size_bytes
    if any(entry.tensor.is_cuda for entry in ordered):
        torch.cuda.current_stream().synchronize()


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Widest elements first: every tensor then begins at a multiple of its element's size."""
    return sorted(entries, key=lambda entry: -entry.tensor.element_size())


def _pieces_of(entries: Sequence[Entry]) -> Iterator[memoryview]:
    """The file's bytes, in order. A view is valid until the next one is requested."""
    yield memoryview(_header(entries))
    for entry in entries:
        if entry.blocks is not None:
            yield from map(bytes_of, entry.blocks(entry.start, entry.stop))
            continue
        flat = _part(entry)
        if flat.device.type == "cpu" and flat.is_contiguous():
            yield bytes_of(flat)
            continue
        step = BLOCK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            here = dense(flat[start : start + step])
            yield bytes_of(here)


def _part(entry: Entry) -> Tensor:
    """The elements [n] of an entry, contiguous or not: `reshape` also handles strided and expanded views."""
    whole = entry.tensor.detach().resolve_conj().resolve_neg()
    return whole.reshape(-1)[entry.start : entry.stop]


def _header(entries: Sequence[Entry]) -> bytes:
    return make_header((entry.name, entry.tensor.dtype, entry.shape) for entry in entries)


def dense(tensor: Tensor) -> Tensor:
    """The elements contiguous in host memory; `tensor` itself if they already are."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor is."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "its memory is not its elements"
    assert not (tensor.is_conj() or tensor.is_neg()), "its memory is not its elements"
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
