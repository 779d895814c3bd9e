"""The optimizer as DeepSpeed hands it out where it keeps masters or shards: a view of the engine's own."""

from __future__ import annotations

import math
from typing import Any, NoReturn, final

from ...engine.engine import Engine
from ...ops.errors import UsageError
from ..missing import refuse_method


@final
class DeepSpeedOptimizer:
    """What scripts read of DeepSpeed's optimizer wrappers; the rest is the torch optimizer's.

    Like those it is no torch.optim.Optimizer: schedules of torch take `engine.basic_optimizer`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self._engine.loss_scale

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """The last step was skipped, because the gradients were not finite."""
        norm = self._engine.get_global_grad_norm()
        return norm is not None and not math.isfinite(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine drops gradients after each update, and keeps them in between."""

    def step(self, closure: object = None) -> NoReturn:
        raise UsageError(
            "optimizer.step(): the engine updates; call engine.step() after engine.backward(loss)"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)
        refuse_method("optimizer", name)
        return getattr(self._engine.optimizer, name)


__all__ = ["DeepSpeedOptimizer"]
