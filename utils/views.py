"""Writing to tensors whose elements share memory: expanded ones, sliding windows.

torch.zeros(1).expand(4)      one element of memory, seen four times
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def holds(view: Tensor, values: Tensor) -> bool:
    """Whether `view` can become `values`: what shares memory there is the same here, bit for bit.

    Shapes:  both the same; both of one dtype. Memory: what `view` spans, where its elements may overlap.
    """
    if not may_overlap(view):
        return True
    span = 1 + sum((size - 1) * step for size, step in _dims(view))
    memory = torch.empty(span, dtype=view.dtype, device=view.device)
    trial = memory.as_strided(view.shape, view.stride())
    write(trial, values)
    return torch.equal(_bits(trial), _bits(values))


def write(view: Tensor, values: Tensor) -> None:
    """`view` becomes `values` of its shape, which it `holds`: each element of memory is written."""
    for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if step == 0 and size > 1:
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    view.copy_(values)


def may_overlap(view: Tensor) -> bool:
    """Whether two elements may be one in memory."""
    reach = 0  # of the dimensions with smaller steps, in elements of memory
    for size, step in sorted(_dims(view), key=lambda dim: dim[1]):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _dims(view: Tensor) -> Sequence[tuple[int, int]]:
    """Size and step of the dimensions that have more than one element; none where `view` is empty."""
    if not view.numel():
        return []
    return [(size, step) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
