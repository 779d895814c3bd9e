"""The message of one range of elements: a bit per element, then a magnitude for each block of 1024.

    |-- signs, n / 8 bytes --|-- fp32 magnitudes, 4 bytes for each 1024 elements --|   0.1289 bytes an element

Magnitudes are the mean of a block, which leaves the least error: see ops/kernels/signs.py.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.kernels.signs import (
    BLOCK_NUMEL,
    scale_count,
    sign_bytes,
    sign_pack_,
    sign_unpack_,
)


@final
class Packets:
    """Packs and unpacks ranges of `numel` elements."""

    def __init__(self, numel: int) -> None:
        self._sign_bytes = sign_bytes(numel)
        self._num_scales = scale_count(numel, BLOCK_NUMEL)
        self.packet_bytes = self._sign_bytes + 4 * self._num_scales

    def empty(self, count: int, device: torch.device) -> Tensor:
        """Memory of `count` messages, uint8 [count, packet_bytes]."""
        return torch.empty((count, self.packet_bytes), dtype=torch.uint8, device=device)

    def pack(self, value: Tensor, error: Tensor, packet: Tensor, gain: float = 1.0) -> None:
        """Write gain * (value + error) [n] to `packet`, and what is not sent to `error`, fp32.

        Blocks with inf or nan keep their error; their magnitude is inf or nan.
        """
        scales = torch.empty(self._num_scales, dtype=torch.float32, device=packet.device)
        sign_pack_(value, error, packet[: self._sign_bytes], scales, BLOCK_NUMEL, False, gain)
        packet[self._sign_bytes :].copy_(scales.view(torch.uint8))

    def unpack(self, packets: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Write factor * the sum of `packets` [count, packet_bytes], in their order, to `out` [n]."""
        signs = packets[:, : self._sign_bytes].contiguous()
        # a copy: a view as fp32 must begin at a multiple of 4 bytes
        scales = packets[:, self._sign_bytes :].clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.float32)
        sign_unpack_(signs, scales, out, BLOCK_NUMEL, factor)


def finite(values: Tensor) -> Tensor:
    """`values` with 0 in place of inf and nan, in the same memory."""
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


__all__ = ["Packets", "finite"]
