"""The optimizer that DeepSpeed returns where it has masters or shards: a view of the engine's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engine.engine import Engine
from ..missing import refuse_method
from .fp16.loss_scaler import LossScaleConfig
from .fp16.running_scaler import RunningScaler


def norm_of_last_step(engine: Engine) -> float | None:
    """The norm before clipping; inf after a skipped step, as in DeepSpeed, whatever the gradients were."""
    norm = engine.get_global_grad_norm()
    return math.inf if norm is not None and math.isnan(norm) else norm


MODES = (
    "train",
    "eval",
)  # of optimizers without a schedule, which evaluate other values than they train


class DeepSpeedOptimizer:
    """The attributes of DeepSpeed's optimizer wrappers that scripts use; all others are the torch optimizer's.

    Like those wrappers it is not a torch.optim.Optimizer: pass `engine.basic_optimizer` to torch's schedules.
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
        """Whether the last step was skipped because the gradients were not finite."""
        norm = self._engine.get_global_grad_norm()
        return norm is not None and not math.isfinite(norm)

    @property
    def loss_scaler(self) -> RunningScaler:
        """The scale and its state, always those of now."""
        return self._scaler()

    def _scaler(self) -> RunningScaler:
        kept: RunningScaler | None = self.__dict__.get("_kept_scaler")
        if kept is None:
            kept = self.__dict__["_kept_scaler"] = RunningScaler(self._engine)
        return kept

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is adjusted automatically."""
        fp16 = self._engine.config.fp16
        return bool(fp16.enabled and not fp16.loss_scale)

    @property
    def custom_loss_scaler(self) -> bool:
        return False

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """The dtype of the parameters in forward and backward."""
        config = self._engine.config
        half = torch.float16 if config.fp16.enabled else torch.bfloat16
        return half if config.fp16.enabled or config.bf16.enabled else torch.float32

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """The loss scale and its state now."""
        fp16 = self._engine.config.fp16
        arguments = {
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": fp16.hysteresis,
        }
        made = LossScaleConfig(
            self.low_precision_dtype, self.dynamic_loss_scale, fp16.loss_scale, arguments
        )
        made.cur_scale = self.cur_scale
        if made.dynamic_loss_scale:
            state = self._engine._parts.loss_scale.state_dict()
            made.cur_iter, made.last_overflow_iter = int(state["step"]), int(state["last_overflow"])
            made.cur_hysteresis = int(state["left"])
        return made

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before its backward: in fp16 with a dynamic scale."""
        return self.dynamic_loss_scale

    @property
    def optimizer(self) -> Any:
        """The torch optimizer."""
        return self._engine.optimizer

    @property
    def _global_grad_norm(self) -> float:
        """The norm of the last step, as `engine.get_global_grad_norm()`; 0 before the first step."""
        return norm_of_last_step(self._engine) or 0.0

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`engine.backward`, but the loss is not divided by the accumulation steps."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`xds.Engine.zero_grad`: drop the gradients of the step."""
        self._engine.optimizer.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`engine.step()` without the schedule. Returns the result of `closure`."""
        return self._engine.optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)
        refuse_method("optimizer", name)
        found = getattr(self._engine.optimizer, name)
        return partial(self._switch, found) if name in MODES and callable(found) else found

    def _switch(self, mode: Callable[[], None]) -> None:
        """Call `mode`, which changes masters, and give their values to all ranks' parameters. A collective."""
        model, updater = self._engine._parts.sharded, self._engine._parts.updater
        model.before_update()
        with torch.no_grad(), updater.in_memory():
            updater.take_edits()
            mode()
            for master in updater.masters:
                master.write_compute()
                if master.is_sharded or master.params.is_sharded:
                    master.publish()
        model.wait_published()


__all__ = ["DeepSpeedOptimizer", "norm_of_last_step"]
