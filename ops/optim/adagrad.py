"""Adagrad on flat shards, used where parameters have a narrower dtype than their master weights.

The arithmetic and the state are those of torch.optim.Adagrad, with the unscaling and casts in the same pass. It
is a subclass, because scripts ask `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..kernels.adagrad import adagrad_
from .scale import Scale
from .shard_optimizer import Item, OnePassOptimizer, Update


class Adagrad(OnePassOptimizer, torch.optim.Adagrad):
    """g += decay p; s += g^2; p -= lr / (1 + (step - 1) lr_decay) * g / (sqrt(s) + eps)."""

    num_states = 1
    counts_together = True
    can_skip = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)  # that of torch's class adds states

    def states_before(self, item: Item) -> dict[str, Any]:
        first = self.param_groups[item.group]["initial_accumulator_value"]
        return {
            "step": torch.zeros((), dtype=torch.float32, device=item.master.device),
            "sum": item.new_state().fill_(first),
        }

    def one_pass(
        self, update: Update, state: dict[str, Any], group: dict[str, Any], scale: Scale
    ) -> None:
        master = update.item.master
        if not update.is_counted:
            state["step"] += 1
        adagrad_(
            master,
            update.grad,
            state["sum"],
            update.out,
            state["step"],
            scale.on(master.device),
            scale.found_inf,
            float(group["lr"]),
            group["lr_decay"],
            group["eps"],
            group["weight_decay"],
            update.takes_edits,
            *update.old_values(state, "sum"),
        )
