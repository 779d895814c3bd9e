"""`get_accelerator`: the type of this machine's device, with DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from ..engine.process.process import local_rank
from ..engine.telemetry.timers import memory_use
from .missing import placeholder


def _nothing(*_: object) -> None:
    return


def _used_bytes(*_: object) -> int:
    return memory_use(torch.device("cpu")).now_bytes


def _most_bytes(*_: object) -> int:
    return memory_use(torch.device("cpu")).peak_bytes


# functions of torch.cuda that torch.cpu does not have
_ON_CPU: dict[str, Callable[..., Any]] = {
    "empty_cache": _nothing,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "initial_seed": torch.initial_seed,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "max_memory_allocated": _most_bytes,
    "max_memory_reserved": _most_bytes,
    "memory_allocated": _used_bytes,
    "memory_reserved": _used_bytes,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "set_device": _nothing,
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}


@final
class Accelerator:
    """CUDA where there is a GPU, else the CPU. All other names are those of torch.cuda or torch.cpu."""

    def __init__(self) -> None:
        self._has_cuda = torch.cuda.is_available()
        self._name = "cuda" if self._has_cuda else "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", "cuda:1" or "cpu"."""
        if self._has_cuda and device_index is not None:
            return f"cuda:{device_index}"
        return self._name

    def current_device(self) -> int:
        """The index of this process's device."""
        return torch.cuda.current_device() if self._has_cuda else local_rank()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which the device is current; does nothing on a CPU."""
        return torch.cuda.device(device_index) if self._has_cuda else nullcontext()

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._has_cuda else 1

    def is_available(self) -> bool:
        """Always True: the CPU is a device too."""
        return True

    def is_synchronized_device(self) -> bool:
        return not self._has_cuda

    def communication_backend_name(self) -> str:
        """The backend for `init_distributed`: "nccl" or "gloo"."""
        return "nccl" if self._has_cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._has_cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which a model may be trained."""
        wide = [torch.float32, torch.float16]
        return [*wide, torch.bfloat16] if self.is_bf16_supported() else wide

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in page-locked memory where there is a GPU; else the tensor itself."""
        return tensor.pin_memory() if self._has_cuda else tensor

    def random(self) -> Any:
        return torch.random

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, or of the machine."""
        if self._has_cuda:
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        with open("/proc/meminfo") as lines:
            return int(next(lines).split()[1]) * 1024

    def range_push(self, message: str) -> None:
        """Begin a range in the profiler's timeline."""
        if self._has_cuda:
            torch.cuda.nvtx.range_push(message)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """End the current range."""
        if self._has_cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._has_cuda and name in _ON_CPU:
            return _ON_CPU[name]
        module = torch.cuda if self._has_cuda else torch.cpu
        if hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(
            f"get_accelerator().{name} is not covered by xds.deepspeed: neither xds nor torch.{self._name} has "
            "this name"
        )


def get_accelerator() -> Accelerator:
    """The type of device that the engine computes on."""
    return Accelerator()


__all__ = ["Accelerator", "get_accelerator"]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


# DeepSpeed has modules inside, which the table of names creates; not needed where this becomes a folder
__path__: list[str] = []
