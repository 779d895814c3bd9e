"""Writes to tensors whose elements share memory: expanded tensors and sliding windows.

torch.zeros(1).expand(4)      four elements that share one element of memory
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def holds(view: Tensor, values: Tensor) -> bool:
    """Whether `view` can hold `values`: elements that share memory have equal bits in `values`.

    Shapes:  both the same, with the same dtype.
    Memory:  as much as `view` spans, where its elements may overlap.
    """
    if not may_overlap(view):
        return True
    span = 1 + sum((size - 1) * step for size, step in _dims(view))
    memory = torch.empty(span, dtype=view.dtype, device=view.device)
    trial = memory.as_strided(view.shape, view.stride())
    write(trial, values)
    return torch.equal(_bits(trial), _bits(values))


def write(view: Tensor, values: Tensor) -> None:
    """Write `values` to `view`, of the same shape, which it `holds`. Writes each element of memory."""
    for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if step == 0 and size > 1:
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    view.copy_(values)


def may_overlap(view: Tensor) -> bool:
    """Whether two elements may share memory."""
    reach = 0  # span of the dimensions with smaller steps, in elements of memory
    for size, step in sorted(_dims(view), key=lambda dim: dim[1]):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _dims(view: Tensor) -> Sequence[tuple[int, int]]:
    """Size and step of each dimension with more than one element; [] where `view` is empty."""
    if not view.numel():
        return []
    return [(size, step) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
