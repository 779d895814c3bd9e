"""Lion on flat shards.

Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1,
https://arxiv.org/abs/2302.06675. Weight decay is multiplied by the learning rate, as in the paper. The
defaults are DeepSpeed's; the paper has lr 1e-4 and betas (0.9, 0.99).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..kernels.lion import lion_
from .scale import Scale
from .shard_optimizer import Item, OnePassOptimizer, Update


class Lion(OnePassOptimizer):
    """p -= lr * (sign(beta1 m + (1 - beta1) g) + decay p); m = beta2 m + (1 - beta2) g."""

    num_states = 1
    can_skip = True
    counts_together = True
    rounds_masters = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def states_before(self, item: Item) -> dict[str, Any]:
        return {"exp_avg": item.new_state()}

    def state_of(self, item: Item) -> dict[str, Any]:
        """Steps are counted where random numbers depend on them. A checkpoint of fp32 states has no count."""
        state = super().state_of(item)
        if item.draws is not None and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=item.master.device)
        return state

    def one_pass(
        self, update: Update, state: dict[str, Any], group: dict[str, Any], scale: Scale
    ) -> None:
        item, step = update.item, state.get("step")
        if step is not None and not update.is_counted:
            step += 1
        high, low = update.halves or (item.master, None)
        lion_(
            high,
            update.grad,
            state["exp_avg"],
            update.out,
            scale.on(update.grad.device),
            scale.found_inf,
            float(group["lr"]),
            *group["betas"],
            group["weight_decay"],
            update.takes_edits,
            *update.old_values(state, "exp_avg"),
            step=step,
            draws=item.draws,
            low=low,
            rounds_away=item.rounds_away,
        )
