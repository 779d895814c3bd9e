"""Adafactor on flat shards, with the arithmetic of torch.optim.Adafactor on whole parameters.

Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018, algorithms 4 and
6, https://arxiv.org/abs/1804.04235; what torch's class changes is in its documentation. A matrix of m x n has
m + n numbers of state. Differs: the root mean square of a parameter is computed in fp64.

A step additionally sends the gradients once, in the dtype of the masters, and 8 bytes per parameter and peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from ..flat import numel_of
from .part_tables import PartTables
from .scale import Scale
from .shard_optimizer import ParamPart, Update, World
from .whole_params import WholeParamOptimizer, own_elements, whole_grad


@final
class Adafactor(WholeParamOptimizer):
    """The second moments of a matrix are the product of the means of its rows and columns.

    Args:
        eps: of the second moment (None: that of the dtype), and the least root mean square of a parameter.
        d: the largest root mean square of an update.
    """

    num_states = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: Sequence[float | None] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": tuple(eps),
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._tables = PartTables()
        self._mean_squares: dict[str, Tensor] = {}  # of the parameters here, before a step

    def part_shapes(
        self, shape: tuple[int, ...], name: str, group: int
    ) -> dict[str, tuple[int, ...]]:
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        squares = [self._squares(update) for update in updates]
        table = self._tables.table(updates, squares, world, lambda every: every.sum(0))
        for update in updates:
            cuts, rows = self._tables.cuts_of(update.item), self._tables.rows_of(update.item, world)
            sums = table.to(rows.device)[rows, 0]
            by_name = dict(zip(cuts.names, sums, strict=True))
            for part in update.item.parts:
                self._mean_squares[part.name] = by_name[part.name] / numel_of(part.shape)
        super().update(updates, scale, world)

    def _squares(self, update: Update) -> Tensor:
        """The sum of squares of each parameter's part, fp64 [cuts, 1]."""
        master, starts = update.item.master, self._tables.cuts_of(update.item).starts
        norms = master.new_zeros(len(starts) - 1, 1, dtype=torch.float64)
        for number, (start, stop) in enumerate(pairwise(starts)):
            norms[number] = torch.linalg.vector_norm(master[start:stop], dtype=torch.float64)
        return norms.square_()

    def apply(self, update: Update, part: ParamPart, whole: Tensor) -> None:
        group, state = update.group, self.state_of(update.item)
        grad = whole_grad(update, part, whole)
        if group["maximize"]:
            grad = -grad
        lr, step = float(group["lr"]), float(state["step"])
        eps, least = group["eps"]
        eps = torch.finfo(grad.dtype).eps if eps is None else eps
        moments = {key: state[key][part.name] for key in self.part_shapes(part.shape, part.name, 0)}
        direction = _direction(grad, moments, step ** group["beta2_decay"], eps)
        excess = direction.norm().double() / (math.sqrt(grad.numel()) * group["d"])
        size = self._mean_squares[part.name].sqrt().clamp(min=least)
        rate = size * min(lr, 1 / math.sqrt(step)) / excess.clamp(min=1.0)
        own = update.item.master[part.start : part.stop]
        own.mul_(1 - lr * group["weight_decay"])
        own.sub_(own_elements(direction, part).mul_(rate.to(own.dtype)))


def _direction(grad: Tensor, moments: dict[str, Tensor], share: float, eps: float) -> Tensor:
    """The gradient over the root of its second moments; `share` of its squares enters `moments` first."""
    squares = grad.square()
    if "variance" in moments:
        squares.copy_(moments["variance"].lerp_(squares, share))
    else:
        rows, columns = moments["row_var"], moments["col_var"]
        rows.lerp_(squares.mean(-1, keepdim=True), share)
        columns.lerp_(squares.mean(-2, keepdim=True), share)
        torch.mul(rows / rows.mean(-2, keepdim=True).clamp_(min=eps), columns, out=squares)
    return squares.clamp_(min=eps * eps).rsqrt_().mul_(grad)


__all__ = ["Adafactor"]
