"""`CPU_Accelerator`: the CPU as DeepSpeed's scripts see it; each local rank counts as one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...engine.telemetry.timers import memory_use
from ..missing import placeholder
from .abstract_accelerator import DeepSpeedAccelerator

DEFAULT_RANKS = 2  # what `xds` starts on a machine without a GPU

# names of tensor types that scripts call: `get_accelerator().FloatTensor([0])`
TENSORS = (
    *("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor"),
    "LongTensor",
)


def _nothing(*_: object) -> None:
    return


def _used_bytes(*_: object) -> int:
    return memory_use(torch.device("cpu")).now_bytes


def _most_bytes(*_: object) -> int:
    return memory_use(torch.device("cpu")).peak_bytes


# functions of torch.cuda that torch.cpu does not have
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "empty_cache": _nothing,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "initial_seed": torch.initial_seed,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "max_memory_allocated": _most_bytes,
    "max_memory_cached": _most_bytes,
    "max_memory_reserved": _most_bytes,
    "memory_allocated": _used_bytes,
    "memory_cached": _used_bytes,
    "memory_reserved": _used_bytes,
    "memory_stats": lambda *_: {
        "allocated_bytes.all.current": _used_bytes(),
        "allocated_bytes.all.peak": _most_bytes(),
    },
    "reset_max_memory_allocated": _nothing,
    "reset_max_memory_cached": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_device": _nothing,
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "stream": lambda *_: nullcontext(),
    "synchronize": _nothing,
}
_STREAMS = ("current_stream", "default_stream")


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU. Names that are not here are those of torch.cpu."""

    _name = "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device(self) -> str:
        """ "cpu": torch takes it as a device. DeepSpeed returns the local rank, as a text."""
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def device_count(self) -> int:
        """The ranks on this machine; outside a rank those that `xds` would start."""
        for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            if os.environ.get(variable, "").isdecimal():
                return int(os.environ[variable])
        return DEFAULT_RANKS

    def is_available(self) -> bool:
        """Always True: the CPU is a device too."""
        return True

    def is_synchronized_device(self) -> bool:
        return True

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the machine."""
        return _meminfo("MemTotal")

    def available_memory(self, device_index: int | None = None) -> int:
        return _meminfo("MemAvailable")

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTIONS:
            return _FUNCTIONS[name]
        if name in _STREAMS:
            return _nothing
        if name in TENSORS:
            return getattr(torch, name)
        return other_name(name, torch.cpu)


def other_name(name: str, module: Any) -> Any:
    """`module.name`.

    Raises:
        AttributeError: torch's module does not have it either.
    """
    if not name.startswith("_") and hasattr(module, name):
        return getattr(module, name)
    raise AttributeError(
        f"get_accelerator().{name} is not covered by xds.deepspeed: neither xds nor {module.__name__} has this "
        "name"
    )


def _meminfo(key: str) -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["CPU_Accelerator"]
