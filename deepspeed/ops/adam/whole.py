"""Adam on whole parameters, and what FusedAdam and DeepSpeedCPUAdam have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ops.kernels.adam import adam_
from ....ops.optim.adam import Adam
from ....utils.errors import UsageError
from ..alone import StepsAlone, step_tensor


class WholeAdam(StepsAlone, Adam):
    """xds's Adam. Without an engine it updates whole parameters, with the same op."""

    kind = "Adam"
    state_names = ("exp_avg", "exp_avg_sq")

    def step_param(
        self,
        values: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        adam_(
            values,
            grad,
            states["exp_avg"],
            states["exp_avg_sq"],
            None,
            step_tensor(step, values),
            None,
            None,
            float(group["lr"]),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            self.adam_w_mode,
            bool(group["bias_correction"]),
        )


def is_adam(kind: type) -> Any:
    """For __subclasshook__: the Adam that the engine makes is an instance of both of DeepSpeed's classes."""
    return True if kind is Adam else NotImplemented


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise UsageError(
            f"{name}(amsgrad=True): not supported, in DeepSpeed either; pass torch.optim.AdamW(amsgrad=True)"
        )


__all__ = ["WholeAdam", "is_adam", "refuse_amsgrad"]
