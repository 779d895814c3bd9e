"""Finds tensors in arbitrary module outputs, and broadcasts tensors of any dtype and strides.

Torch's pytree supports only registered containers. A tensor in another container would get no hook, and
backward would use parameters that are not gathered. So `tensors_in` also looks into other objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...ops.comm.collectives import Collectives

_PLAIN = (type(None), str, bytes, int, float, complex, type, nn.Module)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in `value`, without the tensors inside modules and classes."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    seen: set[int] = set()  # an object may refer to itself
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting += _values(leaf)
    return found


def broadcast_whole(collectives: Collectives, tensor: Tensor) -> Tensor:
    """Rank 0's values of a tensor of any dtype and strides: in `tensor` itself, or in its replacement.

    Elements of an expanded tensor share memory, so it cannot be written. It is replaced if its values differ
    from rank 0's.
    """
    if collectives.world_size == 1 or not tensor.numel() or tensor.layout != torch.strided:
        return tensor
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    own = dense.clone() if dense is not tensor else dense
    collectives.broadcast(own.view(-1).view(torch.uint8))  # gloo does not support every dtype
    if own is tensor:
        return tensor
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return (
            tensor
            if own.view(-1).view(torch.uint8).equal(dense.view(-1).view(torch.uint8))
            else own
        )
    return tensor.copy_(own)


def values_of(scalars: Sequence[Tensor]) -> list[Any]:
    """The values of scalars on one device, with one synchronization."""
    return torch.stack(list(scalars)).tolist() if scalars else []


def _values(holder: Any) -> list[Any]:
    """The contents of a container that is not registered with pytree."""
    if isinstance(holder, Mapping):
        return list(holder.values())
    if isinstance(holder, list | tuple | set | frozenset):  # subclasses of them
        return list(holder)
    if is_dataclass(holder):  # with slots it has no __dict__
        return [getattr(holder, field.name, None) for field in fields(holder)]
    return list(getattr(holder, "__dict__", {}).values())
