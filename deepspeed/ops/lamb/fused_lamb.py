"""`deepspeed.ops.lamb.FusedLamb`: xds's LAMB with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ....ops.kernels.lamb import lamb_apply_, lamb_direction_
from ....ops.optim.lamb import Lamb, clamped
from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder
from ..alone import StepsAlone, step_tensor


@final
class FusedLamb(StepsAlone, Lamb):
    """LAMB, at every stage and precision. Steps alone, or is passed to `initialize(optimizer=...)`."""

    kind = "Lamb"
    state_names = ("exp_avg", "exp_avg_sq")

    @raises_theirs
    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        asked = {
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
        }
        for name, value in asked.items():
            if value:
                raise UsageError(
                    f"FusedLamb({name}={value}): not covered; leave it out"
                    + (
                        " and set gradient_clipping in the config"
                        if name == "max_grad_norm"
                        else ""
                    )
                )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )

    def step_param(
        self,
        values: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        bounds = torch.tensor([0, values.numel()], device=values.device)
        norms = torch.zeros(1, 2, dtype=torch.float64, device=values.device)
        direction = torch.empty_like(values)
        lamb_direction_(
            values,
            grad,
            states["exp_avg"],
            states["exp_avg_sq"],
            direction,
            norms,
            bounds,
            step_tensor(step, values),
            None,
            None,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
        )
        rate = float(group["lr"]) * clamped(norms[0].tolist(), group)
        rates = torch.tensor([rate], dtype=torch.float32, device=values.device)
        lamb_apply_(values, direction, None, bounds, rates, None)

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return True if kind is Lamb else NotImplemented


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
