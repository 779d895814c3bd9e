"""`CUDA_Accelerator`: the GPUs of this machine as DeepSpeed's scripts see them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..missing import placeholder
from .abstract_accelerator import DeepSpeedAccelerator
from .cpu_accelerator import TENSORS, other_name

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


class CUDA_Accelerator(DeepSpeedAccelerator):
    """NVIDIA's and AMD's GPUs. Names that are not here are those of torch.cuda."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return torch.cuda.device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_triton_supported(self) -> bool:
        return torch.cuda.get_device_capability() >= (8, 0)

    def _torch_pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=tensor.dtype, pin_memory=True)

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def __getattr__(self, name: str) -> Any:
        if name in TENSORS:
            return partial(torch.tensor, dtype=_DTYPES[name], device="cuda")
        return other_name(_OLD_NAMES.get(name, name), torch.cuda)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["CUDA_Accelerator"]
