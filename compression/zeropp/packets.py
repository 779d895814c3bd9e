"""The message of one range of elements in 8 or 4 bits.

    |-- fp32 magnitudes, 4 bytes for each 256 elements --|-- values, bits / 8 bytes an element --|

1.016 bytes an element in 8 bits, 0.516 in 4 bits. See ops/kernels/quantize.py.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.kernels.quantize import (
    BLOCK_NUMEL,
    block_count,
    dequantize_,
    quantize_,
    value_bytes,
)

ALIGNMENT = 4  # bytes: each message begins with fp32 numbers


@final
class QuantizedPackets:
    """Packs and unpacks ranges of `numel` elements in `bits` (8 or 4) bits."""

    def __init__(self, numel: int, bits: int) -> None:
        self._bits = bits
        self._scale_bytes = 4 * block_count(numel, BLOCK_NUMEL)
        self._value_bytes = value_bytes(numel, bits)
        used = self._scale_bytes + self._value_bytes
        self.packet_bytes = -(-used // ALIGNMENT) * ALIGNMENT

    def empty(self, *counts: int, device: torch.device) -> Tensor:
        """Memory of messages, uint8 [*counts, packet_bytes]."""
        return torch.empty((*counts, self.packet_bytes), dtype=torch.uint8, device=device)

    def pack(self, values: Tensor, packet: Tensor, error: Tensor | None = None) -> None:
        """Write `values` [n] (+ `error`, fp32, which becomes what is lost) to `packet`.

        A block with inf or nan arrives as nan, and keeps its error.
        """
        scales, stored = self._parts(packet)
        quantize_(values, stored, scales, error, self._bits, BLOCK_NUMEL)

    def unpack(self, packet: Tensor, out: Tensor) -> None:
        """Write the values of one message to `out` [n]."""
        scales, stored = self._parts(packet)
        dequantize_(stored[None], scales[None], out, self._bits, BLOCK_NUMEL, 1.0)

    def unpack_each(self, packets: Tensor, outs: Tensor) -> None:
        """Write the values of each of `packets` [count, packet_bytes] to its row of `outs` [count, n]."""
        stop = self._scale_bytes + self._value_bytes
        scales = packets[:, None, : self._scale_bytes].view(torch.float32).unbind()
        stored = packets[:, None, self._scale_bytes : stop].unbind()
        for each, magnitudes, out in zip(stored, scales, outs.unbind(), strict=True):
            dequantize_(each, magnitudes, out, self._bits, BLOCK_NUMEL, 1.0)

    def unpack_sum(self, packets: Tensor, out: Tensor) -> None:
        """Write the sum of `packets` [count, packet_bytes], in their order, to `out` [n]."""
        scales = packets[:, : self._scale_bytes].clone(memory_format=torch.contiguous_format)
        stop = self._scale_bytes + self._value_bytes
        stored = packets[:, self._scale_bytes : stop].clone(memory_format=torch.contiguous_format)
        dequantize_(stored, scales.view(torch.float32), out, self._bits, BLOCK_NUMEL, 1.0)

    def _parts(self, packet: Tensor) -> tuple[Tensor, Tensor]:
        stop = self._scale_bytes + self._value_bytes
        return packet[: self._scale_bytes].view(torch.float32), packet[self._scale_bytes : stop]


__all__ = ["QuantizedPackets"]
