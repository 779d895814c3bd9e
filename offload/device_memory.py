"""How much memory of a device may still be allocated: now, and over training steps for a ratio of "auto"."""

from __future__ import annotations

from typing import final

import torch

from ..ops.device import accelerator_of, device_of
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
class OwnMemory(DeviceMemory):
    """A GPU. Its peak statistics begin anew at `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._device = accelerator_of(device)

    def begin(self) -> None:
        self._device.empty_cache()  # what the construction of the model has left
        self._device.reset_peak_memory()

    def spare_bytes(self) -> int | None:
        free, total = self._device.free_and_total_bytes()
        use = self._device.memory()
        return free_at_peak(total, free, reserved=use.kept_bytes, peak=use.peak_kept_bytes)


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

    Of the host where the device reports none; the ranks of a machine share them.
    """
    if not device_of(device).reports_memory:
        return free_host_bytes()
    use = device_of(device).memory()
    return accelerator_of(device).free_and_total_bytes()[0] + use.kept_bytes - use.now_bytes


def memory_of(device: torch.device) -> DeviceMemory:
    """The measure for `device`."""
    return OwnMemory(device) if device_of(device).reports_memory else DeviceMemory()


__all__ = ["DeviceMemory", "OwnMemory", "free_at_peak", "free_bytes", "memory_of"]
