"""`deepspeed.ops.adam`: DeepSpeed's constructors for xds's Adam, to pass to `initialize(optimizer=...)`.

FusedAdam and DeepSpeedCPUAdam are the same here: the engine updates flat shards on their own device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...ops.optim.adam import Adam
from ...utils.errors import UsageError
from ..missing import placeholder


def FusedAdam(  # noqa: PLR0913 (DeepSpeed's arguments)
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Adam:
    """AdamW, or Adam with `adam_w_mode=False`. `set_grad_none` is without effect."""
    _refuse_amsgrad("FusedAdam", amsgrad)
    return Adam(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
    )


def DeepSpeedCPUAdam(  # noqa: PLR0913 (DeepSpeed's arguments)
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> Adam:
    """The same. States are always fp32."""
    _refuse_amsgrad("DeepSpeedCPUAdam", amsgrad)
    return Adam(
        model_params,
        lr,
        betas,
        eps,
        weight_decay,
        adam_w_mode=adamw_mode,
        bias_correction=bias_correction,
    )


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise UsageError(
            f"{name}(amsgrad=True): not supported, in DeepSpeed either; pass torch.optim.AdamW(amsgrad=True)"
        )


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)

# DeepSpeed has modules inside, which the table of names creates; not needed where this becomes a folder
__path__: list[str] = []
