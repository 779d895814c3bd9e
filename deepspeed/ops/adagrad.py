"""`deepspeed.ops.adagrad`: DeepSpeed's constructor for torch's fused Adagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...utils.errors import UsageError
from ..missing import placeholder


def DeepSpeedCPUAdagrad(
    model_params: Iterable[Any],
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adagrad:
    """Adagrad. States are always fp32."""
    if amsgrad:
        raise UsageError(
            "DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no AMSGrad variant; leave it out"
        )
    return torch.optim.Adagrad(model_params, lr, weight_decay=weight_decay, eps=eps, fused=True)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)

# DeepSpeed has modules inside, which the table of names creates; not needed where this becomes a folder
__path__: list[str] = []
