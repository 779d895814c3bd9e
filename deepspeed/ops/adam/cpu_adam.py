"""`deepspeed.ops.adam.DeepSpeedCPUAdam`: xds's Adam with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...errors import raises_theirs
from ...missing import placeholder
from .whole import WholeAdam, is_adam, refuse_amsgrad


@final
class DeepSpeedCPUAdam(WholeAdam):
    """The same optimizer as FusedAdam: the engine updates flat shards on the device where they are stored."""

    @raises_theirs
    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """
        Args:
            fp32_optimizer_states: without an engine: the moments are fp32, else of the parameter's dtype. In
                an engine they are always fp32.
        """
        refuse_amsgrad("DeepSpeedCPUAdam", amsgrad)
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=bool(adamw_mode),
            bias_correction=bias_correction,
        )

    @torch.no_grad()
    @raises_theirs
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient, with the states `self.state[subgroup_id]`.

        For a loop that puts the parts of a model in turn into one parameter; they share that number's states.
        """
        loss = None if closure is None else _called(closure)
        for group, param in self._with_gradients():
            self._step_whole(param, group, subgroup_id)
        return loss

    @torch.no_grad()
    @raises_theirs
    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last `step_subgroup`, up to rounding: the gradients must still be those of that step.

        Raises:
            RuntimeError: these states have made no step.
        """
        loss = None if closure is None else _called(closure)
        state = self.state.get(sub_group_id) or {}  # type: ignore[call-overload]
        if state.get("step", 0) <= 0:
            raise RuntimeError(
                f"rollback_subgroup({sub_group_id}): its states are not initialized, or all of its steps are "
                "undone; call step_subgroup first"
            )
        for group, param in self._with_gradients():
            undo_adam_(param, state, group, self.adam_w_mode)
        return loss

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return is_adam(kind)


def _called(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def undo_adam_(
    param: Tensor, state: dict[str, Any], group: dict[str, Any], adam_w_mode: bool
) -> None:
    """Undo one update of `param`, any shape, in place, and of its moments and its step count.

    Adam with decoupled weight decay is p <- (1 - lr * decay) p - u(m, v), which is solved for the old p.
    Without, the decay is in the gradient, which is known once the old p is.
    """
    beta1, beta2 = group["betas"]
    lr, decay, step = float(group["lr"]), float(group["weight_decay"]), state["step"]
    corrects = bool(group["bias_correction"])
    first = 1 - beta1**step if corrects else 1.0
    second = 1 - beta2**step if corrects else 1.0
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    grad = param.grad
    assert grad is not None
    root = (exp_avg_sq.float() / second).sqrt_().add_(group["eps"])
    old = param.float() + lr / first * exp_avg.float() / root
    if adam_w_mode:
        old /= 1 - lr * decay
    seen = grad.float() if adam_w_mode else grad.float() + decay * old
    param.copy_(old)
    exp_avg.copy_((exp_avg.float() - (1 - beta1) * seen) / beta1)
    exp_avg_sq.copy_(((exp_avg_sq.float() - (1 - beta2) * seen**2) / beta2).clamp_(min=0))
    state["step"] = step - 1


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
