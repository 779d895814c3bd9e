"""1-bit Adam on flat shards: Adam, then Adam with a variance that stays.

Source: Tang et al., 1-bit Adam, 2021, algorithm 1, https://arxiv.org/abs/2102.02888. Differs: moments are
corrected for their bias, as in Adam (`bias_correction`), the variance by the steps that it has seen; weight
decay is decoupled, as in DeepSpeed; an element whose variance is 0 does not move.

What is sent is not decided here: see compression/one_bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..kernels.frozen_adam import frozen_adam_
from .adam import AdamRule, new_moments
from .freezing import FixedStep, FreezeRule, VarianceRule
from .shard_optimizer import Flat, ShardOptimizer, Update, World, factor, mark_written

# states that are numbers
FROZEN = "frozen_step"  # how many steps the variance has seen, after the last of them
NORM = "variance_norm"  # see VarianceRule


@final
class OneBitAdam(ShardOptimizer):
    """Adam whose variance stays after `freeze_step` steps.

    Args:
        params: 1-D fp32 tensors or groups of them.
        freeze_step: at least 1; or "auto": see `VarianceRule`.
        bias_correction: divide the moments by 1 - beta^t.
        warmup_steps: with "auto" the variance does not freeze before.
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
        super().__init__(params, defaults)
        beta2 = max(group["betas"][1] for group in self.param_groups)
        self._freezes: FreezeRule = (
            VarianceRule(beta2, warmup_steps)
            if isinstance(freeze_step, str)
            else FixedStep(freeze_step)
        )
        self._rule = AdamRule(adam_w_mode=True)
        self._variances = _Variances(self)
        self._steps: int | None = None  # that were taken; None: not known since a load
        self._frozen_at: int | None = (
            None  # steps that the variance has seen; None: it still sees them
        )

    @property
    def is_frozen(self) -> bool:
        """The variance stays from the next step on."""
        self._read_states()
        return self._frozen_at is not None

    def states_changed(self) -> None:
        self._steps = self._frozen_at = None

    def _read_states(self) -> int:
        """The steps that were taken. The states know them after a load."""
        if self._steps is None:
            first: dict[str, Any] = next((state for state in self._states.values() if state), {})
            self._steps = int(first.get("step", 0))
            self._frozen_at = first.get(FROZEN)
        return self._steps

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """As in the base class. Freezes the variance after its last step."""
        super().step(closure)
        steps = self._read_states() + 1
        self._steps = steps
        if self._frozen_at is None and self._freezes.after(steps, self._variances):
            self._frozen_at = steps
            for state in self._states.values():
                state[FROZEN] = steps

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: float, world: World) -> None:
        steps = self._read_states() + 1
        for update in updates:
            state = self._states[update.item.master]
            self._variances.add(update.item.master, world.flat_of(update.item))
            if not state:
                state.update(new_moments(update.item.master))
            state["step"] += 1
            if self._frozen_at is None:
                self._rule.step(update, state, scale, world)
                continue
            flat = world.flat_of(update.item)
            gets_momentum = not flat.is_sharded and flat.collectives.world_size > 1
            corrections = _Corrections.of(update.group, steps, self._frozen_at)
            _frozen_step(update, state, scale, corrections, is_momentum=gets_momentum)


@final
class _Variances:
    """The variances in `states`, each with the buffer that it is in."""

    def __init__(self, optimizer: OneBitAdam) -> None:
        self._optimizer = optimizer
        self._flats: dict[Tensor, Flat] = {}

    def add(self, tensor: Tensor, flat: Flat) -> None:
        """`tensor` is in `flat`."""
        self._flats[tensor] = flat

    @property
    def norm_before(self) -> float | None:
        states = self._optimizer._states.values()
        return next((state.get(NORM) for state in states if state), None)

    @norm_before.setter
    def norm_before(self, norm: float) -> None:
        for state in self._optimizer._states.values():
            state[NORM] = norm

    def norm(self) -> float:
        collectives = self._optimizer.world.collectives
        own = torch.zeros(1, dtype=torch.float64, device=collectives.device)
        for tensor, flat in self._flats.items():
            holders = 1 if flat.is_sharded else flat.collectives.world_size
            variance = self._optimizer._states[tensor]["exp_avg_sq"]
            own += variance.sum(dtype=torch.float64) / holders
        return float(collectives.gather_small(own, what="the norm of the variance").sum())


class _Corrections(NamedTuple):
    """rate: the learning rate with the correction of the momentum; root: of the root of the variance."""

    rate: float
    root: float

    @classmethod
    def of(cls, group: dict[str, Any], steps: int, frozen_at: int) -> _Corrections:
        """Of the step number `steps`, where the variance has seen `frozen_at`."""
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        if not group["bias_correction"]:
            return cls(lr, 1.0)
        return cls(lr / (1.0 - beta1**steps), 1.0 / math.sqrt(1.0 - beta2**frozen_at))


def _frozen_step(
    update: Update,
    state: dict[str, Any],
    scale: float,
    corrections: _Corrections,
    *,
    is_momentum: bool,
) -> None:
    group = update.group
    frozen_adam_(
        update.item.master,
        update.grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        update.out,
        factor(scale, update.grad.device),
        None,
        corrections.rate,
        group["betas"][0],
        corrections.root,
        group["eps"],
        float(group["lr"]) * group["weight_decay"],
        is_momentum,
        update.takes_edits,
        *update.old_values(state, "exp_avg", "exp_avg_sq"),
    )
    mark_written(update)


__all__ = ["FROZEN", "OneBitAdam"]
