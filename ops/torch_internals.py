"""The names of torch without a public place, in one file: `tests/ops/test_torch_internals.py` checks each one.

A new version of torch may move or change them. No other file of xds imports a private name of torch, and
`torch._dynamo` is only used where it is loaded already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction as NoTorchFunction
from torch._C import DisableTorchFunctionSubclass as NoTorchFunctionSubclass
from torch._compile import _disable_dynamo as outside_of_graphs
from torch._ops import HigherOrderOperator
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

# the number of the backward that runs in this thread, also of a nested one; NO_BACKWARD if none does
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1

# whether a transform of torch.func, such as vmap, is active
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def outside_of_functorch() -> AbstractContextManager[Any]:
    """Inside, no transform of torch.func is active."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# the attribute of a module that `module(...)` calls; one of the instance comes before the class's
CALL = "_call_impl"


def in_backward() -> bool:
    """A backward runs in this thread, such as that of a recomputation."""
    return graph_task_id() != NO_BACKWARD


def will_execute(node: Node) -> bool:
    """The running backward will reach `node`. Call only inside of a backward.

    Raises RuntimeError: torch.autograd.grad computes some of the gradients.
    """
    return torch._C._will_engine_execute_node(node)


def after_backward(call: Callable[[], None]) -> None:
    """Let the running backward call `call` at its end: the innermost one, if it is nested."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class AroundCall(NamedTuple):
    """A non-reentrant checkpoint that runs. recomputation: which one in backward; None: it is the forward."""

    checkpoint: Any
    recomputation: Any


def checkpoints() -> list[AroundCall]:
    """The non-reentrant checkpoints in which the present code runs, the innermost one last."""
    hooks = torch._C._autograd
    pairs: list[tuple[Any, Any]] = []
    try:
        while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
            pairs.insert(0, pair)
            hooks._pop_saved_tensors_default_hooks()
    finally:
        for pair in pairs:
            hooks._push_saved_tensors_default_hooks(*pair)
    found = [_checkpoint_of(pack) for pack, _ in pairs]
    return [around for around in found if around is not None]


def _checkpoint_of(pack: Any) -> AroundCall | None:
    function = inspect.unwrap(pack)
    if getattr(function, "__module__", "") != "torch.utils.checkpoint":
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "frame" in cells:
        return AroundCall(cells["frame"].cell_contents, None)
    if "target_frame_ref" not in cells:
        return None
    return AroundCall(cells["target_frame_ref"].cell_contents(), pack)


def exchange_inner(wrapper: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Let `wrapper`, a function of `torch.nn.utils.clip_grad`, call `inner` from now on.

    These functions are wrappers that call another one without gradients. So what user code has imported already
    changes too. Returns what it has called before.
    """
    function: Any = wrapper
    cell = function.__closure__[function.__code__.co_freevars.index("func")]
    before: Callable[..., Any] = cell.cell_contents
    cell.cell_contents = inner
    return before


def num_users(tensor: Tensor) -> int:
    """Tensors that have the memory of `tensor`, itself among them, also those of numpy arrays and of graphs."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def set_values(tensor: Tensor, values: Tensor) -> None:
    """Let `tensor`, a leaf, have the memory of `values`, which may be of another device.

    torch's `tensor.data = values` refuses devices that register themselves (PrivateUse1), as Ascend's do.
    """
    if torch._has_compatible_shallow_copy_type(tensor, values):
        tensor.data = values
    else:
        torch._C._swap_tensor_impl(tensor, values.detach().requires_grad_(tensor.requires_grad))


def open_fake_group(rank: int, world_size: int) -> None:
    """Open the default process group with a backend that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def open_group_beside(
    store: Any, name: str, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Open a group of gloo with processes that are not all in the default group. For all of its ranks.

    Raises RuntimeError: they have not met within `timeout`.
    """
    made: dist.ProcessGroup
    given: Any = name  # torch has a type of its own for names
    made, _ = dist.distributed_c10d._new_process_group_helper(
        world_size, rank, [], dist.Backend("gloo"), store, group_name=given, timeout=timeout
    )
    dist.distributed_c10d._world.pg_group_ranks[made] = {each: each for each in range(world_size)}
    return made


__all__ = [
    "CALL",
    "AroundCall",
    "NO_BACKWARD",
    "HigherOrderOperator",
    "NoTorchFunction",
    "NoTorchFunctionSubclass",
    "TorchDispatchMode",
    "TreeSpec",
    "after_backward",
    "checkpoints",
    "exchange_inner",
    "graph_task_id",
    "in_backward",
    "in_functorch",
    "num_users",
    "open_fake_group",
    "open_group_beside",
    "outside_of_functorch",
    "outside_of_graphs",
    "set_values",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "will_execute",
]
