"""Shards of parameters in 8 bits in host memory, for forwards without gradients.

    host     |-- magnitudes, 4 bytes for each 256 elements --|-- int8 values --|      exact values
    device   decoded into the buffer from which the unit computes                     copied over them

A copy to the device moves 1.02 bytes an element instead of 2 or 4. See ops/kernels/quantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..ops.kernels.quantize import BLOCK_NUMEL, block_count, dequantize_, quantize_
from ..utils.errors import UsageError
from .interfaces import JobHandle, Shard
from .job_queues import JobQueue
from .pinned import host_memory

BITS = 8


@final
class CodedShard(Shard):
    """What a shard had when this was made. `tensor` is the memory of the codes."""

    is_on_host = True

    def __init__(
        self, values: Tensor, exact: Sequence[tuple[int, int]], queue: JobQueue, *, pin: bool
    ) -> None:
        """
        Args:
            values: [n] floating point, on the host.
            exact: ranges [start, stop) of them that are not rounded, in ascending order.
            queue: runs the copies to the device.
        """
        numel = values.numel()
        self._scale_bytes = 4 * block_count(numel, BLOCK_NUMEL)
        super().__init__(host_memory(self._scale_bytes + numel, pin=pin))
        self._queue = queue
        self._exact = list(exact)
        kept = [values[start:stop] for start, stop in exact]
        kept_numel = sum(part.numel() for part in kept)
        self._kept = host_memory(kept_numel * values.itemsize, pin=pin).view(values.dtype)
        if kept:
            torch.cat(kept, out=self._kept)
            # they would raise the magnitude of what they share a block with
            values = values.clone()
            for start, stop in exact:
                values[start:stop] = 0
        scales, codes = self._parts(self.tensor)
        quantize_(values, codes, scales, None, BITS, BLOCK_NUMEL)

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return memory[: self._scale_bytes].view(torch.float32), memory[self._scale_bytes :]

    def load(self) -> None:
        """
        Raises:
            UsageError: always; user code has written to a parameter.
        """
        raise UsageError(
            "a parameter was written or read as a whole inside of generating(bits=8), where parameters are "
            "rounded copies: do it before or after, or leave bits out"
        )

    def fetch(self, target: Tensor, after: JobHandle | None) -> JobHandle:
        def copy() -> None:  # what it allocates belongs to the queue's stream
            scales, codes = self._parts(self.tensor.to(target.device, non_blocking=True))
            dequantize_(codes[None], scales[None], target, BITS, BLOCK_NUMEL, 1.0)
            kept, offset = self._kept.to(target.device, non_blocking=True), 0
            for start, stop in self._exact:
                target[start:stop].copy_(kept[offset : offset + stop - start])
                offset += stop - start

        return self._queue.run(copy)


__all__ = ["BITS", "CodedShard"]
