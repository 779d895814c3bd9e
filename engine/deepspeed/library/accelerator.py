"""`get_accelerator`: the type of device that this process uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ....ops.device import CHOICE, KINDS, device_of, device_type, kind_of, process_memory
from ....utils.errors import UsageError
from ..errors import raises_theirs


class _Device:
    """What all types of device have. _name: the device type of torch."""

    _name = ""

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns."""
        return False

    def communication_backend_name(self) -> str:
        """The backend for `init_distributed`, such as "nccl" or "gloo"."""
        return kind_of(self._name).backend

    def visible_devices_envs(self) -> list[str]:
        """The variables with the numbers of the devices that a process sees."""
        return [variable] if (variable := kind_of(self._name).visible) else []

    def set_visible_devices_envs(self, current_env: Any, local_accelerator_ids: Any) -> None:
        """Set them in an environment."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which a model may be trained."""
        dtypes = [torch.float32]
        dtypes += [torch.float16] if self.is_fp16_supported() else []
        return [*dtypes, torch.bfloat16] if self.is_bf16_supported() else dtypes

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on this type of device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: Tensor, **unused: Any) -> Tensor:
        """The tensor in page-locked memory where the device reads that faster; else the tensor itself."""
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return torch.default_generator

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range in the profiler's timeline."""
        return None

    def range_pop(self, domain: str | None = None) -> Any:
        """End the current range."""
        return None


DEFAULT_RANKS = 2  # what `xds` starts on a machine without a GPU

# names of tensor types that scripts call: `get_accelerator().FloatTensor([0])`
TENSORS = (
    *("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor"),
    "LongTensor",
)


def _nothing(*_: object) -> None:
    return


def _used_bytes(*_: object) -> int:
    return process_memory().now_bytes


def _most_bytes(*_: object) -> int:
    return process_memory().peak_bytes


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


class CPU_Accelerator(_Device):
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


_OLD_NAMES = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved"}
_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class _Accelerator(_Device):
    """A device of torch.accelerator. Names that are not here are those of its module, such as torch.cuda."""

    def __init__(self) -> None:
        self._module: Any = getattr(torch, self._name)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        return int(getattr(self._module, "current_device", int)())

    def current_device_name(self) -> str:
        return f"{self._name}:{self.current_device()}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.device(device_index)
        return context

    def device_count(self) -> int:
        return int(self._module.device_count())

    def is_available(self) -> bool:
        return bool(self._module.is_available())

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._module.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self._module.mem_get_info(device_index)[0])

    def is_bf16_supported(self) -> bool:
        return bool(getattr(self._module, "is_bf16_supported", lambda: True)())

    def pin_memory(self, tensor: Tensor, **unused: Any) -> Tensor:
        return tensor.pin_memory() if kind_of(self._name).pins_memory else tensor

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return device_of(torch.device(self._name, device_index)).generator

    def __getattr__(self, name: str) -> Any:
        if name in TENSORS:
            return partial(torch.tensor, dtype=_DTYPES[name], device=self._name)
        return other_name(_OLD_NAMES.get(name, name), self._module)


class CUDA_Accelerator(_Accelerator):
    """NVIDIA's and AMD's GPUs."""

    _name = "cuda"

    def is_triton_supported(self) -> bool:
        return torch.cuda.get_device_capability() >= (8, 0)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class XPU_Accelerator(_Accelerator):
    """Intel's GPUs."""

    _name = "xpu"


class NPU_Accelerator(_Accelerator):
    """Ascend's NPUs, by torch_npu."""

    _name = "npu"


class MPS_Accelerator(_Accelerator):
    """Apple's GPUs."""

    _name = "mps"


class HPU_Accelerator(_Accelerator):
    """Gaudi, by habana_frameworks."""

    _name = "hpu"


class MLU_Accelerator(_Accelerator):
    """Cambricon's MLUs, by torch_mlu."""

    _name = "mlu"


_CLASSES: dict[str, type[_Device]] = {
    "cpu": CPU_Accelerator,
    "cuda": CUDA_Accelerator,
    "rocm": CUDA_Accelerator,
    "xpu": XPU_Accelerator,
    "npu": NPU_Accelerator,
    "mps": MPS_Accelerator,
    "hpu": HPU_Accelerator,
    "mlu": MLU_Accelerator,
}


@raises_theirs
@cache
def get_accelerator() -> Any:
    """That of the variable DS_ACCELERATOR; else of torch's accelerator, and the CPU where there is none.

    Raises:
        UsageError: DS_ACCELERATOR names a device that this torch does not know.
    """
    name = os.environ.get(CHOICE) or device_type()
    if name not in _CLASSES:
        raise UsageError(
            f"{CHOICE} = {name!r}: must be one of {', '.join(_CLASSES)}; correct it, or unset it"
        )
    kind = _CLASSES[name]
    if not hasattr(torch, kind._name):
        raise UsageError(
            f"{CHOICE} = {name!r}: this torch has no such device; install {KINDS[name].package}, or unset it"
        )
    return kind()
