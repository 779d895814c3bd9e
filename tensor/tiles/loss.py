"""Cross-entropy of a linear head, with the logits of one tile at a time."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...ops.torch_internals import outside_of_graphs
from ...utils.errors import UsageError
from ..vocabulary import Vocabulary, own_rows
from .ranges import tile_ranges


@outside_of_graphs  # as torch.compiler.disable, which would import torch._dynamo at once: a second
def tiled_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tiles: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    columns: Vocabulary | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), labels)`, with the logits of one tile at a time.

    Forward computes the gradients as well, and backward only multiplies them. So each tile's logits are
    computed once, not twice (the method of Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2).
    Logits and their exponentials are fp32; the products have the dtype of `hidden`, or autocast's. The gradient
    of the weight is summed in fp32.

    Labels are those of the same position: the caller shifts them.

    Args:
        hidden: [..., tokens, width], a floating-point tensor.
        weight: [classes, width], of the head.
        labels: [..., tokens], integers.
        tiles: how many tiles all tokens are cut into.
        bias: [classes].
        ignore_index: tokens with this label count neither in the loss nor in the mean.
        reduction: "mean" over the tokens that count, or "sum".
        columns: the classes of this tensor rank, where the head is cut; `weight` and `bias` are its slices.

    Returns:
        The loss, a scalar in fp32. As in torch, the mean over no token is NaN, and its gradients are zero.

    Raises:
        UsageError: unknown `reduction`, shapes that do not fit, or a second backward over the same loss.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f'tiled_loss(reduction={reduction!r}): pass "mean" or "sum"')
    if hidden.shape[:-1] != labels.shape:
        raise UsageError(
            f"tiled_loss: hidden of shape {tuple(hidden.shape)} needs labels of shape "
            f"{tuple(hidden.shape[:-1])}, not {tuple(labels.shape)}; pass one label for each token"
        )
    needs = (hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    has_graph = torch.is_grad_enabled()
    call = _Call(
        tiles,
        ignore_index,
        reduction == "mean",
        tuple(need and has_graph for need in needs),
        columns,
    )
    return _TiledLoss.apply(call, hidden, weight, bias, labels)  # type: ignore[no-untyped-call,no-any-return]


@final
class _Call:
    """The options of one call."""

    def __init__(
        self,
        tiles: int,
        ignore_index: int,
        is_mean: bool,
        needs: tuple[bool, ...],
        columns: Vocabulary | None,
    ) -> None:
        """
        Args:
            needs: whether hidden, weight and bias need a gradient.
        """
        self.columns = columns
        self.tiles, self.ignore_index, self.is_mean, self.needs = (
            tiles,
            ignore_index,
            is_mean,
            needs,
        )


@final
class _Gradients:
    """The gradients of the sum over tokens, before they are scaled."""

    def __init__(self, call: _Call, hidden: Tensor, weight: Tensor) -> None:
        """
        Args:
            hidden: [tokens, width].
            weight: [classes, width], in the dtype of the products.
        """
        self._product = weight.dtype
        of_hidden, of_weight, of_bias = call.needs
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        zeros = partial(torch.zeros, device=hidden.device, dtype=self.wide)
        self.hidden = (
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if of_hidden else None
        )
        self.weight = zeros(weight.shape) if of_weight else None
        self.bias = zeros(weight.shape[:1]) if of_bias else None

    def add(self, start: int, tile: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Add a tile: `tile` [tokens, width] of hidden, `grad` [tokens, classes] of its logits."""
        if self.bias is not None:
            self.bias += grad.sum(0)
        grad = grad.to(self._product)
        if self.hidden is not None:
            self.hidden[start : start + len(tile)] = grad @ weight
        if self.weight is None:
            return
        if self.weight.dtype == self._product:
            self.weight.addmm_(grad.t(), tile)
        else:
            self.weight += grad.t() @ tile


class _TiledLoss(torch.autograd.Function):
    """The inputs are the call, hidden, weight, bias and labels."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> Tensor:
        kind = hidden.device.type
        product = (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        )
        ctx.shape, ctx.dtypes = hidden.shape, (weight.dtype, None if bias is None else bias.dtype)
        ctx.call, ctx.is_spent = call, False
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        if torch.is_autocast_enabled(kind):
            weight, bias = weight.to(product), None if bias is None else bias.to(product)
        with torch.autocast(kind, enabled=False):
            ctx.gradients = gradients = _Gradients(call, rows, weight)
            total = torch.zeros((), device=hidden.device, dtype=gradients.wide)
            for start, size in tile_ranges(len(rows), call.tiles):
                tile = rows[start : start + size].to(product)
                logits = F.linear(tile, weight, bias).to(gradients.wide)
                total += _take_loss(logits, labels[start : start + size], call)
                if any(call.needs):
                    gradients.add(start, tile, weight, logits)
                del logits
            if call.columns is not None and gradients.hidden is not None:
                gradients.hidden = call.columns.exchange.sum(
                    gradients.hidden, "gradient of the input of"
                )
        count = (labels != call.ignore_index).sum()
        ctx.factor = 1 / count.clamp(min=1) if call.is_mean else torch.ones_like(total)
        return total / count if call.is_mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.is_spent:
            raise UsageError(
                "tiled_loss: a second backward over the same loss is not possible, because the first one has "
                "used up the gradients; call tiled_loss again"
            )
        ctx.is_spent, gradients, ctx.gradients = True, ctx.gradients, None
        factor = grad.float() * ctx.factor
        of_weight, of_bias = ctx.dtypes
        hidden = gradients.hidden
        if hidden is not None:
            _scale(hidden, factor, ctx.call.tiles)
            hidden = hidden.view(ctx.shape)
        weight = None if gradients.weight is None else gradients.weight.mul_(factor).to(of_weight)
        bias = None if gradients.bias is None else gradients.bias.mul_(factor).to(of_bias)
        return None, hidden, weight, bias, None


def _take_loss(logits: Tensor, labels: Tensor, call: _Call) -> Tensor:
    """The sum of the losses of a tile. Writes the gradient of that sum over the logits.

    Args:
        logits: [tokens, own classes]; labels: [tokens].
    """
    is_ignored = labels == call.ignore_index
    at, mine = labels.masked_fill(is_ignored, 0), torch.ones_like(is_ignored)
    highest, columns = logits.amax(1), call.columns
    if columns is not None:
        at, mine = own_rows(at, columns.own, columns.size)
        highest = columns.highest(highest)
    logits -= highest.unsqueeze(1)
    picked = logits.gather(1, at.unsqueeze(1)).squeeze(1)
    sums = logits.exp_().sum(1)
    if columns is not None:
        sums, picked = columns.sums(sums, picked.where(mine, 0))
    logits /= sums.unsqueeze(1)
    logits.scatter_add_(1, at.unsqueeze(1), -mine.to(logits.dtype).unsqueeze(1))
    logits.masked_fill_(is_ignored.unsqueeze(1), 0)
    return (sums.log() - picked).masked_fill(is_ignored, 0).sum()


def _scale(rows: Tensor, factor: Tensor, tiles: int) -> None:
    """Multiply `rows` in place, tile by tile: the factor of a loss scale may be too large for fp16."""
    for start, size in tile_ranges(len(rows), tiles):
        part = rows[start : start + size]
        part.copy_(part.float() * factor if part.dtype.itemsize == 2 else part * factor)


__all__ = ["tiled_loss"]
