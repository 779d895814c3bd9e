"""How much memory of a device may still be allocated: now, and over training steps for a ratio of "auto"."""

from __future__ import annotations

from typing import final

import torch

from ..utils.host_memory import free_host_bytes

KEPT_FREE = 0.1  # share of the device: other steps may need more than those that were measured


class DeviceMemory:
    """Measures the memory of one device from `begin` on; by default of a CPU, which has nothing to fill."""

    def begin(self) -> None:
        """The steps to measure begin."""
        return

    def spare_bytes(self) -> int | None:
        """Bytes that were free at the peak, without those to keep free. None: there is nothing to fill."""
        return None


@final
class CudaMemory(DeviceMemory):
    """A GPU. Its peak statistics begin anew at `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.empty_cache()  # what the construction of the model has left
        torch.cuda.reset_peak_memory_stats(self._device)

    def spare_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self._device)
        return free_at_peak(
            total,
            free,
            reserved=torch.cuda.memory_reserved(self._device),
            peak=torch.cuda.max_memory_reserved(self._device),
        )


def free_at_peak(total: int, free: int, *, reserved: int, peak: int) -> int:
    """Bytes of `total` that nobody uses at this process's peak, without those to keep free; at least 0.

    Args:
        free: bytes that no process has now.
        reserved: bytes that this process has now: its allocator keeps those that it does not use.
        peak: the most that it had.
    """
    of_others = total - free - reserved
    return max(0, int((1 - KEPT_FREE) * total) - of_others - peak)


def free_bytes(device: torch.device) -> int | None:
    """Bytes of `device` that this process may still take now; None where nobody says it.

    On a CPU the ranks of a machine share them.
    """
    if device.type != "cuda":
        return free_host_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def memory_of(device: torch.device) -> DeviceMemory:
    """The measure for `device`."""
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory()


__all__ = ["CudaMemory", "DeviceMemory", "free_at_peak", "free_bytes", "memory_of"]
