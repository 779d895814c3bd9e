"""Reads a range of an extent block by block, the next block while the caller uses this one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..pinned import host_memory
from .extents import Extent
from .file import DiskFile, PendingRequest
from .options import ALIGN_BYTES, aligned

BLOCK_BYTES = 8 << 20


def read_blocks(disk: DiskFile, extent: Extent, start: int, stop: int) -> Iterator[Tensor]:
    """The bytes [start, stop) of `extent`: uint8 tensors of at most 8 MiB, each valid until the next one.

    Raises XdsError: the disk failed.
    """
    first = start - start % ALIGN_BYTES
    begins = range(first, stop, BLOCK_BYTES)
    size = min(BLOCK_BYTES, aligned(stop - first))
    buffers = [host_memory(size, pin=False) for _ in begins[:2]]

    def read(number: int) -> PendingRequest:
        begin = begins[number]
        into = buffers[number % 2][: min(size, aligned(stop - begin))]
        return disk.read(extent, into, begin)

    pending = read(0) if begins else None
    for number, begin in enumerate(begins):
        assert pending is not None
        pending.wait()
        if number + 1 < len(begins):
            pending = read(number + 1)
        low, high = max(start, begin), min(stop, begin + BLOCK_BYTES)
        yield buffers[number % 2][low - begin : high - begin]


__all__ = ["BLOCK_BYTES", "read_blocks"]
