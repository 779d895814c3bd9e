"""When the variance of a one-bit optimizer stays: at a given step, or when it has settled.

Source: Tang et al., 1-bit Adam, 2021, section 7.1, https://arxiv.org/abs/2102.02888: the variance's norm is
compared with the one 1 / (1 - beta2) steps before. Differs: both directions count, and it is compared at
multiples of these steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, final

SETTLED = 0.96  # of the norm before, and its inverse


class Variances(Protocol):
    """The variances of the whole model."""

    @property
    def norm_before(self) -> float | None:
        """The norm that was set last; a checkpoint has it."""

    @norm_before.setter
    def norm_before(self, norm: float) -> None: ...

    def norm(self) -> float:
        """The 1-norm. A collective."""


class FreezeRule(ABC):
    """Says after each step whether the variance stays from now on."""

    @abstractmethod
    def after(self, steps: int, variances: Variances) -> bool:
        """`steps` were taken. For all ranks, which get the same answer."""


@final
class FixedStep(FreezeRule):
    """After `freeze_step` steps."""

    def __init__(self, freeze_step: int) -> None:
        self._freeze_step = freeze_step

    def after(self, steps: int, variances: Variances) -> bool:
        return steps >= self._freeze_step


@final
class VarianceRule(FreezeRule):
    """When the 1-norm of all variances has changed by less than 4 % in 1 / (1 - beta2) steps.

    Not within the first `warmup_steps`, in which the learning rate rises. Every 1 / (1 - beta2) steps each
    rank sends 8 bytes.
    """

    def __init__(self, beta2: float, warmup_steps: int) -> None:
        self._beta2 = beta2
        self._interval = max(1, round(1.0 / max(1.0 - beta2, 1e-9)))
        self._warmup_steps = warmup_steps

    def after(self, steps: int, variances: Variances) -> bool:
        if steps % self._interval:
            return False
        norm = variances.norm() / (1.0 - self._beta2**steps)
        before = variances.norm_before
        variances.norm_before = norm
        if before is None or steps < self._warmup_steps or not norm:
            return False
        return SETTLED <= before / norm <= 1.0 / SETTLED


__all__ = ["FixedStep", "FreezeRule", "VarianceRule", "Variances"]
