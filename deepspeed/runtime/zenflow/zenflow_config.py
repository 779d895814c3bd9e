"""`deepspeed.runtime.zenflow.zenflow_config`: the section zenflow, for reading. The engine refuses it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...missing import placeholder
from ..config_utils import DeepSpeedConfigModel

Interval = Literal["auto"] | int


class ZenFlowConfig(DeepSpeedConfigModel):
    """The largest gradients update their parameters in each step, the others at intervals."""

    topk_ratio: float = Field(0.1, gt=0.0, lt=1.0)
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Interval = "auto"
    update_interval: Literal["auto"] | int = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = Field(0.99, ge=0.0, le=1.0)
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: float = Field(0.5, ge=0.0, le=1.0)
    steps_per_epoch: int | None = Field(None, exclude=True)

    def model_post_init(self, context: Any) -> None:
        """Raise ValueError where update_interval is below 1."""
        if self.update_interval != "auto" and self.update_interval < 1:
            raise ValueError(
                f"update_interval = {self.update_interval}: must be at least 1, or auto"
            )


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
