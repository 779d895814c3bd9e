"""DeepSpeed's learning-rate schedules, which set the lr (and betas) of an optimizer's groups.

They exist beside torch.optim.lr_scheduler because many configs name them and rely on their values. The
engine calls `step()` once after each applied optimizer step. The constructor sets the first lr, so every
step runs with an lr that the schedule has set:

    optimizer step      0        1        2
    runs with lr of     t = -1   t = 0    t = 1      (t is `last_batch_iteration`)

Differences from DeepSpeed:
- An unknown warm-up type is refused, not replaced by "log".
- `load_state_dict` sets the lr of the loaded iteration, so a resumed run does not depend on the order in
  which states are loaded.
"""

from __future__ import annotations

import warnings
from typing import final

from torch.optim import Optimizer, lr_scheduler

from ..config.scheduler import SCHEDULERS, SchedulerConfig
from .lr_formulas import Cycle, cosine_ratio, linear_decay_ratio, lr_range_factor, warmup_ratio
from .optimizers import try_schedule
from .schedule_base import (
    HasParamGroups,
    PerGroup,
    Schedule,
    between,
    check,
    for_groups,
    group_lrs,
    whole_number,
)

# OneCycle sets this beta2 beside the cycled beta1, as DeepSpeed does.
_ONE_CYCLE_BETA2 = 0.99


@final
class LRRangeTest(Schedule):
    """Raise the lr by a constant amount per step, to find the lr at which training diverges.

    Args:
        lr_range_test_min_lr: first lr, per group.
        lr_range_test_step_size: steps in which the lr grows by step_rate * min_lr.
        lr_range_test_staircase: grow once every step_size steps instead of in each step.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = for_groups(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = whole_number("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start()

    def get_lr(self) -> list[float]:
        factor = lr_range_factor(
            self.last_batch_iteration,
            step_size=self.step_size,
            step_rate=self.step_rate,
            staircase=self.staircase,
        )
        return [min_lr * factor for min_lr in self.min_lrs]


@final
class OneCycle(Schedule):
    """One cycle: the lr rises and falls while beta1 falls and rises. A slow decay follows.

    Args:
        cycle_min_lr, cycle_max_lr: lowest and highest lr of the cycle, per group.
        cycle_first_step_size, cycle_second_step_size: steps of the rise, and of the fall (None: equal).
        cycle_first_stair_count, cycle_second_stair_count: stairs of each half; 0 is continuous
            (None: as many as in the first half).
        decay_step_size: after the cycle, every so many steps the divisor of the lr grows by
            decay_lr_rate and the factor of beta1 by decay_mom_rate; 0 keeps both constant.
        cycle_momentum: set betas to (beta1, 0.99) too: the group's own beta2 is replaced. For an
            optimizer without betas it has no effect and a warning is given.
    """

    def __init__(  # noqa: PLR0913 (the config's keys)
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first, second = cycle_first_step_size, cycle_second_step_size
        stairs, second_stairs = cycle_first_stair_count, cycle_second_stair_count
        check(first > 0, "cycle_first_step_size", first, "must be positive")
        check(second is None or second >= 0, "cycle_second_step_size", second, "is negative")
        self.cycle = Cycle(
            first_size=float(first),
            second_size=float(first if second is None else second),
            first_stairs=stairs,
            second_stairs=stairs if second_stairs is None else second_stairs,
        )
        self.min_lrs = for_groups(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = for_groups(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = for_groups(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = for_groups(optimizer, "cycle_max_mom", cycle_max_mom)
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self._start()

    @property
    def total_size(self) -> float:
        """Steps of the cycle."""
        return self.cycle.total_size

    def get_lr(self) -> list[float]:
        num_decays = self._num_decays()
        if num_decays is None:
            height = self.cycle.height(self.last_batch_iteration)
            return between(self.min_lrs, self.max_lrs, height)
        return [low / (1 + self.decay_lr_rate * num_decays) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Betas of each group at the current iteration; None when momentum is not cycled.

        Before the first step the groups have `cycle_min_mom` instead.
        """
        if not self.cycle_momentum:
            return None
        num_decays = self._num_decays()
        if num_decays is None:
            height = self.cycle.height(self.last_batch_iteration)
            beta1s = between(self.max_moms, self.min_moms, height)
        else:
            beta1s = [high * (1 + self.decay_mom_rate * num_decays) for high in self.max_moms]
        return [(beta1, _ONE_CYCLE_BETA2) for beta1 in beta1s]

    def _num_decays(self) -> float | None:
        """The number of decay_step_size intervals since the cycle ended; None inside the cycle."""
        if self.last_batch_iteration < self.cycle.total_size:
            return None
        num_steps = self.last_batch_iteration - self.cycle.total_size + 1
        return num_steps / self.decay_step_size if self.decay_step_size > 0 else 0.0

    def _has_betas(self) -> bool:
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        warnings.warn(
            "scheduler.params.cycle_momentum has no effect because the optimizer has no betas; set it "
            "to false to silence this warning.",
            stacklevel=3,
        )
        return False

    def _write(self) -> None:
        super()._write()
        betas = self.get_mom()
        if betas is None:
            return
        if self.last_batch_iteration < 0:
            # beta1 and the lr both start at their minimum; they move in opposite directions only from
            # the first step on. This is kept because published runs used it.
            betas = [(beta1, _ONE_CYCLE_BETA2) for beta1 in self.min_moms]
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair


