"""`optimizer.loss_scaler`: the loss scale of an engine, with the names of DeepSpeed's scalers, for reading."""

from __future__ import annotations

from typing import Any, final

from ....engine.engine import Engine
from .loss_scaler import SCALE_FACTOR, LossScalerBase

# name -> key of the state of the engine's dynamic scale
_STATE = {"cur_iter": "step", "last_overflow_iter": "last_overflow", "cur_hysteresis": "left"}
# name -> key of the config's section fp16
_KEYS = {
    "scale_window": "loss_scale_window",
    "min_scale": "min_loss_scale",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
}


@final
class RunningScaler(LossScalerBase):
    """Its values are those of now. Only a dynamic scale has a window, a count of steps and a hysteresis."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:  # type: ignore[override]
        """The loss scale of the next backward."""
        return self._engine.loss_scale

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        """The scale follows the gradients."""
        fp16 = self._engine.config.fp16
        return bool(fp16.enabled and not fp16.loss_scale)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine" or not self.dynamic:
            raise AttributeError(name)
        if name in _STATE:
            return int(self._engine._parts.loss_scale.state_dict()[_STATE[name]])
        if name in _KEYS:
            return getattr(self._engine.config.fp16, _KEYS[name])
        if name == "scale_factor":
            return SCALE_FACTOR
        raise AttributeError(name)


__all__ = ["RunningScaler"]
