"""A step of Adam on one item whose variance stays: by its gradient, or by the new momentum."""

from __future__ import annotations

from typing import Any

from ..kernels.frozen_adam import frozen_adam_
from .one_bit import Moment, most_rates
from .scale import Scale
from .shard_optimizer import Update, mark_written


def frozen_step(
    update: Update, state: dict[str, Any], scale: Scale, moment: Moment, *, is_momentum: bool
) -> None:
    """Update master, momentum and `out`. is_momentum: scale * grad is the new momentum."""
    group = update.group
    corrections, lr = moment.corrections(group), float(group["lr"])
    frozen_adam_(
        update.item.master,
        update.grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        update.out,
        scale.on(update.grad.device),
        scale.found_inf,
        lr * corrections.mean,
        group["betas"][0],
        corrections.root,
        group["eps"],
        lr * group["weight_decay"],
        lr * most_rates(group),
        is_momentum,
        update.takes_edits,
        *update.old_values(state, "exp_avg", "exp_avg_sq"),
    )
    mark_written(update)


__all__ = ["frozen_step"]
