"""`deepspeed.ops.adam.DeepSpeedCPUAdam`: xds's Adam with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

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

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        return is_adam(kind)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
