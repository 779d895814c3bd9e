"""The base class of one-bit optimizers: when their variance stays, what a step sends, and what they share.

How it is sent is not decided here: see compression/one_bit.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..device import device_of, wide_place
from ..kernels.decide import square_sum_without_fp64
from .adam import new_moments
from .freezing import FixedStep, FreezeRule, VarianceRule
from .shard_optimizer import Flat, Item, ShardOptimizer, Update, World

# states that are numbers
FROZEN = "frozen_step"  # how many steps the variance has seen, after the last of them
NORM = "variance_norm"  # see VarianceRule


class OneBitOptimizer(ShardOptimizer, ABC):
    """Its variance stays after some steps. From then on messages carry the momentum, one bit per element."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        freeze_step: int | str,
        warmup_steps: int,
    ) -> None:
        """
        Args:
            freeze_step: at least 1; or "auto": see `VarianceRule`.
            warmup_steps: with "auto" the variance does not freeze before.
        """
        super().__init__(params, defaults)
        beta2 = max(group["betas"][1] for group in self.param_groups)
        self._freezes: FreezeRule = (
            VarianceRule(beta2, warmup_steps)
            if isinstance(freeze_step, str)
            else FixedStep(freeze_step)
        )
        self._variances = _Variances(self)
        # equal on all ranks, also on one that has only padding, and so no states
        self._steps = 0  # that were taken
        self._frozen_at: int | None = (
            None  # steps that the variance has seen; None: sees them still
        )
        self._norm_before: float | None = None  # see VarianceRule

    @property
    def is_frozen(self) -> bool:
        """The variance stays from the next step on."""
        return self._frozen_at is not None

    @property
    def variance_steps(self) -> int:
        """How many steps the variance has seen, while messages have one bit per element."""
        return self._frozen_at or 0

    def states_changed(self) -> None:
        """Take the numbers from the states. For all ranks: 8 bytes a number."""
        steps, frozen_at, norm = self.largest_of("step", FROZEN, NORM)
        self._steps, self._frozen_at = int(steps), int(frozen_at) or None
        self._norm_before = norm or None

    def largest_of(self, *names: str) -> list[float]:
        """States that are numbers, at least 0 and equal where there are any. For all ranks."""
        first: dict[str, Any] = next((state for state in self._states.values() if state), {})
        own_numbers = [first.get(name, 0) for name in names]
        collectives = self.world.collectives
        place = wide_place(collectives.device)
        values = torch.tensor(own_numbers, dtype=torch.float64, device=place)
        table = collectives.gather_small(values, what="the step of the optimizer")
        largest: list[float] = table.amax(0).tolist()
        return largest

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """As in the base class. Freezes the variance after its last step."""
        super().step(closure)
        self._steps = steps = self._steps + 1
        if self._frozen_at is None and self._freezes.after(steps, self._variances):
            self._frozen_at = steps
            for state in self._states.values():
                state[FROZEN] = steps
                self.begin_frozen(state)

    def begin_frozen(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have nothing to do)
        """The variance in `state` stays from now on."""

    def begin_update(self, updates: Sequence[Update], world: World) -> Moment:
        """Count the step of each item, and return which step it is."""
        moment = Moment(self._steps + 1, self._frozen_at)
        for update in updates:
            state = self._states[update.item.master]
            if not state:
                state.update(self.new_states(update.item))
                if self._frozen_at is not None:  # a load gave no states to padding
                    state[FROZEN] = self._frozen_at
                    self.begin_frozen(state)
            state["step"] += 1
            self._variances.add(update.item.master, world.flat_of(update.item))
        return moment

    def new_states(self, item: Item) -> dict[str, Any]:
        """The states of an item before its first step."""
        return new_moments(item)


class Moment(NamedTuple):
    """A step: its number, and how many steps the variance has seen; None: it sees this one."""

    steps: int
    frozen_at: int | None

    def corrections(self, group: dict[str, Any]) -> Corrections:
        """Of the moments, after the freeze."""
        assert self.frozen_at is not None
        beta1, beta2 = group["betas"]
        if not group["bias_correction"]:
            return Corrections(1.0, 1.0)
        root = 1.0 / math.sqrt(1.0 - beta2**self.frozen_at)
        return Corrections(1.0 / (1.0 - beta1**self.steps), root)


class Corrections(NamedTuple):
    """mean: factor of the momentum; root: of the root of the variance."""

    mean: float
    root: float


def gets_momentum(update: Update, world: World) -> bool:
    """After the freeze the new momentum comes in place of a gradient: with several ranks."""
    return world.flat_of(update.item).collectives.world_size > 1


def most_rates(group: dict[str, Any]) -> float:
    """The most that a step of Adam changes an element, in learning rates.

    With a variance that stays nothing bounds it. An element whose variance is far below those of its block gets
    the magnitude of the block's message, and would move by thousands of learning rates.

    Source: Kingma and Ba, Adam, 2015, section 2.1, https://arxiv.org/abs/1412.6980.
    """
    beta1, beta2 = group["betas"]
    return max(1.0, (1.0 - float(beta1)) / math.sqrt(max(1.0 - float(beta2), 1e-12)))


@final
class _Variances:
    """The variances in `states`, each with the buffer that it is in."""

    def __init__(self, optimizer: OneBitOptimizer) -> None:
        self._optimizer = optimizer
        self._flats: dict[Tensor, Flat] = {}

    def add(self, tensor: Tensor, flat: Flat) -> None:
        """`tensor` is in `flat`."""
        self._flats[tensor] = flat

    @property
    def norm_before(self) -> float | None:
        return self._optimizer._norm_before

    @norm_before.setter
    def norm_before(self, norm: float) -> None:
        self._optimizer._norm_before = norm
        for state in self._optimizer._states.values():
            state[NORM] = norm

    def norm(self) -> float:
        collectives = self._optimizer.world.collectives
        place = wide_place(collectives.device)
        own_sum = torch.zeros(1, dtype=torch.float64, device=place)
        for tensor, flat in self._flats.items():
            holders = 1 if flat.is_sharded else flat.collectives.world_size
            variance = self._optimizer._states[tensor]["exp_avg_sq"]
            own_sum += _wide_sum(variance).to(place) / holders
        return float(collectives.gather_small(own_sum, what="the norm of the variance").sum())


def _wide_sum(variance: Tensor) -> Tensor:
    """The sum of values of at least 0 in fp64, at their `wide_place`."""
    if device_of(variance.device).has_fp64:
        return variance.sum(dtype=torch.float64)
    return square_sum_without_fp64(variance.float().sqrt())


__all__ = [
    "FROZEN",
    "Corrections",
    "Moment",
    "OneBitOptimizer",
    "gets_momentum",
    "most_rates",
]