@final
class WarmupLR(Schedule):
    """Raise the lr from `warmup_min_lr` to `warmup_max_lr`, then hold it.

    Args:
        warmup_min_lr, warmup_max_lr: per group; no maximum means each group's own lr.
        warmup_num_steps: 0 and 1 are treated as 2, because ln(1) = 0 cannot be a divisor.
        warmup_type: "log" (fast, then slow) or "linear".
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        highs = group_lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = for_groups(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = for_groups(optimizer, "warmup_max_lr", highs)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_shape(warmup_type)
        self._start()

    def get_lr(self) -> list[float]:
        t = self.last_batch_iteration
        ratio = warmup_ratio(t, num_steps=self.warmup_num_steps, shape=self.warmup_type)
        return between(self.min_lrs, self.max_lrs, ratio)


@final
class WarmupDecayLR(Schedule):
    """Raise the lr as WarmupLR does, then decrease it linearly to `warmup_min_lr`.

    Args:
        total_num_steps: iteration at which the lr reaches its minimum again.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = for_groups(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = for_groups(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.total_num_steps = _total_steps(total_num_steps, self.warmup_num_steps)
        self.warmup_type = _warmup_shape(warmup_type)
        self._start()

    def get_lr(self) -> list[float]:
        t, num_warmup = self.last_batch_iteration, self.warmup_num_steps
        if t < num_warmup:
            ratio = warmup_ratio(t, num_steps=num_warmup, shape=self.warmup_type)
        else:
            ratio = linear_decay_ratio(
                t, num_warmup_steps=num_warmup, num_total_steps=self.total_num_steps
            )
        return between(self.min_lrs, self.max_lrs, ratio)


@final
class WarmupCosineLR(Schedule):
    """Scale each group's lr: from `warmup_min_ratio` up to 1, then down along half a cosine.

    The schedule scales the lr that a group has at construction. Before the first `step()` the lr is 0,
    regardless of `warmup_min_ratio`.

    Args:
        total_num_steps: iteration from which the ratio stays at `cos_min_ratio`.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.initial_lrs = group_lrs(optimizer)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.total_num_steps = _total_steps(total_num_steps, self.warmup_num_steps)
        self.warmup_type = _warmup_shape(warmup_type)
        self._start()

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [initial_lr * ratio for initial_lr in self.initial_lrs]

    def get_lr_ratio(self) -> float:
        """The factor on each group's lr at the current iteration."""
        t = self.last_batch_iteration
        if t < 0:
            return 0.0
        if t < self.warmup_num_steps:
            part = warmup_ratio(t, num_steps=self.warmup_num_steps, shape=self.warmup_type)
            return self.warmup_min_ratio + part * (1.0 - self.warmup_min_ratio)
        return cosine_ratio(
            t,
            num_warmup_steps=self.warmup_num_steps,
            num_total_steps=self.total_num_steps,
            min_ratio=self.cos_min_ratio,
        )


def build_scheduler(
    section: SchedulerConfig, optimizer: Optimizer
) -> Schedule | lr_scheduler.LRScheduler:
    """Build the schedule that `section` names: a class of this file, or of torch.optim.lr_scheduler.

    Raises:
        UsageError: its params are wrong.
    """
    name, params = section.type, section.params
    if name in SCHEDULERS.built_in:
        own: type[Schedule] = globals()[name]
        return own(optimizer, **params)
    kind = getattr(lr_scheduler, name)
    try_schedule(lambda over: kind(over, **params), name, params)
    made: lr_scheduler.LRScheduler = kind(optimizer, **params)
    return made


def _warmup_steps(value: object) -> int:
    return max(2, whole_number("warmup_num_steps", value, least=0))


def _warmup_shape(value: str) -> str:
    check(value in ("log", "linear"), "warmup_type", value, "must be 'log' or 'linear'")
    return value


def _total_steps(value: object, num_warmup_steps: int) -> int:
    num_steps = whole_number("total_num_steps", value)
    if num_steps < num_warmup_steps:
        warnings.warn(
            f"scheduler.params.total_num_steps = {num_steps} is below warmup_num_steps = "
            f"{num_warmup_steps}: the lr does not reach its maximum within these steps.",
            stacklevel=3,
        )
    return num_steps
