"""Tensors as scripts have them: inside whatever a module returns, and of any dtype and strides.

`tensors_in`: torch's pytree knows the containers that were registered with it. A tensor that it does not
see gets no hook, and then backward would meet parameters that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...ops.comm.collectives import Collectives

_PLAIN = (type(None), str, bytes, int, float, complex, type, nn.Module)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in `value`; modules and classes in it are not looked into."""
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
    """Rank 0's values of a tensor of any dtype and strides: `tensor` itself, or one that is to replace it.

    An expanded tensor has several elements in one place and cannot be written; it is replaced where it has
    other values than rank 0's.
    """
    if collectives.world_size == 1 or not tensor.numel() or tensor.layout != torch.strided:
        return tensor
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    own = dense.clone() if dense is not tensor else dense
    collectives.broadcast(own.view(-1).view(torch.uint8))  # gloo does not know every dtype
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


def _values(holder: Any) -> list[Any]:
    """What a container that pytree does not know holds."""
    if isinstance(holder, Mapping):
        return list(holder.values())
    if isinstance(holder, list | tuple | set | frozenset):  # of a class of their own
        return list(holder)
    if is_dataclass(holder):  # with slots it has no __dict__
        return [getattr(holder, field.name, None) for field in fields(holder)]
    return list(getattr(holder, "__dict__", {}).values())
