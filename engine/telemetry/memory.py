"""Memory in use at the points of a step, where `memory_breakdown` is on, in the form of DeepSpeed's lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import final

import torch

from ...ops.device import device_of

GIB = 2**30
_REGIONS = ("forward", "backward", "step")


def memory_line(message: str, device: torch.device) -> str:
    """`message`, memory of the device (of the process on a CPU), and memory in use on the host.

    MA is memory in use now, Max_MA its peak since the last call; CA and Max_CA are what torch keeps of the
    device. On a CPU all four are the process's, and peaks are since its start.
    """
    use = device_of(device).memory()
    device_of(device).reset_peak_memory()
    parts = [
        message,
        f"MA {use.now_bytes / GIB:.2f} GB",
        f"Max_MA {use.peak_bytes / GIB:.2f} GB",
        f"CA {use.kept_bytes / GIB:.2f} GB",
        f"Max_CA {use.peak_kept_bytes / GIB:.2f} GB",
    ]
    used_bytes, total_bytes = host_memory()
    if total_bytes:
        percent = 100 * used_bytes / total_bytes
        parts.append(
            f"CPU Virtual Memory: used = {used_bytes / GIB:.2f} GB, percent = {percent:.1f}%"
        )
    return " | ".join(parts)


def memory_text(device: torch.device) -> str:
    """Memory in use, in the form of DeepSpeed's timers."""
    use = device_of(device).memory()
    named = {
        "mem_allocated": use.now_bytes,
        "max_mem_allocated": use.peak_bytes,
        "cache_allocated": use.kept_bytes,
        "max_cache_allocated": use.peak_kept_bytes,
    }
    return "".join(f" | {name}: {size / GIB:.4f} GB" for name, size in named.items())


def host_memory() -> tuple[int, int]:
    """Bytes of the machine that are in use, and all; (0, 0) where it has no /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    total = kib["MemTotal"]
    return 1024 * (total - kib.get("MemAvailable", kib["MemFree"])), 1024 * total


@final
class MemoryPoints:
    """Memory before and after each forward, backward and step. Lines of earlier micro-batches are dropped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lines: dict[str, str] = {}

    def region(
        self, name: str, inner: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """The context around a region, which includes `inner`."""
        return self._measured(name, inner) if name in _REGIONS else inner

    @contextmanager
    def _measured(self, name: str, inner: AbstractContextManager[None]) -> Iterator[None]:
        self._read(f"Engine before {name}")
        with inner:
            yield
        self._read(f"Engine after {name}")

    def take_lines(self) -> list[str]:
        """A line for each point of the last micro-batch, and forget them."""
        lines, self._lines = list(self._lines.values()), {}
        return lines

    def _read(self, point: str) -> None:
        self._lines[point] = memory_line(point, self._device)


__all__ = ["MemoryPoints", "host_memory", "memory_line", "memory_text"]
