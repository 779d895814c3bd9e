"""LAMB on flat shards, exact: the trust ratio of a parameter is computed over all ranks that hold a part of it.

Source: You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2,
https://arxiv.org/abs/1904.00962. As in DeepSpeed, the ratio is clamped to [min_coeff, max_coeff] and is 1
where either norm is 0. A step additionally sends 16 bytes per parameter and peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.lamb import lamb_apply_, lamb_direction_
from .adam import new_moments
from .part_tables import Cuts, PartTables
from .scale import Scale
from .shard_optimizer import ShardOptimizer, Update, World, mark_written


class Lamb(ShardOptimizer):
    """Layer-wise adaptive moments: Adam's direction, scaled by |p| / |direction| for each parameter."""

    is_elementwise = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._tables = PartTables()

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        directions = [self._direction(update, scale) for update in updates]
        norms = [found for _, found in directions]
        table = self._tables.table(updates, norms, world, lambda every: every.sum(0))
        ratios: dict[int, Tensor] = {}  # by group
        for update, (direction, _) in zip(updates, directions, strict=True):
            group = update.group
            if update.item.group not in ratios:
                ratios[update.item.group] = _ratios(table, group)
            rows = self._tables.rows_of(update.item, world)
            mine = ratios[update.item.group].to(rows.device)[rows]
            rates = (mine * float(group["lr"])).to(torch.float32)
            bounds = self._tables.cuts_of(update.item).bounds
            lamb_apply_(update.item.master, direction, update.out, bounds, rates, None)
            mark_written(update)

    def _direction(self, update: Update, scale: Scale) -> tuple[Tensor, Tensor]:
        state = self._states[update.item.master]
        if not state:
            state.update(new_moments(update.item))
        state["step"] += 1
        return lamb_direction(update, state, self._tables.cuts_of(update.item), scale)


def lamb_direction(
    update: Update, state: dict[str, Any], cuts: Cuts, scale: Scale
) -> tuple[Tensor, Tensor]:
    """Adam's direction plus decay, [n], in the gradient's memory if its dtype allows it, and the squared norms,
    [cuts, 2], of master and direction. state["step"] counts this step."""
    master, grad, group = update.item.master, update.grad, update.group
    direction = grad if grad.dtype == master.dtype else torch.empty_like(master)
    norms = torch.zeros(len(cuts.names), 2, dtype=torch.float64, device=master.device)
    lamb_direction_(
        master,
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        direction,
        norms,
        cuts.bounds,
        state["step"],
        scale.on(master.device),
        None,
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        group["bias_correction"],
    )
    return direction, norms


def _ratios(table: Tensor, group: dict[str, Any]) -> Tensor:
    """`clamped` of each row, fp64 [parameters + 1]; the last is 0."""
    weight, direction = table[:, 0].sqrt(), table[:, 1].sqrt()
    ratios = (weight / direction).clamp(group["min_coeff"], group["max_coeff"])
    ratios = torch.where((weight == 0) | (direction == 0), 1.0, ratios)
    ratios[-1].zero_()
    return ratios


def clamped(squares: Sequence[float], group: dict[str, Any]) -> float:
    """|p| / |direction| of squared norms, within [min_coeff, max_coeff]; 1 where one of them is 0."""
    weight, direction = math.sqrt(squares[0]), math.sqrt(squares[1])
    if weight == 0.0 or direction == 0.0:
        return 1.0
    return float(min(max(weight / direction, group["min_coeff"]), group["max_coeff"]))
