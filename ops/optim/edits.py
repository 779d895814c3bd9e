"""Finds values that a script wrote to parameters in the compute dtype, and copies them to the masters."""

from __future__ import annotations

import torch
from torch import Tensor

from ..flat import chunks


def take_edits(master: Tensor, narrow: Tensor) -> None:
    """Copy each element of `narrow` that differs from `master` rounded to `master`: a script has written it.

    Shapes: both [n]; `narrow` is bf16 or fp16, `master` wider. Reads both once, without synchronizing a device.
    Of the same dtype, `master` has no bits that `narrow` lacks: it becomes `narrow`.
    """
    if master.dtype == narrow.dtype:
        master.copy_(narrow)
        return
    on_cpu = master.device.type == "cpu"
    for piece in chunks(master.numel(), on_cpu):
        wide, written = master[piece], narrow[piece]
        rounded = wide.to(written.dtype)
        if on_cpu and _same_bits(rounded, written):
            continue  # on other devices this check would synchronize
        differs = rounded.view(torch.int16) != written.view(torch.int16)
        wide.copy_(torch.where(differs, written.to(wide.dtype), wide))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 16-bit tensors are equal. Comparing 64-bit words, where aligned, is four times as fast."""
    starts = (int(one.storage_offset()), int(other.storage_offset()), one.numel())
    word = torch.int16 if any(start % 4 for start in starts) else torch.int64
    return torch.equal(one.view(word), other.view(word))
