"""SGD with momentum on flat shards, used where parameters have a narrower dtype than their master weights.

The arithmetic and the state are those of torch.optim.SGD, with the unscaling and casts in the same pass. It is
a subclass, because scripts ask `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch

from ..kernels.sgd import sgd_
from .scale import Scale
from .shard_optimizer import OnePassOptimizer, Update


@final
class SGD(OnePassOptimizer, torch.optim.SGD):
    """g += decay p; m = momentum m + (1 - dampening) g, at first g; p -= lr m, or lr (g + momentum m)."""

    num_states = 1

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)  # that of torch's class adds keys

    def one_pass(
        self, update: Update, state: dict[str, Any], group: dict[str, Any], scale: Scale
    ) -> None:
        master = update.item.master
        is_first = "momentum_buffer" not in state
        if is_first and group["momentum"]:
            state["momentum_buffer"] = update.item.new_state()
        step = torch.full((), 1.0 if is_first else 2.0, device=master.device)
        sgd_(
            master,
            update.grad,
            state.get("momentum_buffer"),
            update.out,
            step,
            scale.on(master.device),
            scale.found_inf,
            float(group["lr"]),
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            update.takes_edits,
            *update.old_values(state, "momentum_buffer"),
        )
