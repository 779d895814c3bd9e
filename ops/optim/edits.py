"""Values that a script wrote to parameters in the compute dtype: found by comparing, given to the master."""

from __future__ import annotations

import torch
from torch import Tensor

from ..flat import chunks


def take_edits(master: Tensor, narrow: Tensor) -> None:
    """Where `narrow` is not `master` rounded, bit for bit, somebody wrote it: it becomes the master's value.

    Shapes: both [n]; `narrow` is bf16 or fp16, `master` wider. Reads both once, and does not wait for a device.
    """
    on_cpu = master.device.type == "cpu"
    for piece in chunks(master.numel(), on_cpu):
        wide, written = master[piece], narrow[piece]
        rounded = wide.to(written.dtype)
        if on_cpu and _same_bits(rounded, written):
            continue  # elsewhere asking would wait for the device
        differs = rounded.view(torch.int16) != written.view(torch.int16)
        wide.copy_(torch.where(differs, written.to(wide.dtype), wide))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Of two 16-bit tensors. Words of 64 bits, where they fit, are compared four times as fast."""
    starts = (int(one.storage_offset()), int(other.storage_offset()), one.numel())
    word = torch.int16 if any(start % 4 for start in starts) else torch.int64
    return torch.equal(one.view(word), other.view(word))
