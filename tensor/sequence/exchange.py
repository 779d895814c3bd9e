"""What sequence ranks send: heads to the ranks that attend with them, and tokens back to their owners.

                     forward                                        backward
    to_heads         [B, H, own tokens, D] -> [B, own heads, N, D]  to_tokens, summed where heads were copied
    to_tokens        [B, own heads, N, D] -> [B, H, own tokens, D]  to_heads
    sum_of_parts     sum over ranks                                 the gradient itself

Source: Jacobs et al., DeepSpeed Ulysses, 2023, section 3.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from .shares import Range

KIND = "sequence heads"
LOSS_KIND = "sequence losses"


@final
class HeadExchange:
    """The messages of one sequence group for tensors of one length.

    tokens, heads: the range of each rank; ranges of heads may overlap.
    dtype: what is sent; None: the dtype of the tensor.
    """

    def __init__(
        self,
        group: Collectives,
        tokens: tuple[Range, ...],
        heads: tuple[Range, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._group = group
        self._tokens, self._heads = tokens, heads
        self._dtype = dtype
        self._num_heads = max(end for _, end in heads)

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, H, own tokens, D] -> [B, own heads, all tokens, D]."""
        found: Tensor = _ToHeads.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, own heads, all tokens, D] -> [B, H, own tokens, D]."""
        found: Tensor = _ToTokens.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def send_heads(self, x: Tensor) -> Tensor:
        """`to_heads` without autograd."""
        first, end = self._heads[self._group.rank]
        sent = x.to(self._dtype or x.dtype)
        parts = [sent[:, a:b].contiguous() for a, b in self._heads]
        outs = [sent.new_empty(x.shape[0], end - first, b - a, x.shape[3]) for a, b in self._tokens]
        self._group.all_to_all(outs, parts, what="heads of attention", kind=KIND).wait()
        return torch.cat(outs, 2).to(x.dtype)

    def send_tokens(self, x: Tensor) -> Tensor:
        """`to_tokens` without autograd; what several ranks send of one head is added in rank order."""
        first, end = self._tokens[self._group.rank]
        sent = x.to(self._dtype or x.dtype)
        parts = [sent[:, :, a:b].contiguous() for a, b in self._tokens]
        outs = [sent.new_empty(x.shape[0], b - a, end - first, x.shape[3]) for a, b in self._heads]
        self._group.all_to_all(outs, parts, what="tokens of attention", kind=KIND).wait()
        whole = x.new_zeros(x.shape[0], self._num_heads, end - first, x.shape[3])
        for (a, b), out in zip(self._heads, outs, strict=True):
            whole[:, a:b] += out
        return whole


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
