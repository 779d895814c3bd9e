"""`deepspeed.ops.adam.FusedAdam`: xds's Adam with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from ...errors import raises_theirs
from ...missing import placeholder
from .multi_tensor_apply import MultiTensorApply
from .whole import WholeAdam, is_adam, refuse_amsgrad

multi_tensor_applier = MultiTensorApply(2048 * 32)


@final
class FusedAdam(WholeAdam):
    """AdamW, or Adam with `adam_w_mode=False`. Steps alone, or is passed to `initialize(optimizer=...)`."""

    @raises_theirs
    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """
        Args:
            set_grad_none: what `zero_grad()` does where it gets no argument.
        """
        refuse_amsgrad("FusedAdam", amsgrad)
        self.set_grad_none = set_grad_none
        # without an engine the moments have the parameter's dtype, as in DeepSpeed
        self.fp32_optimizer_states = False
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=bool(adam_w_mode),
            bias_correction=bias_correction,
        )

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return is_adam(kind)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
