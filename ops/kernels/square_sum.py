"""The op `square_sum`: a gradient's squared norm and whether it overflowed, in one read."""

from __future__ import annotations

import torch
from torch import Tensor

from .define import define

ROW_NUMEL = 1 << 10  # of a norm: short enough that fp32 sums of squares keep seven digits


def square_sum_reference(flat: Tensor) -> Tensor:
    """Sum of squares of a contiguous 1-D tensor [n], fp32, bf16, fp16 or fp64, as a float64 scalar there.

    The order of the sum depends on n alone, never on where the buffer lies or what else is in the model.
    inf and nan in, inf or nan out. Partial sums of rows are taken in fp32 and added in fp64 (all in fp64 is
    four times slower); the kernels do the same, in another order.
    """
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    rows = flat.numel() // ROW_NUMEL
    head = flat[: rows * ROW_NUMEL].view(rows, ROW_NUMEL)
    tail = flat[rows * ROW_NUMEL :]
    total: Tensor = torch.linalg.vector_norm(tail).double().square()
    if rows:
        total += torch.linalg.vector_norm(head, dim=1).double().square().sum()
    return total


def _fake(flat: Tensor) -> Tensor:
    return flat.new_empty((), dtype=torch.float64)


_square_sum = define("square_sum(Tensor flat) -> Tensor", square_sum_reference, _fake)


def square_sum(flat: Tensor) -> Tensor:
    """What the engine calls: see `square_sum_reference`.

    Of 16-bit gradients it is the op. Of wider ones it is the reference, which is at memory speed as well: so
    a run in fp32 has the same bits whether or not something in the process has loaded kernels.
    """
    is_narrow = flat.dtype in (torch.float16, torch.bfloat16)
    found: Tensor = (_square_sum if is_narrow else square_sum_reference)(flat)
    return found
