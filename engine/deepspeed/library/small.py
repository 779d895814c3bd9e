"""Small functions and classes of DeepSpeed that scripts use: of its folders runtime, utils, and others."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.data import DataLoader as DeepSpeedDataLoader

from ....ops.device import device_type
from ....ops.torch_internals import tree_map
from ....utils.errors import UsageError
from ....utils.version import __version__
from ...process.process import pick_device
from ...telemetry.memory import memory_line
from ..names import VERSION as version
from .accelerator import get_accelerator
from .log import print_rank_0
from .ops import COMPATIBLE_OPS

Function = TypeVar("Function", bound=Callable[..., Any])
Group = dict[str, Any]

# -- deepspeed.git_version_info, deepspeed.env_report -----------------------------------------------------

git_hash = git_branch = "unknown"
installed_ops = dict.fromkeys(COMPATIBLE_OPS, False)  # none of DeepSpeed's libraries is installed
accelerator_name = device_type()
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}


def env_report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print which ops of DeepSpeed have a counterpart here, and the versions of torch and xds."""
    if not hide_operator_status:
        for name, works in COMPATIBLE_OPS.items():
            print(f"{name} {'.' * max(1, 34 - len(name))} {'[OKAY]' if works else '[NO]'}")
    print(
        f"deepspeed info: {version}; xds {__version__} stands in for it, in {os.path.dirname(__file__)}"
    )
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; `xds env` prints more")


# -- deepspeed.runtime.utils ------------------------------------------------------------------------------


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, log on rank 0: memory of its device in use (MA) and kept (CA), peaks, the host's memory."""
    if force:
        gc.collect()
        print_rank_0(memory_line(message, pick_device()))


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """`item` with its tensors on `device`; of those alone for which `criterion_func` is true, if given."""

    def moved(leaf: Any) -> Any:
        is_chosen = isinstance(leaf, Tensor) if criterion_func is None else criterion_func(leaf)
        return leaf.to(device) if is_chosen else leaf

    return tree_map(moved, item)


def is_model_parallel_parameter(p: Any) -> bool:
    """The parameter is marked as cut over model-parallel ranks."""
    return any(
        bool(getattr(p, name, False)) for name in ("model_parallel", "tensor_model_parallel")
    )


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Borders of `num_parts` parts of equal length, `num_parts` + 1 numbers; the first parts take the rest."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    length, rest = divmod(num_items, num_parts)
    return [part * length + min(part, rest) for part in range(num_parts + 1)]


@final
class PartitionedTensor:
    """A rank's part of a flattened tensor that all ranks of a group have whole.

    Args:
        tensor: the whole tensor, equal on every rank.
        group: the ranks that get a part each.
    """

    def __init__(
        self, tensor: Tensor, group: dist.ProcessGroup, partition_meta: Any = None
    ) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.orig_size = list(tensor.size())
        self.orig_device: Any = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: dist.ProcessGroup, device: Any = None
    ) -> PartitionedTensor:
        """The part that `to_meta` and `data` describe.

        Raises:
            UsageError: it is that of another rank, or another number of ranks.
        """
        num_dims, *rest = meta.tolist()
        size, (num_parts, rank) = rest[:num_dims], rest[num_dims:][:2]
        made = cls(local_part.new_empty(0), group)
        if (num_parts, rank) != (made.num_parts, made.rank):
            raise UsageError(
                f"PartitionedTensor.from_meta: the part is that of rank {rank} of {num_parts}, and this is "
                f"rank {made.rank} of {made.num_parts}"
            )
        made.orig_size, made.partition = size, rest[num_dims + 2 :]
        made.orig_device = local_part.device if device is None else device
        made.local_data = local_part.detach()
        return made

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor, from the parts of all ranks. A collective: sends every part to every rank."""
        lengths = [end - start for start, end in pairwise(self.partition)]
        padded = self.local_data.new_zeros(max(lengths))
        padded[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        """int64: number of dimensions, sizes, number of parts, rank, borders."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


# -- deepspeed.runtime.checkpoint_engine ------------------------------------------------------------------


@final
class TorchCheckpointEngine:
    """`torch.save` and `torch.load`, for scripts that save files with it. `engine.save_checkpoint` does not."""

    def __init__(self, config_params: Any = None) -> None:
        self.name = "TorchCheckpointEngine"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def create(self, info: Any) -> None:
        """Does nothing."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Tensors and plain values; a file with other objects in it is refused, because loading runs code."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        return True


# -- deepspeed.utils, deepspeed.OnDevice ------------------------------------------------------------------


def instrument_w_nvtx(func: Function) -> Function:
    """A decorator: each call is a range with the function's name. Inside torch.compile there is no range."""

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return func(*args, **kwargs)
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return call  # type: ignore[return-value]


@final
class OnDevice:
    """A context in which new tensors of floating point have `dtype`, and all new tensors are on `device`.

    Args:
        dtype: of parameters; None is torch's default.
        device: "meta" allocates nothing; `zero.Init`, `xds.zero.load_weights` and `initialize` fill it later.
        enabled: False: the context does nothing.
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            before = torch.get_default_dtype()
            self._stack.callback(torch.set_default_dtype, before)
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            self._stack.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The module of this dotted name."""
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Let the dotted name `module_name` of the model be `module`."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


__all__ = ["DeepSpeedDataLoader"]
