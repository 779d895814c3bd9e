"""`deepspeed.runtime.utils`: those of its functions that scripts call."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...engine.process.process import pick_device
from ...engine.telemetry.memory import memory_line
from ..missing import placeholder
from ..utils.logging import print_rank_0
from .memory import get_ma_status as get_ma_status
from .memory import memory_status as memory_status
from .memory import torch_max_memory_reserved as torch_max_memory_reserved
from .memory import torch_memory_reserved as torch_memory_reserved
from .norms import CheckOverflow as CheckOverflow
from .norms import clip_grad_norm_ as clip_grad_norm_
from .norms import clip_tensors_by_global_norm as clip_tensors_by_global_norm
from .norms import combine_grad_norm_groups as combine_grad_norm_groups
from .norms import get_flattened_grad_norm as get_flattened_grad_norm
from .norms import get_global_norm as get_global_norm
from .norms import get_global_norm_of_tensors as get_global_norm_of_tensors
from .norms import get_weight_norm as get_weight_norm
from .norms import has_inf_or_nan as has_inf_or_nan
from .norms import is_invalid_grad_norm as is_invalid_grad_norm
from .norms import is_model_parallel_parameter as is_model_parallel_parameter
from .partition import PartitionedTensor as PartitionedTensor
from .partition import partition_balanced as partition_balanced
from .partition import partition_uniform as partition_uniform
from .partition import prefix_sum_inc as prefix_sum_inc


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
        is_chosen = (
            isinstance(leaf, torch.Tensor) if criterion_func is None else criterion_func(leaf)
        )
        return leaf.to(device) if is_chosen else leaf

    return tree_map(moved, item)


copy_to_device = move_to_device  # the leaves are new wherever the device differs


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """`call_to_str("f", 1, b=2)` is "f(1, b=2)"."""
    shown = [repr(one) for one in args] + [f"{key}={one!r}" for key, one in kwargs.items()]
    return f"{base}({', '.join(shown)})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def noop_decorator(func: Any) -> Any:
    return func


@final
class DummyOptim:
    """Parameters as the one group of an optimizer that does nothing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """The parameters of stage 3 that this rank has only a part of."""
    from .zero.parameters import ZeroParamStatus  # not above: it imports this file

    return [
        one
        for one in param_list
        if hasattr(one, "ds_id") and one.ds_status == ZeroParamStatus.NOT_AVAILABLE
    ]


def align_dense_tensors(tensor_list: list[Tensor], alignment: int) -> list[Tensor]:
    """The tensors, and one of zeros that makes the sum of elements a multiple of `alignment`."""
    missing = -sum(one.numel() for one in tensor_list) % alignment
    if not missing:
        return tensor_list
    first = tensor_list[0]
    return [*tensor_list, torch.zeros(missing, device=first.device, dtype=first.dtype)]


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The item that all are.

    Raises:
        RuntimeError: they differ.
    """
    distinct = set(items)
    if len(distinct) != 1:
        raise RuntimeError(f"expected equal items, and got {sorted(map(str, distinct))}")
    return distinct.pop()


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Write `val` where `input` is not finite."""
    input.masked_fill_(~torch.isfinite(input), val)


def get_tensor_bytes(item: Any) -> int:
    """Bytes of all tensors in lists, tuples and dicts."""
    leaves = [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def empty_cache() -> None:
    """Return unused memory to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two lists or dicts of tensors have equal ones, compared where those of the second are."""
    one, two = tree_leaves(inputs1), tree_leaves(inputs2)
    if type(inputs1) is not type(inputs2) or len(one) != len(two):
        return False
    return all(
        torch.equal(a.to(b.device), b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else bool(a == b)
        for a, b in zip(one, two, strict=True)
    )


def check_internal_apis_for_count_used_parameters() -> bool:
    """Whether this torch can say which nodes a running backward will execute."""
    graph: Any = torch.autograd.graph
    inner: Any = torch._C
    known = ("_current_graph_task_id", "_will_engine_execute_node")
    return hasattr(graph, "_get_grad_fn_or_grad_acc") and all(hasattr(inner, one) for one in known)


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """How many of the parameters get a gradient in the backward that is running; call it in a hook.

    Raises:
        RuntimeError: no backward is running.
        AssertionError: this torch cannot say.
    """
    inner: Any = torch._C
    if not check_internal_apis_for_count_used_parameters():
        raise AssertionError("this torch cannot say which nodes a backward will execute")
    if inner._current_graph_task_id() == -1:
        raise RuntimeError(
            "count_used_parameters_in_backward must be called during backward execution: call it in a hook"
        )
    graph: Any = torch.autograd.graph
    with torch.enable_grad():  # a hook runs without, and then a leaf has no node
        tensors = [one for one in parameters if isinstance(one, Tensor) and one.requires_grad]
        nodes = {graph._get_grad_fn_or_grad_acc(one) for one in tensors}
    return sum(bool(inner._will_engine_execute_node(node)) for node in nodes - {None})


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
