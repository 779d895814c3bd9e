"""The sum of input gradients travels while the gradients of the weights are computed.

    forward    x ── Wait ── Start ──┬── q ──        a Weight node of each layer is made between Wait and Start
                                    ├── k ──
                                    └── v ──

    backward   v, k, q     the gradient of the input; what the weight's gradient needs is kept
               Start       begins the sum over the ranks
               Weight      the gradients of the weights and biases
               Wait        waits for the sum

Autograd runs the youngest of the nodes that are ready. So their age gives this order. Numbers have the same
bits as without overlap. DeepSpeed's setting for it is `tp_overlap_comm`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ..ops.comm.handles import Handle
from ..ops.device import autocast_dtype
from ..ops.linear import bias_grad, input_grad, is_by_columns, linear_transposed, weight_grad
from .exchange import Exchange
from .styles import is_transposed


@final
@dataclass(eq=False)
class _Sum:
    """The sum of one entry's gradients, while it travels."""

    exchange: Exchange
    total: Tensor | None = None
    handle: Handle | None = None


@final
@dataclass(eq=False)
class _Uses:
    """What the gradients of one layer's parameters need: input and output gradient of each use."""

    has_transposed: bool
    is_by_columns: bool
    is_flat: bool = True
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@final
@dataclass(eq=False)
class RegionInput:
    """One entry of an input into a region.

    x: the input for the layers. uses: id of a layer -> the token of its Weight node, and what that node needs.
    """

    x: Tensor
    uses: dict[int, tuple[Tensor, _Uses]]


def enter(x: Tensor, exchange: Exchange, layers: Iterable[nn.Module]) -> RegionInput:
    """As `Exchange.enter`, for an input that requires gradients. `layers`: those that may get it."""
    state = _Sum(exchange)
    waiting: Tensor = _Wait.apply(x, state)  # type: ignore[no-untyped-call]
    uses: dict[int, tuple[Tensor, _Uses]] = {}
    for layer in layers:
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if weight is None or not weight.requires_grad or not can_overlap(layer):
            continue
        has_transposed = is_transposed(layer)
        found = _Uses(has_transposed, is_by_columns(weight, has_transposed))
        uses[id(layer)] = (_Weight.apply(weight, bias, found), found)  # type: ignore[no-untyped-call]
    started: Tensor = _Start.apply(waiting, state)  # type: ignore[no-untyped-call]
    return RegionInput(started, uses)


def can_overlap(layer: nn.Module) -> bool:
    """Nothing but its own product uses the parameters of `layer`."""
    is_plain = getattr(layer, "has_plain_product", False)
    return bool(is_plain) and not getattr(layer, "defers_weight_grads", False)


def product(layer: nn.Module, x: Tensor, token: Tensor, uses: _Uses) -> Tensor:
    """x W^T + b of `layer`, whose gradients the Weight node of `token` computes."""
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype is not torch.float64:
        x = x.to(dtype)
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    y: Tensor = _Product.apply(x, token, weight, bias, uses)  # type: ignore[no-untyped-call]
    return y


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: _Sum) -> Tensor:
        ctx.state = state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        state: _Sum = ctx.state
        total, handle, state.total, state.handle = state.total, state.handle, None, None
        assert total is not None
        if handle is not None:
            handle.wait()
        return total, None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: _Sum) -> Tensor:
        ctx.state = state
        entered = state.exchange.entered(x)
        return entered.view_as(x) if entered is x else entered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        state: _Sum = ctx.state
        state.total, state.handle = state.exchange.start_sum(grad)
        return state.total, None


class _Weight(torch.autograd.Function):
    """A token without values; in backward the gradients of the parameters of one layer."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, uses: _Uses) -> Tensor:
        ctx.uses = uses
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        uses: _Uses = ctx.uses
        needs_weight, needs_bias, *_ = ctx.needs_input_grad
        pairs, uses.pairs = uses.pairs, []
        of_weight, of_bias = ctx.dtypes
        dw = db = None
        for x, dy in pairs:
            if needs_weight:
                grad = weight_grad(
                    x, dy, is_by_columns=uses.is_by_columns, is_transposed=uses.has_transposed
                ).to(of_weight)
                dw = grad if dw is None else dw + grad
            if needs_bias:
                grad = bias_grad(dy, is_flat=uses.is_flat).to(of_bias)
                db = grad if db is None else db + grad
        return dw, db, None


class _Product(torch.autograd.Function):
    """A linear layer whose backward computes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None, uses: _Uses
    ) -> Tensor:
        compute = linear_transposed if uses.has_transposed else nn.functional.linear
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached cast from here would have no gradient
        try:
            y = compute(x, weight, bias)
        finally:
            torch.set_autocast_cache_enabled(caches)
        ctx.save_for_backward(x, weight)
        ctx.uses = uses
        ctx.x_is_by_columns = x.ndim == 2 and is_by_columns(x)
        uses.is_flat = uses.has_transposed or x.is_contiguous()
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        uses: _Uses = ctx.uses
        dx = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(dy.dtype)
            matrix = weight if uses.has_transposed else weight.t()
            dx = input_grad(dy, matrix, is_by_columns=ctx.x_is_by_columns)
        uses.pairs.append((x, dy))
        return dx, dy.new_empty(0), None, None, None


__all__ = ["RegionInput", "can_overlap", "enter", "product"]
