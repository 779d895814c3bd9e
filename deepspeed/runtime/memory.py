"""Memory of this rank's device, for `deepspeed.runtime.utils`."""

from __future__ import annotations

from typing import Any, final

import torch.distributed as dist

from ..accelerator.real_accelerator import get_accelerator

GIB = 2**30


@final
class _Last:
    """Bytes at the last `memory_status`, which shows the difference."""

    in_use = 0
    kept = 0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print what the device has in use and keeps, in GiB, with the change since the last call and the peaks.

    Args:
        print_rank: the only rank that prints; -1: all.
        reset_max: begin the peaks anew.
    """
    rank = _rank()
    if print_rank not in (-1, rank):
        return
    device: Any = get_accelerator()
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    in_use, kept = device.memory_allocated(), torch_memory_reserved()
    most, most_kept = device.max_memory_allocated(), torch_max_memory_reserved()
    print(
        f"RANK={rank} MEMSTATS {msg} device={device.current_device_name()} "
        f"current alloc={_gib(in_use)} (delta={_gib(in_use - _Last.in_use)} max={_gib(most)}) "
        f"current cache={_gib(kept)} (delta={_gib(kept - _Last.kept)} max={_gib(most_kept)})"
    )
    _Last.in_use, _Last.kept = in_use, kept


def _gib(size: int) -> str:
    return f"{size / GIB:.4f}GB"


def get_ma_status() -> int:
    """Bytes in use on the device; 0 on ranks but the first."""
    device: Any = get_accelerator()
    return 0 if _rank() else int(device.memory_allocated())


def torch_memory_reserved() -> int:
    """Bytes that torch keeps on the device, in use or not."""
    device: Any = get_accelerator()
    return int(device.memory_reserved())


def torch_max_memory_reserved() -> int:
    """The most that torch kept."""
    device: Any = get_accelerator()
    return int(device.max_memory_reserved())


__all__ = [
    "get_ma_status",
    "memory_status",
    "torch_max_memory_reserved",
    "torch_memory_reserved",
]
