"""Fake quantization: values that few bits can hold, in the dtype of the input; gradients pass unchanged.

Formulas of DeepSpeed, in the dtype of the input, fp16 in fp32, for each row of x [groups, numel / groups]:

    symmetric    s = 2 max|x| / 2^b;    clamp(round(x / s), -2^(b-1), 2^(b-1) - 1) s
    asymmetric   s = (max - min) / 2^b; z = round(min / s) s;  clamp(round((x - z) / s), 0, 2^b - 1) s + z
    2 bits       mean |x| over |x| > t, with the sign of x; 0 elsewhere;  t = 0.7 mean |x|
    1 bit        mean |x| with the sign of x

Deviations: a group whose scale is 0 (all values equal, or too small for the dtype) is left as it is. DeepSpeed
returns NaN. It computes fp16 in fp16, where scales of many bits are too small, and sums over 65504 infinite.
Sources: Li et al., Ternary Weight Networks, 2016,
https://arxiv.org/abs/1605.04711; Rastegari et al., XNOR-Net, 2016, https://arxiv.org/abs/1603.05279.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

_MASK = 0xFFFFFFFF
_FACTOR = 0x45D9F3B  # of a hash whose products stay below 2^63


def quantized(
    x: Tensor,
    bits: int,
    *,
    groups: int = 1,
    is_symmetric: bool = True,
    noise: Tensor | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`x` rounded to what `bits` bits can hold; its gradient is that of the result.

    Args:
        x: any shape, whose elements `groups` must divide.
        bits: 1 and 2 are symmetric only, without noise and bounds.
        noise: of the shape of x, in [-0.5, 0.5): stochastic rounding.
        bounds: (min, max) of one group, scalars, in place of those of `x`.
    """
    if not x.numel():
        return x
    rows = x.detach().reshape(groups, -1)
    if x.dtype == torch.float16:
        rows = rows.float()
    if bits == 1:
        found = _binary(rows)
    elif bits == 2 and bounds is None:
        found = _ternary(rows)
    else:
        more = None if noise is None else noise.reshape(groups, -1)
        limits = None if bounds is None else tuple(one.to(rows.dtype).view(1, 1) for one in bounds)
        found = (_symmetric if is_symmetric else _asymmetric)(rows, bits, more, limits)
    found = found.to(x.dtype).reshape(x.shape).contiguous()
    return _Straight.apply(x, found)  # type: ignore[no-any-return, no-untyped-call]


def _symmetric(
    rows: Tensor, bits: int, noise: Tensor | None, bounds: tuple[Tensor, ...] | None
) -> Tensor:
    levels = 2**bits
    if bounds is None:
        largest = rows.abs().amax(dim=-1, keepdim=True)
    else:
        largest = torch.maximum(bounds[0].abs(), bounds[1])
    scale = 2 * largest / levels
    steps = rows / scale
    steps = (steps if noise is None else steps + noise).round()
    result = steps.clamp(-levels // 2, levels // 2 - 1) * scale
    return torch.where(scale > 0, result, rows)


def _asymmetric(
    rows: Tensor, bits: int, noise: Tensor | None, bounds: tuple[Tensor, ...] | None
) -> Tensor:
    levels = 2**bits
    if bounds is None:
        low, high = rows.amin(dim=-1, keepdim=True), rows.amax(dim=-1, keepdim=True)
    else:
        low, high = bounds
    scale = (high - low) / levels
    zero = (low / scale).round() * scale
    steps = (rows - zero) / scale
    steps = (steps if noise is None else steps + noise).round()
    result = steps.clamp(0, levels - 1) * scale + zero
    return torch.where(scale > 0, result, rows)


def _ternary(rows: Tensor) -> Tensor:
    threshold = 0.7 * rows.norm(p=1, dim=1, keepdim=True).div(rows.shape[1])
    is_large = (rows.abs() > threshold).to(rows.dtype)
    mean = (is_large * rows).abs().sum(dim=1, keepdim=True) / is_large.sum(dim=1, keepdim=True)
    result = mean * (rows > threshold).to(rows.dtype) - mean * (rows < -threshold).to(rows.dtype)
    return torch.where(threshold > 0, result, rows)


def _binary(rows: Tensor) -> Tensor:
    return rows.sign().mul(rows.norm(p=1, dim=1, keepdim=True).div(rows.shape[1]))


@final
class _Straight(Function):
    """The second argument, with the gradient of the first: the straight-through estimator.

    Source: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013,
    https://arxiv.org/abs/1308.3432.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def noise_like(x: Tensor, seed: Tensor) -> Tensor:
    """Uniform numbers in [-0.5, 0.5) of the shape and dtype of `x`, the same on every rank and device.

    seed: a scalar of int64, at least 0. They hash each element's place, so a recomputation draws them again.
    """
    place = torch.arange(x.numel(), dtype=torch.int64, device=x.device)
    value = (place + seed * 0x9E3779B1) & _MASK
    for _ in range(2):
        value = (((value >> 16) ^ value) * _FACTOR) & _MASK
    value = (value >> 16) ^ value
    return ((value >> 8).to(torch.float32) / 2**24 - 0.5).to(x.dtype).view(x.shape)


@final
class _TopK(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, ratio: float) -> Tensor:
        return top_mask(scores, ratio).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def top_mask(values: Tensor, ratio: float) -> Tensor:
    """Whether an element is among the ceil(ratio * numel) largest; of equal ones the first."""
    numel = values.numel()
    count = math.ceil(ratio * numel)
    order = values.flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(numel, dtype=torch.bool, device=values.device)
    mask[order[:count]] = True
    return mask.view(values.shape)


def learned_mask(scores: Tensor, ratio: float) -> Tensor:
    """`top_mask` of learned scores, in their dtype; the gradient of the mask is that of the scores."""
    return _TopK.apply(scores, ratio)  # type: ignore[no-any-return, no-untyped-call]


__all__ = ["learned_mask", "noise_like", "quantized", "top_mask"]
