"""`deepspeed.runtime.precision_config`: the sections fp16 and bf16 with DeepSpeed's attributes and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from ..missing import placeholder
from .config_utils import DeepSpeedConfigModel

FP16 = "fp16"
BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section bf16."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section fp16. `loss_scale` 0 is a dynamic loss scale, which starts at 2**initial_scale_power."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _check_scale(cls, value: Any) -> float:
        if isinstance(value, bool):
            raise ValueError("fp16.loss_scale must be a number, not true or false")
        try:
            scale = float(value)
        except (TypeError, ValueError):
            raise ValueError("fp16.loss_scale must be a number") from None
        if not math.isfinite(scale):
            raise ValueError("fp16.loss_scale must be finite")
        if scale < 0:
            raise ValueError("fp16.loss_scale must be positive, or 0 for a dynamic scale")
        return scale

    @field_validator("loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _check_whole(cls, value: Any, info: ValidationInfo) -> Any:
        name = f"fp16.{info.field_name}"
        if isinstance(value, bool):
            raise ValueError(f"{name} must be an integer, not true or false")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite")
        try:
            int(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be an integer") from None
        return value

    @model_validator(mode="after")
    def _check_dynamic(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"fp16.{name} must be > 0 with a dynamic loss scale")
        return self

    def initial_dynamic_scale(self) -> int:
        """The first dynamic loss scale."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The arguments of `DynamicLossScaler`."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section bf16, under its name or its old name bfloat16."""
    section = param_dict.get(BFLOAT16)
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16_OLD, {}) if section is None else section))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section fp16."""
    return DeepSpeedFP16Config(**param_dict.get(FP16, {}))


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
