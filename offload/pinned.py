"""Host memory of exact size for copies to and from a device."""

from __future__ import annotations

import torch
from torch import Tensor


def host_memory(num_bytes: int, *, pin: bool) -> Tensor:
    """Memory of `num_bytes` bytes, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
