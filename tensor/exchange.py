"""What tensor ranks send in forward and backward: sums and gathers of activations, under autograd.

              forward                backward
    enter     the input itself       sum of its gradients         before layers that are cut by columns
    leave     sum of the outputs     the gradient itself          after a layer that is cut by rows
    gather    all ranks' columns     this rank's columns          after an output that is needed whole

The first two are f and g of Shoeybi et al., Megatron-LM, 2019, section 3. A block sends four sums: two in
forward and two in backward. In a compiled block they are custom ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle
from . import compiled
from .tokens import Tokens


@final
class Exchange:
    """The messages of one tensor group for one place in the model, which `what` names in messages."""

    def __init__(
        self,
        collectives: Collectives,
        what: str,
        tokens: Tokens | None = None,
    ) -> None:
        """
        Args:
            tokens: what lies around this place has the tokens of its rank; None: all tokens.
        """
        self.collectives = collectives
        self.what = what
        self.tokens = tokens
        self._group = compiled.number_of(collectives)

    def enter(self, x: Tensor) -> Tensor:
        """`x` [...]; in backward its gradients are summed over the ranks."""
        if self.tokens is not None:
            return self.tokens.gather(x, self.what)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if torch.compiler.is_compiling():
            return cast(Tensor, compiled.enter(x, self._group))
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return entered

    def entered(self, x: Tensor) -> Tensor:
        """The values that `enter` returns, without autograd; `x` itself where it sends nothing."""
        return x if self.tokens is None else self.tokens.gathered(x, f"the input of {self.what}")

    def start_sum(self, grad: Tensor) -> tuple[Tensor, Handle | None]:
        """The gradient of `x` from that of `enter(x)`, complete after a wait for the handle, if any."""
        what = f"the gradient of the input of {self.what}"
        if self.tokens is not None:
            return self.tokens.start_sum(grad, what)
        return compiled.start_sum(self.collectives, grad, what)

    def leave(self, y: Tensor) -> Tensor:
        """The sum over ranks of `y` [...], the same bits on all."""
        if self.tokens is not None:
            return self.tokens.leave(y, self.what)
        if torch.compiler.is_compiling():
            return cast(Tensor, compiled.leave(y, self._group))
        left: Tensor = _Leave.apply(y, self)  # type: ignore[no-untyped-call]
        return left

    def gather(self, y: Tensor, widths: Sequence[int]) -> Tensor:
        """[..., own columns] -> [..., sum of `widths`], in rank order. `widths`: the columns of each rank."""
        if torch.compiler.is_compiling():
            return cast(Tensor, compiled.gather(y, self._group, list(widths)))
        gathered: Tensor = _Gather.apply(y, self, tuple(widths))  # type: ignore[no-untyped-call]
        return gathered

    def sum(self, tensor: Tensor, direction: str) -> Tensor:
        """The sum over ranks of `tensor`, in a new tensor."""
        return compiled.summed(self.collectives, tensor, f"the {direction} {self.what}")


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum(grad, "gradient of the input of"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange) -> Tensor:
        return exchange.sum(y, "output of")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange, widths: tuple[int, ...]) -> Tensor:
        group = exchange.collectives
        ctx.start, ctx.width = sum(widths[: group.rank]), widths[group.rank]
        return compiled.gathered(group, y, widths, f"the output of {exchange.what}")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.start, ctx.width), None, None


__all__ = ["Exchange"]
