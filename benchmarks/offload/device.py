"""The device that is measured: the only file of this benchmark that calls torch.cuda.

A CPU can stand in for a GPU. Then every line of the benchmark runs, and no figure means anything.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

Copy = tuple[Tensor, Tensor]  # target, source


class Device(ABC):
    """Memory and clock of one device."""

    name: str
    torch_device: torch.device
    total_bytes: int

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work on the device."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that no process uses."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most memory that this process has reserved."""

    @abstractmethod
    def start_copies(self, copies: Sequence[Copy]) -> None:
        """Start all copies at the same time."""

    def seconds(self, work: Callable[[], object]) -> float:
        """The time of `work`, with all that it starts on the device."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start


@final
class Gpu(Device):
    """The first GPU."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        about = torch.cuda.get_device_properties(0)
        self.name = about.name
        self.total_bytes = about.total_memory
        self._streams = [torch.cuda.Stream(self.torch_device) for _ in range(2)]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()

    def start_copies(self, copies: Sequence[Copy]) -> None:
        for stream, (target, source) in zip(self._streams, copies, strict=False):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)


@final
class StandIn(Device):
    """A CPU, for a dry run."""

    name = "a CPU in place of a GPU: the figures mean nothing"
    torch_device = torch.device("cpu")
    total_bytes = 2 << 20

    def synchronize(self) -> None:
        return

    def free_bytes(self) -> int:
        return self.total_bytes

    def peak_bytes(self) -> int:
        return 0

    def start_copies(self, copies: Sequence[Copy]) -> None:
        for target, source in copies:
            target.copy_(source)


def has_gpu() -> bool:
    """Whether CUDA can be used."""
    return torch.cuda.is_available()


def pick(*, dry: bool) -> Device:
    """The device to measure; `dry`: the CPU."""
    return StandIn() if dry else Gpu()


__all__ = ["Copy", "Device", "Gpu", "StandIn", "has_gpu", "pick"]
