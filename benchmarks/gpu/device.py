"""The device that is measured: the only file of this benchmark that calls torch.cuda.

A CPU can stand in for a GPU. Then every line of the benchmark runs, and no figure means anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Cpu:
    """A CPU, for a dry run. Byte counts are invented: they are never kept as a result."""

    is_real = False
    backend = "gloo"
    count = 1
    torch_device = torch.device("cpu")
    activities = (torch.profiler.ProfilerActivity.CPU,)

    def about(self) -> dict[str, Any]:
        return {"name": "dry run on a CPU", "memory_gib": 0.0, "capability": "", "cuda": None}

    def choose(self, index: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def total_bytes(self) -> int:
        return 1 << 30

    def free_bytes(self) -> int:
        return 1 << 30

    def allocated(self) -> int:
        return 1000

    def peak_allocated(self) -> int:
        return 2000

    def peak_reserved(self) -> int:
        return 2200

    def reset_peaks(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class Gpu(Cpu):
    """The first GPU."""

    is_real = True
    backend = "nccl"
    activities = (
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    )

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.count = torch.cuda.device_count()
        torch.cuda.set_device(self.torch_device)

    def about(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(self.torch_device)
        return {
            "name": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
        }

    def choose(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index % self.count)
        torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated())

    def peak_allocated(self) -> int:
        return int(torch.cuda.max_memory_allocated())

    def peak_reserved(self) -> int:
        return int(torch.cuda.max_memory_reserved())

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


def pick(*, dry: bool) -> Cpu:
    """The device to measure; `dry`: the CPU."""
    return Cpu() if dry else Gpu()


def seconds(device: Cpu, work: Callable[[], object]) -> float:
    """The time of `work`, with all that it starts on the device."""
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start


def matmul_flops(device: Cpu, width: int) -> float:
    """Operations a second of a bf16 matrix product of random values: the median of 7 groups of 10."""
    a, b = (
        torch.randn(width, width, device=device.torch_device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(10):
            torch.matmul(a, b, out=out)

    for _ in range(3):  # the clock of an idle card is low
        products()
    return 20 * width**3 / statistics.median(seconds(device, products) for _ in range(7))
