"""`deepspeed.ops.adagrad.DeepSpeedCPUAdagrad`: xds's Adagrad with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor

from ....ops.kernels.adagrad import adagrad_
from ....ops.optim.adagrad import Adagrad
from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder
from ..alone import StepsAlone, step_tensor


@final
class DeepSpeedCPUAdagrad(StepsAlone, Adagrad):
    """Adagrad. Steps alone, also with sparse gradients, or is passed to `initialize(optimizer=...)`."""

    kind = "Adagrad"
    state_names = ("exp_avg_sq",)  # DeepSpeed's name of the sum of squares, without an engine
    takes_sparse = True

    @raises_theirs
    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """
        Args:
            fp32_optimizer_states: see DeepSpeedCPUAdam.
        """
        if amsgrad:
            raise UsageError(
                "DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no AMSGrad variant; leave it out"
            )
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)

    def step_param(
        self,
        values: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        adagrad_(
            values,
            grad,
            states["exp_avg_sq"],
            None,
            step_tensor(step, values),
            None,
            None,
            float(group["lr"]),
            group["lr_decay"],
            group["eps"],
            group["weight_decay"],
        )

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return True if kind is Adagrad else NotImplemented


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
