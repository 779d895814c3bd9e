"""zero_optimization.ignore_unused_parameters = false: a step in which some parameter had no gradient raises.

As in DeepSpeed this counts at stages 1 and 2 with the optimizer offloaded. Elsewhere such parameters get zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from ...engine.engine import Engine
from ...utils.errors import UsageError

SHOWN = 3


@final
class UnusedParams:
    """Knows the parameters without a gradient since the last step; only where the config asks for it."""

    def __init__(self, engine: Engine, given: Mapping[str, Any]) -> None:
        zero = given.get("zero_optimization")
        section: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {}
        self._engine = engine
        self._is_used = (
            section.get("ignore_unused_parameters") is False
            and engine.zero_optimization_stage() in (1, 2)
            and engine.config.zero_optimization.offload_optimizer.device != "none"
        )
        self._absent: list[nn.Parameter] | None = (
            None  # None: no backward of the engine since the last step
        )

    def after_backward(self) -> None:
        """Take note of the gradients of `engine.backward`."""
        if not self._is_used:
            return
        trained = self._engine._sharded.backwards.trained
        found = [param for grads in trained for param in grads.arrivals.absent]
        still = None if self._absent is None else {id(one) for one in self._absent}
        self._absent = [one for one in found if still is None or id(one) in still]

    def forget(self) -> None:
        """The gradients of the step were dropped."""
        self._absent = None

    def before_step(self) -> None:
        """Raises UsageError: a parameter had no gradient in any backward of the step that ends now."""
        if self._absent is None or not self._engine.is_gradient_accumulation_boundary():
            return
        absent, self._absent = self._absent, None
        if not absent:
            return
        ids = {id(one) for one in absent}
        names = [name for name, one in self._engine.module.named_parameters() if id(one) in ids]
        raise UsageError(
            "zero_optimization.ignore_unused_parameters = false, and these parameters had no gradient: "
            f"{', '.join(names[:SHOWN])}{', ...' if names[SHOWN:] else ''}; use them in the loss, freeze them, "
            "or set the key to true"
        )


__all__ = ["UnusedParams"]
