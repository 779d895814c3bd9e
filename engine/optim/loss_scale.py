"""Loss scaling for fp16 training: no scale, a static scale, or a dynamic one.

The scale changes after a step. Gradients are always unscaled with the scale that backward used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol, final

from ...utils.errors import XdsError

SCALE_FACTOR = 2.0
MAX_SCALE = 2.0**127  # the largest power of 2 in fp32, which multiplies the loss


class Fp16Section(Protocol):
    """The config's section `fp16`."""

    enabled: bool
    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float


class LossScale(ABC):
    """The factor on the loss (`value`), updated by `after_step` from whether the gradients overflowed."""

    value: float
    scales_loss: bool  # gradients of the plain loss are too small for the precision
    skips_overflow: bool  # a step whose gradients overflowed is skipped, and training continues

    @abstractmethod
    def after_step(self, *, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, float]:
        """The values that change from step to step."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state`. The state of another kind of scale is ignored."""
        return


@final
class NoScale(LossScale):
    """fp32 and bf16: the loss is not scaled. bf16 can still skip steps whose gradients are not finite."""

    def __init__(self, *, skips_overflow: bool) -> None:
        self.value = 1.0
        self.scales_loss = False
        self.skips_overflow = skips_overflow

    def after_step(self, *, overflow: bool) -> None:
        return


@final
class StaticScale(LossScale):
    """fp16 with a fixed scale."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.scales_loss = value != 1.0
        self.skips_overflow = True

    def after_step(self, *, overflow: bool) -> None:
        return


@final
class DynamicScale(LossScale):
    """Halves after an overflow, doubles after `window` steps without one.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2,
        https://arxiv.org/abs/1710.03740. Hysteresis as in DeepSpeed: the scale is halved at the
        `hysteresis`-th overflow. The count restarts when the scale doubles, or, if `consecutive`, after any
        step without overflow.
    """

    def __init__(
        self, initial: float, window: int, hysteresis: int, *, consecutive: bool, minimum: float
    ) -> None:
        self.value = initial
        self.scales_loss = True
        self.skips_overflow = True
        self._window = window
        self._hysteresis = hysteresis
        self._left = hysteresis
        self._consecutive = consecutive
        self._minimum = minimum
        self._step = 0
        self._last_overflow = -1

    def after_step(self, *, overflow: bool) -> None:
        if overflow:
            self._overflowed()
        else:
            if self._consecutive:
                self._left = self._hysteresis
            num_good_steps = self._step - self._last_overflow - 1
            if num_good_steps > 0 and num_good_steps % self._window == 0:
                if not self._consecutive:
                    self._left = self._hysteresis
                self.value = min(self.value * SCALE_FACTOR, MAX_SCALE)
        self._step += 1

    def _overflowed(self) -> None:
        if self._left > 1:
            self._left -= 1
        elif self.value <= self._minimum:
            raise XdsError(
                f"fp16: gradients overflow although the loss scale is at fp16.min_loss_scale = "
                f"{self._minimum:g}: the model diverges in fp16; lower the learning rate, clip gradients, "
                "or use bf16"
            )
        else:
            self.value = max(self.value / SCALE_FACTOR, self._minimum)
        self._last_overflow = self._step

    def state_dict(self) -> dict[str, float]:
        return {
            "value": self.value,
            "left": self._left,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if state:
            self.value = float(state["value"])
            self._left = int(state["left"])
            self._step = int(state["step"])
            self._last_overflow = int(state["last_overflow"])


def build_loss_scale(fp16: Fp16Section, *, skips_overflow: bool) -> LossScale:
    """The loss scale for the config's `fp16` section; `skips_overflow` applies where fp16 is off."""
    if not fp16.enabled:
        return NoScale(skips_overflow=skips_overflow)
    if fp16.loss_scale:
        return StaticScale(float(fp16.loss_scale))
    return DynamicScale(
        2.0**fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )
