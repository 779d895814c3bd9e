"""Lion on whole parameters, and what FusedLion and DeepSpeedCPULion have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ops.kernels.lion import lion_
from ....ops.optim.lion import Lion
from ..alone import StepsAlone


class WholeLion(StepsAlone, Lion):
    """xds's Lion. Without an engine it updates whole parameters, with the same op."""

    kind = "Lion"
    state_names = ("exp_avg",)

    def step_param(
        self,
        values: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        lion_(
            values,
            grad,
            states["exp_avg"],
            None,
            None,
            None,
            float(group["lr"]),
            *group["betas"],
            group["weight_decay"],
        )


def is_lion(kind: type) -> Any:
    """For __subclasshook__: the Lion that the engine makes is an instance of both of DeepSpeed's classes."""
    return True if kind is Lion else NotImplemented


__all__ = ["WholeLion", "is_lion"]
