"""The optimizer as DeepSpeed hands it out where it keeps masters or shards: a view of the engine's own."""

from __future__ import annotations

import math
from typing import Any, NoReturn, final

from torch import Tensor

from ...engine.engine import Engine
from ...utils.errors import UsageError
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

    @property
    def loss_scaler(self) -> DeepSpeedOptimizer:
        """What has `cur_scale` and `loss_scale`."""
        return self

    @property
    def dynamic_loss_scale(self) -> bool:
        """The loss scale changes by itself."""
        fp16 = self._engine.config.fp16
        return bool(fp16.enabled and not fp16.loss_scale)

    @property
    def custom_loss_scaler(self) -> bool:
        return False

    @property
    def optimizer(self) -> Any:
        """The torch optimizer."""
        return self._engine.optimizer

    @property
    def _global_grad_norm(self) -> float:
        """The norm of the last step, as `engine.get_global_grad_norm()`; 0 before one."""
        return self._engine.get_global_grad_norm() or 0.0

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`engine.backward`, but the loss is not divided by the accumulation steps."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

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
