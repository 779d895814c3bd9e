"""The op `decide`: whether a step is a plain one, and the factor of its gradients, without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from .define import define
from .square_sum import LEAST_SQUARE

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def decide_reference(table: Tensor, least_square: float, factor: float, limit: float) -> Tensor:
    """What the optimizer's kernels read, fp32 [4]: the factor, its inverse, is_not_plain, is_plain.

    A step is not plain, so that kernels change nothing, where the norm is not finite or a rank has something to
    say. The host sees the same numbers later and decides what happens then.

    Args:
        table: fp64 [world_size, 2], by rank: its part of the squared norm of the sums, in rank order; and
            what it says, not 0 if there is anything.
        least_square: a squared norm up to this must be computed again; see `is_in_range`.
        factor: what makes sums of gradients those of the loss.
        limit: of the norm of the gradients; 0 is none.
    """
    square = table[:, 0].cumsum(0)[-1]  # one after the other
    norm = square.sqrt() * factor
    clipped = limit / (norm + CLIP_EPS)
    clip = torch.where(norm > limit, clipped, 1.0) if limit else torch.ones_like(norm)
    scale = clip * factor
    is_plain = square.isfinite() & (square > least_square) & (table[:, 1].amax() == 0)
    plain = is_plain.to(torch.float64)
    return torch.stack([scale, 1.0 / scale, 1.0 - plain, plain]).to(torch.float32)


def _fake(table: Tensor, least_square: float, factor: float, limit: float) -> Tensor:
    return table.new_empty((4,), dtype=torch.float32)


define(
    "decide(Tensor table, float least_square, float factor, float limit) -> Tensor",
    decide_reference,
    _fake,
)


def decide(table: Tensor, numel: int, factor: float, limit: float) -> Tensor:
    """See `decide_reference`. numel: elements of all gradients, on the rank that has the most."""
    op = torch.ops.xds.decide.default  # `define` calls the reference for fp64 tensors
    found: Tensor = op(table, numel * LEAST_SQUARE, factor, limit)
    return found


__all__ = ["CLIP_EPS", "decide", "decide_reference"]
