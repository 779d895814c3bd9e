"""What sequence ranks send: heads to the ranks that attend with them, and tokens back to their owners.

                     forward                                        backward
    to_heads         [B, H, own tokens, D] -> [B, own heads, N, D]  to_tokens, summed where heads were copied
    to_tokens        [B, own heads, N, D] -> [B, H, own tokens, D]  to_heads
    sum_of_parts     sum over ranks                                 the gradient itself

In a compiled block the first two are custom ops.

Source: Jacobs et al., DeepSpeed Ulysses, 2023, section 3.
"""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from . import compiled
from .compiled import flat
from .messages import send_heads, send_tokens
from .shares import Range

LOSS_KIND = "sequence losses"


@final
class HeadExchange:
    """The messages of one sequence group for tensors of one length.

    tokens, heads: the range of each rank; ranges of heads may overlap.
    dtype: what is sent; None: the dtype of the tensor.
    number: of the group, by `number_of`. A compiled block uses it.
    """

    def __init__(
        self,
        group: Collectives,
        tokens: tuple[Range, ...],
        heads: tuple[Range, ...],
        dtype: torch.dtype | None,
        number: int,
    ) -> None:
        self._group = group
        self._tokens, self._heads = tokens, heads
        self._dtype = dtype
        self._number = number

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, H, own tokens, D] -> [B, own heads, all tokens, D]."""
        if torch.compiler.is_compiling():
            return cast(Tensor, compiled.to_heads(x, *self._arguments(x)))
        found: Tensor = _ToHeads.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, own heads, all tokens, D] -> [B, H, own tokens, D]."""
        if torch.compiler.is_compiling():
            return cast(Tensor, compiled.to_tokens(x, *self._arguments(x)))
        found: Tensor = _ToTokens.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def send_heads(self, x: Tensor) -> Tensor:
        """`to_heads` without autograd."""
        dtype = self._dtype or x.dtype
        return send_heads(self._group, x, self._tokens, self._heads, dtype)

    def send_tokens(self, x: Tensor) -> Tensor:
        """`to_tokens` without autograd."""
        dtype = self._dtype or x.dtype
        return send_tokens(self._group, x, self._tokens, self._heads, dtype)

    def _arguments(self, x: Tensor) -> tuple[int, list[int], list[int], torch.dtype]:
        """Of the custom ops."""
        return self._number, flat(self._tokens), flat(self._heads), self._dtype or x.dtype


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send_heads(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.send_tokens(grad), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.send_heads(grad), None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Collectives) -> Tensor:
        total = part.detach().clone()
        group.all_reduce(total, what="the loss of own tokens", kind=LOSS_KIND).wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_of_parts(part: Tensor, group: Collectives) -> Tensor:
    """The sum over ranks. In backward each rank keeps the gradient of its own part."""
    total: Tensor = _SumOfParts.apply(part, group)  # type: ignore[no-untyped-call]
    return total


__all__ = ["HeadExchange", "sum_of_parts"]
