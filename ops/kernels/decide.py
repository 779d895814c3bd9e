"""The op `decide`: whether a step is a plain one, and the factor of its gradients, without the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..device import device_of, wide_place
from .define import define

# -- the op `square_sum`: a gradient's squared norm and whether it overflowed, in one read ---------------

LEAST_SQUARE = 1e-30  # a mean square below this is computed again in fp64
EXACT_NUMEL = 1 << 20  # elements per chunk: 8 MiB of fp64
ROW_NUMEL = 1 << 10  # elements per row: few enough that fp32 sums of squares keep seven digits


def square_sum_reference(flat: Tensor) -> Tensor:
    """Sum of squares of a contiguous 1-D tensor [n], fp32, bf16, fp16 or fp64, as a float64 scalar there.

    The order of the sum depends on n only, not on the buffer's address or on the rest of the model.
    inf or nan in the input gives inf or nan. Partial sums of rows are computed in fp32 and added in fp64 (all
    in fp64 is four times slower), so squares outside of fp32's range are inf or 0: see `is_in_range`. The CPU
    kernel does the same in another order; the GPU kernel adds all in fp64.
    A device without fp64 runs `square_sum_without_fp64`.
    """
    if not device_of(flat.device).has_fp64:
        return square_sum_without_fp64(flat)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    rows = flat.numel() // ROW_NUMEL
    head = flat[: rows * ROW_NUMEL].view(rows, ROW_NUMEL)
    tail = flat[rows * ROW_NUMEL :]
    total: Tensor = torch.linalg.vector_norm(tail).double().square()
    if rows:
        total += torch.linalg.vector_norm(head, dim=1).double().square().sum()
    return total


def square_sum_without_fp64(flat: Tensor) -> Tensor:
    """The same for elements of any magnitude, where the device has no fp64: a scalar on the host.

    Each row is divided by its largest size, so squares are at most 1, and fp32 adds them. The host scales sums
    of rows back and adds them in fp64; it waits for the device once. The relative error is below 1e-6.
    """
    parts = []
    for piece in flat.split(EXACT_NUMEL):  # type: ignore[no-untyped-call]
        rows = -(-piece.numel() // ROW_NUMEL)
        block = piece.new_zeros(rows * ROW_NUMEL, dtype=torch.float32)
        block[: piece.numel()].copy_(piece)
        block = block.view(rows, ROW_NUMEL)
        size = block.abs().amax(1)
        size = torch.where(size.isfinite() & (size > 0), size, 1.0)
        parts.append(torch.stack([size, (block / size.unsqueeze(1)).square_().sum(1)]))
    sizes, sums = torch.cat([*parts, flat.new_zeros(2, 0, dtype=torch.float32)], 1).cpu().double()
    total: Tensor = (sizes.square() * sums).sum()
    return total


def is_in_range(square_norm: float, numel: int) -> bool:
    """Whether no square of `numel` elements overflowed fp32, and the underflow is negligible.

    Each element loses at most 1.2e-38. The total is accurate where these losses are less than 1e-7 of it.
    """
    return math.isfinite(square_norm) and square_norm > numel * LEAST_SQUARE


def exact_square_sum(flat: Tensor, param_dtype: torch.dtype | None = None) -> Tensor:
    """The same for elements of any magnitude, in fp64: for sums that are not `is_in_range`.

    The total is inf or nan only where an element is.
    """
    if not device_of(flat.device).has_fp64:
        return square_sum_without_fp64(flat)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(EXACT_NUMEL):  # type: ignore[no-untyped-call]
        # not in place: `double` may return the tensor itself
        total += piece.double().square().sum()
    return total


def _fake_sum(flat: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=wide_place(flat.device))


_square_sum = define("square_sum(Tensor flat) -> Tensor", square_sum_reference, _fake_sum)


def square_sum(flat: Tensor, param_dtype: torch.dtype | None = None) -> Tensor:
    """The function that the engine calls: see `square_sum_reference`.

    For gradients of 16-bit parameters it calls the op, else the reference, which is at memory speed too.
    So a run in fp32 has the same bits whether or not the process has loaded kernels. The result does not
    depend on the dtype of `flat`: a value in 16 bits and in fp32 gives the same bits.
    param_dtype: of the parameters; None takes `flat`'s.
    """
    is_narrow = (param_dtype or flat.dtype) in (torch.float16, torch.bfloat16)
    total: Tensor = (_square_sum if is_narrow else square_sum_reference)(flat)
    return total


CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def decide_reference(table: Tensor, least_square: float, factor: float, limit: float) -> Tensor:
    """What the optimizer's kernels read, fp32 [4]: the factor, its inverse, is_not_plain, is_plain.

    A step is not plain, so that kernels change nothing, where the norm is not finite or a rank has something to
    say. The host sees the same numbers later and decides what happens then.

    Args:
        table: fp64 [world_size, 4], by rank: its part of the squared norm of the sums, in rank order; what it
            says, not 0 if there is anything; the sum of its weights, or -1 without weights; what it reports.
        least_square: a squared norm up to this must be computed again; see `is_in_range`.
        factor: what makes sums of gradients those of the loss; with weights their total divides it.
        limit: of the norm of the gradients; 0 is none.
    """
    square = table[:, 0].cumsum(0)[-1]  # one after the other
    weights = table[:, 2]
    total = weights.cumsum(0)[-1]
    mean = factor / torch.where(total > 0, total, 1.0)
    norm = square.sqrt() * mean
    clipped = limit / (norm + CLIP_EPS)
    clip = torch.where(norm > limit, clipped, 1.0) if limit else torch.ones_like(norm)
    scale = clip * mean
    is_mixed = (weights.amin() < 0) & (weights.amax() > 0)
    is_plain = square.isfinite() & (square > least_square) & (table[:, 1].amax() == 0) & ~is_mixed
    plain = is_plain.to(torch.float64)
    return torch.stack([scale, 1.0 / scale, 1.0 - plain, plain]).to(torch.float32)


def _fake_decision(table: Tensor, least_square: float, factor: float, limit: float) -> Tensor:
    return table.new_empty((4,), dtype=torch.float32)


define(
    "decide(Tensor table, float least_square, float factor, float limit) -> Tensor",
    decide_reference,
    _fake_decision,
)


def decide(table: Tensor, numel: int, factor: float, limit: float) -> Tensor:
    """See `decide_reference`. numel: elements of all gradients, on the rank that has the most."""
    op = torch.ops.xds.decide.default  # `define` calls the reference for fp64 tensors
    found: Tensor = op(table, numel * LEAST_SQUARE, factor, limit)
    return found


__all__ = ["CLIP_EPS", "decide", "decide_reference"]
