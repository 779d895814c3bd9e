"""The ops of LAMB: `lamb_direction_` computes the direction and norms, `lamb_apply_` applies the rates.

Source: You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2,
https://arxiv.org/abs/1904.00962. Between the two ops, the norms are summed over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .adam import corrections
from .define import define, scaled, skips


def lamb_direction_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    direction: Tensor,
    square_norms: Tensor,
    bounds: Tensor,
    step: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> None:
    """Adam's direction plus decay, and the squared norms of it and of the parameters.

    Args:
        direction: [n] fp32, written; may be `grad`'s memory.
        square_norms: [k, 2] fp64, written: those of `param` and of `direction` in each of k parts.
        bounds: [k + 1] int64: part i is [bounds[i], bounds[i + 1]). Elements outside are in no sum.
        others: see `adam_reference`.
    """
    if skips(found_inf):
        return
    first, second = corrections(step, beta1, beta2, applies=bias_correction)
    wide = scaled(grad, scale, param)
    mean = exp_avg.to(param.dtype).lerp_(wide, 1 - beta1)
    square = exp_avg_sq.to(param.dtype).mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    torch.div(mean, square.sqrt().div_(second**0.5).add_(eps), out=wide)
    direction.copy_(wide.div_(first).add_(param, alpha=weight_decay))
    for row, (begin, end) in enumerate(_parts(bounds)):
        square_norms[row, 0] = param[begin:end].double().square().sum()
        square_norms[row, 1] = direction[begin:end].double().square().sum()


def lamb_apply_reference(
    param: Tensor,
    direction: Tensor,
    out: Tensor | None,
    bounds: Tensor,
    rates: Tensor,
    found_inf: Tensor | None,
) -> None:
    """param -= rate * direction, with a separate rate for each part.

    Args:
        rates: [k] fp32, the learning rate times the trust ratio.
        others: see `lamb_direction_reference`.
    """
    if skips(found_inf):
        return
    for (begin, end), rate in zip(_parts(bounds), rates.tolist(), strict=True):
        param[begin:end].add_(direction[begin:end], alpha=-rate)
    if out is not None:
        out.copy_(param)


def _parts(bounds: Tensor) -> list[tuple[int, int]]:
    ends: list[int] = bounds.tolist()
    return list(zip(ends, ends[1:], strict=False))


lamb_direction_ = define(
    "lamb_direction_(Tensor param, Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, "
    "Tensor(c!) direction, Tensor(d!) square_norms, Tensor bounds, Tensor step, Tensor? scale, "
    "Tensor? found_inf, float beta1, float beta2, float eps, float weight_decay, bool bias_correction) -> ()",
    lamb_direction_reference,
)
lamb_apply_ = define(
    "lamb_apply_(Tensor(a!) param, Tensor direction, Tensor(b!)? out, Tensor bounds, Tensor rates, "
    "Tensor? found_inf) -> ()",
    lamb_apply_reference,
)
