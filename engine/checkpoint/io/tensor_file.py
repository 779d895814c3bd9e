"""Writes tensors to a safetensors file with a checksum of every chunk, and fsyncs it.

    entries  ->  header, widest elements first  ->  blocks of 8 MiB  ->  summed and written, three at a time

`tensor_table` has the header; `CheckedFile` reads the file. The writer of the package safetensors is not used
because it would hold a copy of everything.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from ....ops.device import device_of
from ....ops.weights.tensor_table import make_header
from ....utils.shared_file import SharedFile
from .storage import ALIGN_BYTES, NewFile, storage_of

BLOCK_BYTES = 8 << 20  # written at a time: whole chunks
DEPTH = 3  # blocks that are summed and written at the same time
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4 << 10, 4 << 20
MAX_SUMS = 4096  # per file, unless its chunks have the maximum size
PIECE_BYTES = 128 << 10  # copied and summed at a time: it stays in the cache
_PRIME = 4_294_967_291


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A tensor of a file: elements [start, stop) of `tensor`, flattened.

    blocks: (start, stop) -> these elements, block by block, if the values are elsewhere; `tensor` then gives
        shape and dtype only. A block is valid until the next one.
    reads_memory: they are computed from memory.
    """

    name: str
    tensor: Tensor
    start: int
    stop: int
    blocks: Callable[[int, int], Iterator[Tensor]] | None = None
    reads_memory: bool = False

    @property
    def size_bytes(self) -> int:
        return (self.stop - self.start) * self.tensor.element_size()

    @property
    def shape(self) -> list[int]:
        is_whole = self.stop - self.start == self.tensor.numel()
        return list(self.tensor.shape) if is_whole else [self.stop - self.start]

    @property
    def values(self) -> Tensor:
        """The elements [n], contiguous or not: `reshape` also handles strided and expanded views."""
        whole = self.tensor.detach().resolve_conj().resolve_neg()
        return whole.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Sums:
    """The length of a written file and the CRC-32 of every `chunk_bytes` of it."""

    size_bytes: int
    crc32: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        return chunk_bytes_of(self.size_bytes)


def chunk_bytes_of(size_bytes: int) -> int:
    """The size of the chunks that have a checksum each, in a file of `size_bytes`."""
    chunk_bytes = MIN_CHUNK_BYTES
    while chunk_bytes < MAX_CHUNK_BYTES and chunk_bytes * MAX_SUMS < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


# -- from tensors -------------------------------------------------------------------------------------------


def write_tensors(path: Path, entries: Sequence[TensorEntry]) -> Sums:
    """Write a safetensors file and fsync it.

    Memory:  DEPTH blocks, and one tensor if its elements are not contiguous.
    Raises OSError: from the file system; a partial file may remain.
    """
    size_bytes = image_bytes(entries)
    with ThreadPoolExecutor(DEPTH) as pool:
        return write_blocks(path, size_bytes, packed(_pieces(entries), size_bytes), pool)


def image_bytes(entries: Sequence[TensorEntry]) -> int:
    """The length that the file of `entries` will have."""
    return len(_header(_in_order(entries))) + sum(entry.size_bytes for entry in entries)


@torch.no_grad()
def copy_image(entries: Sequence[TensorEntry], memory: Tensor) -> None:
    """Put the bytes of the file of `entries` into `memory` [image_bytes], uint8, on the CPU.

    None of them has `blocks` that read a disk. Waits once for a device.
    """
    ordered = _in_order(entries)
    header = _header(ordered)
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    offset = len(header)
    for entry in ordered:
        target = memory[offset : offset + entry.size_bytes].view(entry.tensor.dtype)
        if entry.blocks is None:
            target.copy_(entry.values, non_blocking=True)
        for block in () if entry.blocks is None else entry.blocks(entry.start, entry.stop):
            target[: block.numel()].copy_(block, non_blocking=True)
            target = target[block.numel() :]
        offset += entry.size_bytes
    for device in {entry.tensor.device for entry in ordered}:
        device_of(device).event().synchronize()


