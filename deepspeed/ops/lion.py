"""`deepspeed.ops.lion`: DeepSpeed's constructors for xds's Lion, to pass to `initialize(optimizer=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...ops.optim.lion import Lion
from ..missing import placeholder


def FusedLion(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> Lion:
    """Lion. `set_grad_none` is without effect."""
    return Lion(params, lr, betas, weight_decay)


def DeepSpeedCPULion(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> Lion:
    """The same. States are always fp32."""
    return Lion(model_params, lr, betas, weight_decay)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)

# DeepSpeed has modules inside, which the table of names creates; not needed where this becomes a folder
__path__: list[str] = []
