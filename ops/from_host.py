"""Values of the host on a device, without a wait of the host, and bytes of a device on the host.

torch.tensor(values, device="cuda") and Tensor.to("cuda") copy from pageable memory: the host waits until the
stream has come so far. A copy from page-locked memory is only started; torch keeps such memory till it is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without a wait. The host may write at once to a tensor that it has not pinned."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def bytes_to(device: torch.device, data: bytes) -> Tensor:
    """`data` as uint8 [len(data)] on `device`; not empty."""
    return moved(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor. The host waits for it."""
    return tensor.cpu().numpy().tobytes()


__all__ = ["bytes_of", "bytes_to", "moved"]
