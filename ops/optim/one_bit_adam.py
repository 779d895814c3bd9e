"""1-bit Adam on flat shards: Adam, then Adam with a variance that stays.

Source: Tang et al., 1-bit Adam, 2021, algorithm 1, https://arxiv.org/abs/2102.02888. Differs: moments are
corrected for their bias, as in Adam (`bias_correction`), the variance by the steps that it has seen; weight
decay is decoupled, as in DeepSpeed; after the freeze an element whose variance is 0 does not move, and none by
more than Adam would (`most_rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from .adam import AdamRule
from .frozen_step import frozen_step
from .one_bit import OneBitOptimizer, gets_momentum
from .scale import Scale
from .shard_optimizer import Update, World


@final
class OneBitAdam(OneBitOptimizer):
    """Adam whose variance stays after `freeze_step` steps.

    Args:
        params: 1-D fp32 tensors or groups of them.
        bias_correction: divide the moments by 1 - beta^t.
    """

    takes_edits = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int | str = 100_000,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, freeze_step, warmup_steps)
        self._rule = AdamRule(adam_w_mode=True)

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        moment = self.begin_update(updates, world)
        for update in updates:
            if moment.frozen_at is None:
                self._rule.step(update, self._states[update.item.master], scale, world)
            else:
                frozen_step(
                    update,
                    self._states[update.item.master],
                    scale,
                    moment,
                    is_momentum=gets_momentum(update, world),
                )


__all__ = ["OneBitAdam"]
