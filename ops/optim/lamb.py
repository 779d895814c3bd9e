"""LAMB on flat shards, exact: the trust ratio of a parameter is computed over all ranks that hold a part of it.

Source: You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2,
https://arxiv.org/abs/1904.00962. As in DeepSpeed, the ratio is clamped to [min_coeff, max_coeff] and is 1
where either norm is 0. A step additionally sends 16 bytes per parameter and peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ..kernels.lamb import lamb_apply_, lamb_direction_
from .shard_optimizer import Item, ShardOptimizer, Update, World, factor, mark_written


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
        self._cuts: dict[Item, _Cuts] = {}

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: float, world: World) -> None:
        directions = [self._direction(update, scale) for update in updates]
        ratios = self._ratios(updates, [norms for _, norms in directions], world)
        for update, (direction, _) in zip(updates, directions, strict=True):
            cuts = self._cuts_of(update.item)
            lr = float(update.group["lr"])
            rates = torch.tensor(
                [0.0 if name is None else lr * ratios[name] for name in cuts.names],
                dtype=torch.float32,
                device=direction.device,
            )
            lamb_apply_(update.item.master, direction, update.out, cuts.bounds, rates, None)
            mark_written(update)

    def _direction(self, update: Update, scale: float) -> tuple[Tensor, Tensor]:
        """Adam's direction plus decay, [n], in the gradient's memory if its dtype allows it, and the squared
        norms, [cuts, 2], of master and direction."""
        master, grad = update.item.master, update.grad
        state = self._states[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        state["step"] += 1
        group = update.group
        cuts = self._cuts_of(update.item)
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
            factor(scale, master.device),
            None,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
        )
        return direction, norms

    def _ratios(
        self, updates: Sequence[Update], norms: Sequence[Tensor], world: World
    ) -> dict[str, float]:
        """Every parameter's clamped |p| / |direction|, over all ranks that hold a part of it."""
        # every rank holds different parts, so the table has a row for every parameter
        names = [part.name for flat in world.flats for part in flat.parts]
        rows = {name: at for at, name in enumerate(names)}
        device = norms[0].device if norms else world.collectives.device
        table = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        limits: dict[str, dict[str, Any]] = {}
        for update, found in zip(updates, norms, strict=True):
            here = self._cuts_of(update.item).names
            inside = [(at, rows[name]) for at, name in enumerate(here) if name is not None]
            if inside:
                ours, theirs = zip(*inside, strict=True)
                to = torch.tensor(theirs, device=device)
                # with some masters on the host, norms are in both places
                table.index_add_(0, to, found.to(device)[torch.tensor(ours, device=device)])
            for part in update.item.parts:
                limits[part.name] = update.group
        sharded = [flat for flat in world.flats if flat.is_sharded]
        for collectives in dict.fromkeys(flat.collectives for flat in sharded):
            flats = [flat for flat in sharded if flat.collectives is collectives]
            own = torch.tensor(
                [rows[part.name] for flat in flats for part in flat.parts], device=device
            )
            sent = table[own].view(-1).to(collectives.device)
            table[own] = collectives.gather_small(sent).sum(0).view(-1, 2).to(device)
        found_norms = table.sqrt().tolist()
        return {name: _clamped(found_norms[rows[name]], group) for name, group in limits.items()}

    def _cuts_of(self, item: Item) -> _Cuts:
        cuts = self._cuts.get(item)
        if cuts is None or cuts.bounds.device != item.master.device:  # a master may move
            cuts = self._cuts[item] = _cut(item)
        return cuts


@dataclass(frozen=True)
class _Cuts:
    """An item cut at its parameters: bounds int64 [k + 1], and k names; None for a gap between two."""

    bounds: Tensor
    names: tuple[str | None, ...]


def _cut(item: Item) -> _Cuts:
    bounds: list[int] = [0]
    names: list[str | None] = []
    for part in item.parts:
        if part.start > bounds[-1]:
            names.append(None)
            bounds.append(part.start)
        names.append(part.name)
        bounds.append(part.stop)
    return _Cuts(torch.tensor(bounds, device=item.master.device), tuple(names))


def _clamped(norms: list[float], group: dict[str, Any]) -> float:
    weight, direction = norms
    if weight == 0.0 or direction == 0.0:
        return 1.0
    return float(min(max(weight / direction, group["min_coeff"]), group["max_coeff"]))
