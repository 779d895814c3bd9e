"""`deepspeed.ops.lion.DeepSpeedCPULion`: xds's Lion with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from ...missing import placeholder
from .whole import WholeLion, is_lion


@final
class DeepSpeedCPULion(WholeLion):
    """The same optimizer as FusedLion."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """
        Args:
            fp32_optimizer_states: see DeepSpeedCPUAdam.
        """
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, betas, weight_decay)

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return is_lion(kind)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
