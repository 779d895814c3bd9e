"""`deepspeed.ops.lion.FusedLion`: xds's Lion with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from ...missing import placeholder
from .whole import WholeLion, is_lion


@final
class FusedLion(WholeLion):
    """Lion. Steps alone, or is passed to `initialize(optimizer=...)`. `set_grad_none` is without effect."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        # without an engine the momentum has the parameter's dtype, as in DeepSpeed
        self.fp32_optimizer_states = False
        super().__init__(params, lr, betas, weight_decay)

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return is_lion(kind)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
