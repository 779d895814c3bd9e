"""LAMB on flat shards, exact: the trust ratio of a parameter that is cut over ranks is its whole ratio.

Source: You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2,
https://arxiv.org/abs/1904.00962. As in DeepSpeed, the ratio is clamped to [min_coeff, max_coeff] and is 1
where either norm is 0. Beyond its elements a step sends 16 bytes a parameter and peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .flat import square_sum
from .shard_optimizer import ShardOptimizer, Update, World


@final
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

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: float, world: World) -> None:
        directions = [self._direction(update, scale) for update in updates]
        ratios = self._ratios(updates, directions, world)
        for update, direction in zip(updates, directions, strict=True):
            master = update.item.master
            lr = float(self.param_groups[update.item.group]["lr"])
            for part in update.item.parts:
                here = slice(part.start, part.stop)
                master[here].add_(direction[here], alpha=-lr * ratios[part.name])
            if update.out is not None:
                update.out.copy_(master)

    def _direction(self, update: Update, scale: float) -> Tensor:
        """Adam's direction plus decay, [n], in the memory of the gradient where its dtype allows."""
        master = update.item.master
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        state["step"] += 1
        group = self.param_groups[update.item.group]
        beta1, beta2 = group["betas"]
        grad = update.grad.to(master.dtype).mul_(scale)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first, second = 1.0, 1.0
        if group["bias_correction"]:
            first = 1 - beta1 ** float(state["step"])
            second = 1 - beta2 ** float(state["step"])
        torch.sqrt(state["exp_avg_sq"], out=grad).div_(second**0.5).add_(group["eps"])
        torch.div(state["exp_avg"], grad, out=grad).div_(first)
        return grad.add_(master, alpha=group["weight_decay"])

    def _ratios(
        self, updates: Sequence[Update], directions: Sequence[Tensor], world: World
    ) -> dict[str, float]:
        """Every parameter's clamped |p| / |direction|, over all ranks that hold a part of it."""
        # the parts on this rank differ from rank to rank: the table has a row for every parameter
        names = [part.name for flat in world.flats for part in flat.parts]
        rows = {name: at for at, name in enumerate(names)}
        table = torch.zeros(len(rows), 2, dtype=torch.float64, device=world.collectives.device)
        limits: dict[str, dict[str, Any]] = {}
        for update, direction in zip(updates, directions, strict=True):
            for part in update.item.parts:
                here = slice(part.start, part.stop)
                table[rows[part.name], 0] += square_sum(update.item.master[here])
                table[rows[part.name], 1] += square_sum(direction[here])
                limits[part.name] = self.param_groups[update.item.group]
        if world.is_sharded:
            table = world.collectives.gather_small(table.view(-1)).sum(0).view(-1, 2)
        norms = table.sqrt().tolist()
        return {name: _clamped(norms[rows[name]], group) for name, group in limits.items()}


def _clamped(norms: list[float], group: dict[str, Any]) -> float:
    weight, direction = norms
    if weight == 0.0 or direction == 0.0:
        return 1.0
    return float(min(max(weight / direction, group["min_coeff"]), group["max_coeff"]))
