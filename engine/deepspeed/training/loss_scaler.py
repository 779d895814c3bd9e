"""`deepspeed.runtime.fp16.loss_scaler`: loss scales, and what a script reads of an engine's.

The engine has its own scale (`engine.loss_scale`); the classes here are for loops of scripts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from ...optim.loss_scale import DynamicScale

SCALE_FACTOR = 2.0


class LossScalerBase:
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
        return any(
            one.grad is not None and not bool(torch.isfinite(one.grad).all()) for one in params
        )

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
