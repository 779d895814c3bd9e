"""Arguments of checkpointed functions: told apart, put together, and detached from their graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....utils.errors import UsageError


def extract_tensors(all_objects: Sequence[Any]) -> tuple[Any, Any, Any]:
    """(tensors, other objects, whether each one is a tensor): tuples for a tuple, else lists."""
    flags = [isinstance(one, Tensor) for one in all_objects]
    tensors = [one for one in all_objects if isinstance(one, Tensor)]
    others = [one for one in all_objects if not isinstance(one, Tensor)]
    if type(all_objects) is tuple:
        return tuple(tensors), tuple(others), tuple(flags)
    return tensors, others, flags


def merge_tensors(
    tensor_objects: Sequence[Any], non_tensor_objects: Sequence[Any], tensor_flags: Sequence[bool]
) -> tuple[Any, ...]:
    """The opposite of `extract_tensors`."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors if is_tensor else others) for is_tensor in tensor_flags)


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """Tensors without their graph, which ask for gradients as before; other objects as they are.

    Raises:
        UsageError: `inputs` is no tuple.
    """
    if not isinstance(inputs, tuple):
        raise UsageError(f"detach_variable: inputs is a {type(inputs).__name__}; pass a tuple")

    def detached(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        moved = one if device is None else one.to(device=device)
        return moved.detach().requires_grad_(one.requires_grad)

    return tuple(detached(one) for one in inputs)


def is_activation_to_checkpoint(item: Any) -> bool:
    """A tensor of floats that the script has not marked with `no_checkpointing`."""
    is_float = isinstance(item, Tensor) and item.is_floating_point() and item.numel() > 0
    return is_float and not getattr(item, "no_checkpointing", False)


__all__ = ["detach_variable", "extract_tensors", "is_activation_to_checkpoint", "merge_tensors"]
