"""`get_accelerator`: the type of device that this process uses, with the methods of DeepSpeed's class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ....ops.device import CHOICE, KINDS, Device, device_of, device_type, kind_of
from ....utils.errors import UsageError
from ..errors import raises_theirs

DEFAULT_RANKS = 2  # what `xds` starts on a machine without a GPU

_DTYPES = {  # scripts call `get_accelerator().FloatTensor([0])`
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def _nothing(*_: object) -> None:
    return


# names of torch.cuda, for devices whose module does not have them
_INSTEAD: Mapping[str, Callable[..., Any] | None] = {
    "Event": None,
    "Stream": None,
    "current_stream": _nothing,
    "default_stream": _nothing,
    "set_device": _nothing,
    "stream": lambda *_: nullcontext(),
}


class _Device:
    """What all types of device have. _name: the device type of torch."""

    _name = ""
    _compile_backend = "inductor"

    def _of(self, device_index: Any = None) -> Device:
        """The device of this process, by default the current one. device_index: or a torch.device."""
        if device_index is None:
            return device_of(torch.device(self._name))
        is_number = isinstance(device_index, int)
        return device_of(
            torch.device(self._name, device_index) if is_number else torch.device(device_index)
        )

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns."""
        return not kind_of(self._name).runs_ahead

    def use_host_timers(self) -> bool:
        """Whether a time is measured by the host: there are no events."""
        return not kind_of(self._name).has_streams

    def resolves_data_dependency(self) -> bool:
        """Whether the device itself orders operations on the same bytes, of any stream."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether the host may start any number of operations."""
        return self.is_synchronized_device()

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

    def export_envs(self) -> list[str]:
        """The first letters of variables that other machines get."""
        own = kind_of(self._name)
        backend = [] if own.backend == "gloo" else [own.backend.upper()]
        return sorted({*backend, *(prefix.rstrip("_") for prefix in own.prefixes)})

    # -- dtypes ------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which a model may be trained."""
        dtypes = [torch.float32]
        dtypes += [torch.float16] if self.is_fp16_supported() else []
        return [*dtypes, torch.bfloat16] if self.is_bf16_supported() else dtypes

    def is_triton_supported(self) -> bool:
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """False: products of experts are torch's."""
        return False

    # -- tensors -----------------------------------------------------------------------------------------

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on this type of device."""
        return tensor.device.type == self._name

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> Tensor:
        """The tensor in page-locked memory where the device reads that faster; else the tensor itself."""
        return tensor.pin_memory() if kind_of(self._name).pins_memory else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return kind_of(self._name).pins_memory and tensor.is_pinned()

    def unpin_memory(self, tensor: Tensor) -> None:
        """Nothing: torch unlocks the memory when the tensor is freed."""

    # -- random numbers ----------------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return self._of(device_index).generator

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return self._of(device_index).generator.get_state()

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        self._of(device_index).generator.set_state(new_state.cpu())

    def manual_seed(self, seed: int) -> Any:
        return self._of().generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return self._of().generator.initial_seed()

    # -- time --------------------------------------------------------------------------------------------

    def synchronize(self, device_index: Any = None) -> None:
        self._of(device_index).synchronize()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it: the device is there."""
        return callback()

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range in the profiler's timeline."""
        return None

    def range_pop(self, domain: str | None = None) -> Any:
        """End the current range."""
        return None

    # -- memory ------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self._of().empty_cache()

    def memory_allocated(self, device_index: Any = None) -> int:
        """Bytes, as the others; of the process where the device reports none."""
        return self._of(device_index).memory().now_bytes

    def max_memory_allocated(self, device_index: Any = None) -> int:
        return self._of(device_index).memory().peak_bytes

    def memory_reserved(self, device_index: Any = None) -> int:
        return self._of(device_index).memory().kept_bytes

    def max_memory_reserved(self, device_index: Any = None) -> int:
        return self._of(device_index).memory().peak_kept_bytes

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        self._of(device_index).reset_peak_memory()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: Any = None) -> Mapping[str, Any]:
        found = self._of(device_index).memory()
        return {
            "allocated_bytes.all.current": found.now_bytes,
            "allocated_bytes.all.peak": found.peak_bytes,
            "reserved_bytes.all.current": found.kept_bytes,
            "reserved_bytes.all.peak": found.peak_kept_bytes,
        }

    # -- graphs, compilers and ops -------------------------------------------------------------------------

    def create_graph(self) -> Any:
        """A graph of the device, such as torch.cuda.CUDAGraph; None where it has none."""
        return None

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """What is called in this context is recorded, where there is a graph; else it runs."""
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    def get_compile_backend(self) -> str:
        return self._compile_backend

    @raises_theirs
    def set_compile_backend(self, backend: str) -> None:
        """
        Raises:
            UsageError: torch has no such backend.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise UsageError(
                f"set_compile_backend: {backend!r} is not supported by {self._name}: must be one of "
                f"{', '.join(known)}"
            )
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The class of that name, such as "FusedAdamBuilder"; None: xds has none."""
        from .ops import ALL_OPS

        kinds = {type(builder).__name__: type(builder) for builder in ALL_OPS.values()}
        return kinds.get(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension


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

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the machine."""
        return _meminfo("MemTotal")

    def available_memory(self, device_index: int | None = None) -> int:
        return _meminfo("MemAvailable")

    def __getattr__(self, name: str) -> Any:
        if name in _DTYPES:
            return getattr(torch, name)
        if name in _INSTEAD and name not in ("Event", "Stream"):
            return _INSTEAD[name]
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


class Accelerator(_Device):
    """A device of torch.accelerator. Names that are not here are those of its module, such as torch.cuda."""

    def __init__(self, name: str = "") -> None:
        self._name = name or self._name
        self._module: Any = getattr(torch, self._name)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        return int(getattr(self._module, "current_device", int)())

    def current_device_name(self) -> str:
        return f"{self._name}:{self.current_device()}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = getattr(self._module, "device", nullcontext)(
            device_index
        )
        return context

    def device_count(self) -> int:
        return int(self._module.device_count())

    def is_available(self) -> bool:
        return bool(self._module.is_available())

    def memory_stats(self, device_index: Any = None) -> Mapping[str, Any]:
        find = getattr(self._module, "memory_stats", super().memory_stats)
        found: Mapping[str, Any] = find(device_index)
        return found

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._module.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self._module.mem_get_info(device_index)[0])

    def is_bf16_supported(self) -> bool:
        return bool(getattr(self._module, "is_bf16_supported", lambda: True)())

    def create_graph(self) -> Any:
        kind = getattr(self._module, f"{self._name.upper()}Graph", None)  # CUDAGraph, XPUGraph
        return None if kind is None else kind()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        if graph is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.graph(graph, pool, stream)
        return context

    def __getattr__(self, name: str) -> Any:
        if name in _DTYPES:
            return partial(torch.tensor, dtype=_DTYPES[name], device=self._name)
        if name in _INSTEAD and not hasattr(self._module, name):
            if name == "default_stream" and hasattr(self._module, "current_stream"):
                return self._module.current_stream  # torch.xpu
            return _INSTEAD[name]
        return other_name(name, self._module)


class CUDA_Accelerator(Accelerator):
    """NVIDIA's and AMD's GPUs."""

    _name = "cuda"

    def is_triton_supported(self) -> bool:
        return self.is_available() and torch.cuda.get_device_capability() >= (8, 0)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class XPU_Accelerator(Accelerator):
    """Intel's GPUs."""

    _name = "xpu"


class NPU_Accelerator(Accelerator):
    """Ascend's NPUs, by torch_npu."""

    _name = "npu"


class MPS_Accelerator(Accelerator):
    """Apple's GPUs, which share the memory of the CPU."""

    _name = "mps"

    def memory_allocated(self, device_index: Any = None) -> int:
        return int(self._module.current_allocated_memory())

    def memory_reserved(self, device_index: Any = None) -> int:
        return int(self._module.driver_allocated_memory())

    max_memory_allocated = max_memory_reserved = memory_cached = max_memory_cached = memory_reserved

    def total_memory(self, device_index: Any = None) -> int:
        return int(self._module.recommended_max_memory())

    def available_memory(self, device_index: Any = None) -> int:
        return self.total_memory() - self.memory_reserved()


class HPU_Accelerator(Accelerator):
    """Gaudi, by habana_frameworks."""

    _name = "hpu"
    _compile_backend = "hpu_backend"

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def total_memory(self, device_index: Any = None) -> int:
        return int(self.memory_stats(device_index)["Limit"])

    def available_memory(self, device_index: Any = None) -> int:
        return self.total_memory(device_index) - self.memory_allocated(device_index)


class MLU_Accelerator(Accelerator):
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
    asked = os.environ.get(CHOICE)
    name = asked or device_type()
    kind = _CLASSES.get(name)
    if (
        kind is None
        and asked
        and asked != getattr(torch.accelerator.current_accelerator(), "type", "")
    ):
        raise UsageError(
            f"{CHOICE} = {name!r}: must be one of {', '.join(_CLASSES)}; correct it, or unset it"
        )
    if kind is None:
        return Accelerator(name)  # a device that has registered itself with torch
    if not hasattr(torch, kind._name):
        raise UsageError(
            f"{CHOICE} = {name!r}: this torch has no such device; install {KINDS[name].package}, or unset it"
        )
    return kind()
