"""`deepspeed.runtime.fp16.loss_scaler`: loss scales, and what a script reads of an engine's.

The engine has its own scale (`engine.loss_scale`); the classes here are for loops of scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor

from ....engine.optim.loss_scale import DynamicScale
from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder
from ..config_utils import DeepSpeedConfigObject
from ..norms import has_inf_or_nan

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"
SCALE_FACTOR = 2.0


class LossScaleProfile(str, Enum):
    """Which optimizer the defaults are for."""

    FUSED = "fused"
    UNFUSED = "unfused"


@final
@dataclass(frozen=True)
class LossScaleProfileDefaults:
    """The dynamic scale of an optimizer whose config has none."""

    initial_dynamic_scale: float
    default_scale_window: int
    default_min_loss_scale: float
    scale_factor: float


LOSS_SCALE_PROFILE_DEFAULTS = {
    LossScaleProfile.FUSED: LossScaleProfileDefaults(2.0**32, 1000, 1, SCALE_FACTOR),
    LossScaleProfile.UNFUSED: LossScaleProfileDefaults(2.0**16, 1000, 0.25, SCALE_FACTOR),
}


@final
class LossScaleConfig:
    """A loss scale and its state as numbers.

    Args:
        low_precision_dtype: only float16 is scaled.
        static_loss_scale: the scale where it is not dynamic.
        dynamic_loss_args: the arguments of `DynamicLossScaler`; None: the defaults of `profile`.
    """

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        defaults = LOSS_SCALE_PROFILE_DEFAULTS[profile]
        self.use_grad_scaling = low_precision_dtype == torch.float16
        self.dynamic_loss_scale = self.use_grad_scaling and bool(dynamic_loss_scale)
        self.cur_iter = 0
        self.cur_scale = static_loss_scale if self.use_grad_scaling else 1.0
        self.last_overflow_iter: int | None = None
        self.scale_factor: float | None = None
        self.scale_window: int | None = None
        self.min_loss_scale: float | None = None
        self.cur_hysteresis: int | None = None
        if not self.dynamic_loss_scale:
            return
        first = initial_dynamic_scale or defaults.initial_dynamic_scale
        given = dynamic_loss_args or {}
        self.last_overflow_iter, self.scale_factor = -1, defaults.scale_factor
        self.cur_scale = given.get(INITIAL_LOSS_SCALE, first)
        self.scale_window = given.get(SCALE_WINDOW, defaults.default_scale_window)
        self.min_loss_scale = given.get(MIN_LOSS_SCALE, defaults.default_min_loss_scale)
        self.cur_hysteresis = given.get(DELAYED_SHIFT, 1)


class LossScalerBase(DeepSpeedConfigObject):
    """A factor on the loss, `loss_scale`."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: Iterable[Tensor], grad_out: Any
    ) -> tuple[Tensor, ...]:
        return tuple(self.loss_scale * one for one in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


@final
class LossScaler(LossScalerBase):
    """A factor that stays."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Any) -> bool:
        return False


@final
class DynamicLossScaler(LossScalerBase):
    """Halves after an overflow, doubles after `scale_window` steps without one: the engine's rule.

    Args:
        delayed_shift: the overflow that halves, counted from 1.
        consecutive_hysteresis: a step without overflow restarts the count.
        raise_error_at_min_scale: an overflow at `min_scale` raises; else the scale stays.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self._rule = DynamicScale(
            init_scale,
            scale_window,
            delayed_shift,
            consecutive=consecutive_hysteresis,
            minimum=min_scale,
        )
        self.scale_factor = SCALE_FACTOR
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        self._read()

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Some gradient is not finite."""
        return any(one.grad is not None and bool(has_inf_or_nan(one.grad)) for one in params)

    def update_scale(self, overflow: bool) -> None:
        at_end = self.cur_scale <= self.min_scale and self.cur_hysteresis <= 1
        if overflow and at_end and not self.raise_error_at_min_scale:
            state = {
                **self._rule.state_dict(),
                "last_overflow": self.cur_iter,
                "step": self.cur_iter + 1,
            }
            self._rule.load_state_dict(state)
        else:
            self._rule.after_step(overflow=overflow)
        self._read()

    def _read(self) -> None:
        state = self._rule.state_dict()
        self.cur_scale = state["value"]
        self.cur_iter, self.last_overflow_iter = int(state["step"]), int(state["last_overflow"])
        self.cur_hysteresis = int(state["left"])


@raises_theirs
def CreateLossScaler(  # noqa: N802 (DeepSpeed's name)
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """A dynamic scale for fp16, or a fixed one; 1 for other dtypes.

    Raises:
        UsageError: a dynamic scale without its arguments.
    """
    if dtype != torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise UsageError("CreateLossScaler: a dynamic scale needs dynamic_loss_args")
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)


def to_python_float(t: Any) -> float:
    return float(t.item() if hasattr(t, "item") else t[0])


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