def rewrite_tensors(
    file: SharedFile, entries: Sequence[TensorEntry]
) -> tuple[int, int, tuple[int, ...]]:
    """Write a safetensors file over another one in memory, in this thread alone.

    Returns its length, that of its chunks, and the `word_sum` of each chunk.
    Raises OSError: it does not fit into the memory; a partial file may remain.
    """
    header = _header(_in_order(entries))
    memory = file.resized(len(header) + sum(entry.size_bytes for entry in entries))
    words = torch.frombuffer(memory, dtype=torch.int64, count=len(memory) // 8)
    sums: list[Tensor] = []
    offset = 0
    for piece in _pieces(entries, header):
        done = 0
        while done < len(piece):
            count = min(len(piece) - done, PIECE_BYTES - offset % PIECE_BYTES)
            memory[offset : offset + count] = piece[done : done + count]
            done, offset = done + count, offset + count
            if offset % PIECE_BYTES == 0:
                sums.append(words[(offset - PIECE_BYTES) // 8 : offset // 8].sum())
    values = torch.stack(sums).tolist() if sums else []
    values.append(_sum_of(memory[offset - offset % PIECE_BYTES :]))
    chunk_bytes = memory_chunk_bytes(offset)
    each = chunk_bytes // PIECE_BYTES
    totals = (sum(values[n : n + each]) for n in range(0, -(-offset // PIECE_BYTES), each))
    return offset, chunk_bytes, tuple(map(_folded, totals))


def memory_chunk_bytes(size_bytes: int) -> int:
    """`chunk_bytes_of` for files that `rewrite_tensors` writes: a multiple of PIECE_BYTES."""
    return max(2 * PIECE_BYTES, chunk_bytes_of(size_bytes))


def tensor_sums(entries: Sequence[TensorEntry]) -> tuple[int, ...]:
    """The `word_sum` of each part of the file of `entries`, which is not written."""
    return tuple(map(word_sum, _pieces(entries)))


def word_sum(view: bytearray | memoryview) -> int:
    """The sum of the 64-bit words of `view`, modulo 2^64 and then a prime below 2^32; zeros follow its end.

    A change of one word changes it. It is ten times as fast as a CRC: for copies in memory.
    """
    pieces = (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
    return _folded(sum(map(_sum_of, pieces)))


def _sum_of(piece: bytearray | memoryview) -> int:
    """Of so few words that torch takes no other thread."""
    if len(piece) % 8 or memoryview(piece).readonly:  # torch warns of such
        piece = bytearray(piece) + bytes(-len(piece) % 8)
    return int(torch.frombuffer(piece, dtype=torch.int64).sum()) if len(piece) else 0


def _folded(total: int) -> int:
    return total % (1 << 64) % _PRIME


def matches(path: Path, size_bytes: int, chunk_bytes: int, sums: Sequence[int]) -> bool:
    """Every byte of the file is as these word sums say. Raises OSError."""
    if path.stat().st_size != size_bytes:
        return False
    piece = memoryview(bytearray(chunk_bytes))
    with open(path, "rb") as file:
        return all(word_sum(piece[: file.readinto(piece)]) == wanted for wanted in sums)


def write_image(path: Path, memory: Tensor, on_written: Callable[[int], None]) -> Sums:
    """Write the bytes that `copy_image` made, in this thread alone, and fsync.

    on_written: called after each block with the number of bytes written.
    Raises OSError: from the file system; a partial file may remain.
    """
    view = bytes_of(memory)
    blocks = (view[offset : offset + BLOCK_BYTES] for offset in range(0, len(view), BLOCK_BYTES))
    return write_blocks(path, len(view), blocks, None, on_written)


def _in_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Widest elements first: every tensor then begins at a multiple of its element's size."""
    return sorted(entries, key=lambda entry: -entry.tensor.element_size())


def _header(ordered: Sequence[TensorEntry]) -> bytes:
    return make_header((entry.name, entry.tensor.dtype, entry.shape) for entry in ordered)


def _pieces(entries: Sequence[TensorEntry], header: bytes | None = None) -> Iterator[memoryview]:
    """The file's bytes, in order. A view is valid until the next one is requested."""
    ordered = _in_order(entries)
    yield memoryview(header or _header(ordered))
    for entry in ordered:
        if entry.blocks is not None:
            for block in entry.blocks(entry.start, entry.stop):
                here = block.cpu()
                yield bytes_of(here)
            continue
        values = entry.values
        is_plain = values.device.type == "cpu" and values.is_contiguous()
        step = max(values.numel(), 1) if is_plain else BLOCK_BYTES // values.element_size()
        for start in range(0, values.numel(), step):
            here = dense(values[start : start + step])
            yield bytes_of(here)


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


# -- to the disk --------------------------------------------------------------------------------------------


def write_blocks(
    path: Path,
    size_bytes: int,
    blocks: Iterable[memoryview],
    pool: ThreadPoolExecutor | None,
    on_written: Callable[[int], None] | None = None,
) -> Sums:
    """Write `blocks` of BLOCK_BYTES, `size_bytes` in total, to a new file, sum and fsync it.

    Args:
        blocks: page-aligned, each valid until DEPTH more are requested; the last one may be shorter.
        pool: works on DEPTH blocks at a time; None: one after the other, without another thread.
    Raises OSError: from the file system; a partial file may remain.
    """
    chunk_bytes, offset = chunk_bytes_of(size_bytes), 0
    crcs: list[int] = []
    file = storage_of(path).create(path, size_bytes)
    pending: deque[Future[list[int]]] = deque()
    try:
        for block in blocks:
            if pool is None:
                crcs += _write_summed(file, block, offset, chunk_bytes)
            else:
                pending.append(pool.submit(_write_summed, file, block, offset, chunk_bytes))
                if len(pending) == DEPTH:
                    crcs += pending.popleft().result()
            offset += len(block)
            if on_written is not None:
                on_written(offset)
        for future in pending:
            crcs += future.result()
        file.sync()
    finally:
        for future in pending:
            future.exception()  # it uses the file
        file.close()
    return Sums(size_bytes, tuple(crcs))


def packed(pieces: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """The same bytes in blocks, in DEPTH buffers that are reused in turn."""
    block_bytes = min(BLOCK_BYTES, -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES) or ALIGN_BYTES
    buffers = cycle([memoryview(mmap.mmap(-1, block_bytes)) for _ in range(DEPTH)])
    buffer, filled = next(buffers), 0
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            part = piece[offset : offset + block_bytes - filled]
            buffer[filled : filled + len(part)] = part
            offset, filled = offset + len(part), filled + len(part)
            if filled == block_bytes:
                yield buffer
                buffer, filled = next(buffers), 0
    if filled:
        yield buffer[:filled]


def _write_summed(file: NewFile, block: memoryview, offset: int, chunk_bytes: int) -> list[int]:
    """Write all of `block` at byte `offset`; the CRC-32 of its chunks. Sums and writes release the GIL."""
    crcs = [zlib.crc32(block[i : i + chunk_bytes]) for i in range(0, len(block), chunk_bytes)]
    file.write(block, offset)
    return crcs
