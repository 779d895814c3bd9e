"""`DeepSpeedAccelerator`: what a type of device offers to scripts, with DeepSpeed's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..missing import placeholder


class DeepSpeedAccelerator(ABC):
    """The base of every type of device. A subclass for another device defines the abstract methods.

    _name: the device type of torch. _communication_backend_name: the backend of its process groups.
    """

    _name = ""
    _communication_backend_name = "gloo"
    _compile_backend = "inductor"

    @abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """Such as "cuda", "cuda:1" or "cpu"."""

    @abstractmethod
    def current_device(self) -> Any:
        """This process's device, in a form that torch takes as a device."""

    @abstractmethod
    def current_device_name(self) -> str:
        """The name of this process's device."""

    @abstractmethod
    def device_count(self) -> int:
        """The number of devices of this machine, one for each local rank."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether such a device can be used."""

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which the device is current."""
        return nullcontext()

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns."""
        return False

    def use_host_timers(self) -> bool:
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        return self.is_synchronized_device()

    def communication_backend_name(self) -> str:
        """The backend for `init_distributed`: "nccl" or "gloo"."""
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
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

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> Tensor:
        """The tensor in page-locked memory where the device reads that faster; else the tensor itself.

        Args:
            make_copy: with the same values; else a tensor whose values are not set.
            match_shape: False: [n] instead of the tensor's shape, where there is no copy.
        """
        if make_copy:
            return self._torch_pin_memory(tensor)
        shape = tuple(tensor.shape) if match_shape else (tensor.numel(),)
        return self._torch_empty_pinned(tensor, shape)

    def _torch_pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor

    def _torch_empty_pinned(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return tensor.new_empty(tuple(shape))

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

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def create_graph(self) -> Any:
        return None

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        return

    def export_envs(self) -> list[str]:
        """Beginnings of variables that a launcher copies to other machines."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Variables that select devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Select devices in an environment for another process."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set what `get_compile_backend` returns.

        Raises:
            ValueError: torch.compile has no such backend.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(
                f"set_compile_backend({backend!r}): torch.compile has no such backend; use one of {known}"
            )
        self._compile_backend = backend


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DeepSpeedAccelerator"]
