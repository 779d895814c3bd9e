"""What torch's caching allocator of CUDA would reserve for a trace of allocations: best fit, splits and merges.

The rules are those of its source without options (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512
bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from segments of its
own size in whole 2 MiB. A block is split if more than 1 MiB would be left (512 bytes of small ones). Segments
without a used block are returned when the device is full, and only then.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(eq=False)
class _Block:
    size: int
    key: tuple[str, str, bool]  # pool, stream, whether it is small
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class OutOfMemory(Exception):
    """The device is full."""


class _FreeBlocks:
    """Free blocks of one pool, stream and class of sizes, the smallest first."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, _Block]] = []

    def add(self, block: _Block) -> None:
        bisect.insort(self._blocks, (block.size, id(block), block))

    def remove(self, block: _Block) -> None:
        del self._blocks[bisect.bisect_left(self._blocks, (block.size, id(block)))]

    def best(self, size: int) -> _Block | None:
        at = bisect.bisect_left(self._blocks, (size,))
        return self._blocks[at][2] if at < len(self._blocks) else None

    def whole(self) -> list[_Block]:
        """Those that are segments."""
        return [b for _, _, b in self._blocks if b.before is None and b.after is None]


class CachingAllocator:
    """Bytes: `allocated` and `reserved`, and the most of both. limit: of the device."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self._limit = limit
        self._free: dict[object, _FreeBlocks] = defaultdict(_FreeBlocks)
        self._used: dict[str, _Block] = {}

    def allocate(self, name: str, num_bytes: int, stream: str = "0", pool: str = "") -> None:
        """Give a block to `name`. Blocks stay with their stream and pool."""
        size = max(512, -(-num_bytes // 512) * 512)
        is_small = size <= MIB
        key = (pool, stream, is_small)
        block = self._free[key].best(size)
        if block is not None:
            self._free[key].remove(block)
        else:
            block = _Block(self._reserve(_segment(size, is_small)), key)
        left = block.size - size
        if left >= 512 if is_small else left > MIB:
            rest = _Block(left, key, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._free[key].add(rest)
        block.is_free = False
        self._used[name] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def free(self, name: str) -> None:
        """Take the block back, and join it with free neighbours."""
        block = self._used.pop(name)
        self.allocated -= block.size
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._free[block.key].remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._free[block.key].add(block)

    def empty_cache(self) -> None:
        """Return the segments without a used block."""
        for free in self._free.values():
            for segment in free.whole():
                free.remove(segment)
                self.reserved -= segment.size

    def _reserve(self, num_bytes: int) -> int:
        if self.reserved + num_bytes > self._limit:
            self.empty_cache()
        if self.reserved + num_bytes > self._limit:
            raise OutOfMemory
        self.reserved += num_bytes
        self.most_reserved = max(self.most_reserved, self.reserved)
        return num_bytes


def _segment(size: int, is_small: bool) -> int:
    if is_small:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


def smallest_device(log: Sequence[str], factor: int, *, pools: bool = False) -> int:
    """The bytes of the smallest device that runs `log`, to 1/2 percent."""
    low = replay(log, factor, pools=pools).most_allocated
    step = low // 200
    first, last = 0, 200
    while first < last:
        middle = (first + last) // 2
        try:
            replay(log, factor, pools=pools, limit=low + middle * step)
            last = middle
        except OutOfMemory:
            first = middle + 1
    return low + first * step


def replay(
    log: Iterable[str], factor: int = 1, *, pools: bool = False, limit: float = float("inf")
) -> CachingAllocator:
    """Run the lines "alloc NAME BYTES STREAM [POOL]", "free NAME" and "empty cache", every size times `factor`.

    pools: memory of another POOL comes from segments of its own. Raises OutOfMemory: more than `limit` bytes.
    """
    allocator = CachingAllocator(limit)
    for line in log:
        kind, *words = line.split()
        if kind == "alloc":
            name, num_bytes, *place = words
            allocator.allocate(name, factor * int(num_bytes), *place[: 2 if pools else 1])
        elif kind == "free" and words[0] in allocator._used:
            allocator.free(words[0])
        elif kind == "empty":
            allocator.empty_cache()
    return allocator
