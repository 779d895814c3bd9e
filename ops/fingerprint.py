"""A fingerprint of a flat tensor: shows whether a script has written to it since the last one.

Sum over the 64-bit words of word * odd weight, modulo 2^64. One changed word always changes it, because an odd
weight has an inverse; several changed words go unnoticed with a probability of about 2^-64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .flat import CHUNK_NUMEL

DEVICE_CHUNK_NUMEL = 1 << 23  # words per chunk on a GPU: 64 MiB of products
MULTIPLIER = 0x5851F42D4C957F2D  # odd, with mixed bits
CHUNK_FACTOR = 0x2545F4914F6CDD1D


def fingerprint(flat: Tensor) -> Tensor:
    """The fingerprint of a contiguous 1-D tensor, int64 [] on its device. No synchronization."""
    words = _words(flat)
    size = CHUNK_NUMEL if flat.device.type == "cpu" else DEVICE_CHUNK_NUMEL
    size = max(min(size, words.numel()), 1)
    weights = torch.arange(1, 2 * size, 2, dtype=torch.int64, device=flat.device) * MULTIPLIER
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in words.split(size):  # type: ignore[no-untyped-call]
        total = total * CHUNK_FACTOR + (piece * weights[: piece.numel()]).sum()
    return total


def _words(flat: Tensor) -> Tensor:
    """The same memory as integers, of 64 bits if its length allows that."""
    starts = int(flat.storage_offset()) * flat.element_size(), flat.numel() * flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if (
            all(start % dtype.itemsize == 0 for start in starts)
            and dtype.itemsize >= flat.element_size()
        ):
            return flat.view(dtype).to(torch.int64)
    return flat.view(torch.uint8).to(torch.int64)


__all__ = ["fingerprint"]
