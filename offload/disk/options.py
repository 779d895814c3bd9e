"""How the file of a rank is read and written: sizes of blocks, and how many are in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ...utils.errors import UsageError

ALIGN_BYTES = 4096  # of memory, offset and length, for direct I/O


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of 4096: what direct I/O transfers."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@final
@dataclass(frozen=True)
class DiskOptions:
    """Settings of the section `aio`.

    Raises:
        UsageError: `block_bytes` is not a multiple of 4096, or a setting is below its minimum.
    """

    block_bytes: int = 1 << 20  # aio.block_size: bytes of one system call
    queue_depth: int = 8  # aio.queue_depth: blocks in flight, one thread for each
    num_slots: int = 3  # of an extent each: one is updated, one is read, one is written
    slow_seconds: float = 30.0  # a block that takes longer is reported, once for each file

    def __post_init__(self) -> None:
        if self.block_bytes < ALIGN_BYTES or self.block_bytes % ALIGN_BYTES:
            raise UsageError(
                f"aio.block_size = {self.block_bytes}: must be a multiple of {ALIGN_BYTES} bytes, "
                f"such as {aligned(max(1, self.block_bytes))}"
            )
        if self.queue_depth < 1:
            raise UsageError(f"aio.queue_depth = {self.queue_depth}: must be at least 1")
