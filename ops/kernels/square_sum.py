"""The op `square_sum`: a gradient's squared norm and whether it overflowed, in one read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .define import define

LEAST_SQUARE = 1e-30  # a mean below it is taken again, in fp64
EXACT_NUMEL = 1 << 20  # at a time: 8 MiB of fp64
ROW_NUMEL = 1 << 10  # of a norm: short enough that fp32 sums of squares keep seven digits


def square_sum_reference(flat: Tensor) -> Tensor:
    """Sum of squares of a contiguous 1-D tensor [n], fp32, bf16, fp16 or fp64, as a float64 scalar there.

    The order of the sum depends on n alone, never on where the buffer lies or what else is in the model.
    inf and nan in, inf or nan out. Partial sums of rows are taken in fp32 and added in fp64 (all in fp64 is
    four times slower), so squares that fp32 does not hold are inf or 0: see `is_in_range`. The CPU's kernel
    does the same, in another order; the GPU's adds all in fp64.
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


def is_in_range(square_norm: float, numel: int) -> bool:
    """No square of `numel` elements has overflowed fp32, and those that it loses at the low end do not count.

    Each loses at most 1.2e-38; a total of which these are less than 1e-7 is good.
    """
    return math.isfinite(square_norm) and square_norm > numel * LEAST_SQUARE


def exact_square_sum(flat: Tensor) -> Tensor:
    """The same for elements of any size, in fp64: for sums of which `is_in_range` says that they are not good.

    A total is inf or nan only where an element is.
    """
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(EXACT_NUMEL):  # type: ignore[no-untyped-call]
        total += piece.double().square().sum()  # not in place: it may be no copy
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
