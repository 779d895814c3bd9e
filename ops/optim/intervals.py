"""When 0/1 Adam updates its variance, and when its ranks synchronise: counters that a checkpoint keeps.

    variance    at steps that are multiples of an interval, which doubles after `var_update_scaler` updates
    ranks       after as many steps as an interval, which doubles after `local_step_scaler` steps

Source: Lu et al., 0/1 Adam, 2022, section 6 (policies of T_v and T_u), https://arxiv.org/abs/2202.06009;
intervals as in DeepSpeed. Differs: steps since the last synchronisation are counted, so one that a
checkpoint causes begins an interval.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import final


@final
@dataclass(frozen=True)
class Limits:
    """After how many updates and steps intervals double, and the longest one between two synchronisations."""

    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int


@final
@dataclass
class Intervals:
    """The counters. variance_steps: those that the variance has seen. apart_steps: since a synchronisation."""

    var_interval: int = 1
    var_counter: int = 0
    variance_steps: int = 0
    local_step_interval: int = 1
    local_step_counter: int = 0
    apart_steps: int = 0

    @classmethod
    def names(cls) -> list[str]:
        """Of the counters, in order."""
        return [field.name for field in fields(cls)]

    def as_state(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)

    def updates_variance(self, step: int) -> bool:
        """Whether step number `step`, from 1, updates the variance."""
        return step % self.var_interval == 0

    @property
    def ends_now(self) -> bool:
        """The next local step is the last before a synchronisation."""
        return self.apart_steps + 1 >= self.local_step_interval

    def count_before_freeze(self, step: int, limits: Limits) -> None:
        """Step number `step` was taken."""
        if self.updates_variance(step):
            self.variance_steps += 1
            self.var_counter += 1
            if self.var_counter == limits.var_update_scaler:
                self.var_counter = 0
                self.var_interval *= 2

    def count_frozen(self, limits: Limits, *, is_local: bool) -> None:
        """A step was taken after the freeze. is_local: each rank took its own."""
        if is_local:
            self.apart_steps = 0 if self.ends_now else self.apart_steps + 1
        self.local_step_counter += 1
        if self.local_step_counter == limits.local_step_scaler:
            self.local_step_counter = 0
            longer = 2 * self.local_step_interval
            self.local_step_interval = min(longer, limits.local_step_clipper)


__all__ = ["Intervals", "Limits"]
