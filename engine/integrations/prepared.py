"""The results of `prepare`: a model that calls the engine, and an optimizer whose step is the engine's."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ...utils.errors import UsageError
from ..data.batches import move
from ..engine import Engine


@final
class EngineModel(nn.Module):
    """The user's model, `module`, called through its engine. Unknown attributes are read from the module."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine
        self._has_gradients = False
        self.was_skipped = False  # the last step overflowed and changed nothing
        self._is_accelerate_prepared = (
            True  # accelerate's own flag: it does not prepare the object again
        )
        section = engine.config
        self._dtype: torch.dtype | None = None
        if section.bf16.enabled or section.fp16.enabled:
            self._dtype = torch.bfloat16 if section.bf16.enabled else torch.float16
        self.train(engine.module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward; with 16-bit precision floating-point inputs are cast, except scalars."""
        engine = self.engine
        if self._dtype is not None:
            args, kwargs = move((args, kwargs), engine.device, self._dtype)
        return engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool, retain_graph: bool = False) -> None:
        """The engine's backward of one micro-batch; `is_last` of its step. The loss is not divided."""
        engine = self.engine
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        self._has_gradients = True
        if not is_last:
            engine.step()  # counts the micro-batch; nothing is updated before the boundary

    def step(self) -> None:
        """The engine's update, with all gradients since the last update."""
        engine = self.engine
        engine.set_gradient_accumulation_boundary(True)
        self._has_gradients = False
        engine.step()
        self.was_skipped = not engine.was_step_applied()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients since the last step; if there are none, nothing is sent."""
        if self._has_gradients:
            self._has_gradients = False
            self.engine.zero_grad()

    def clip(self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float) -> Tensor:
        """The gradients' norm over all ranks, [] fp32; the next step clips to `max_norm`."""
        engine = self.engine
        requested = {
            id(p) for p in ([parameters] if isinstance(parameters, Tensor) else list(parameters))
        }
        left_out = [
            name
            for name, p in self.module.named_parameters()
            if p.requires_grad and id(p) not in requested
        ]
        if left_out:
            raise UsageError(
                f"clip_grad_norm_ without {', '.join(left_out[:3])}{', ...' if left_out[3:] else ''}: the "
                "engine clips all trained parameters of the model together; pass model.parameters()"
            )
        if not max_norm > 0:
            raise UsageError(
                f"clip_grad_norm_(max_norm={max_norm}): must be above 0, or inf to measure"
            )
        return torch.tensor(engine.clip_grad_norm(float(max_norm)), device=engine.device)

    def no_sync(self) -> AbstractContextManager[None]:
        """The engine's no_sync."""
        context: AbstractContextManager[None] = self.engine.no_sync()
        return context

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """Whole tensors by the names of `module`, on the CPU; {} on other ranks. A collective."""
        return self.engine.full_state_dict(rank0_only=rank0_only)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole tensors by the names of `module`, on every rank. A collective."""
        return self.full_state_dict(rank0_only=False)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Overwrite `module` by whole values, the same on every rank. A collective."""
        self.engine.load_state_dict(state_dict, strict=strict)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing if the model already has this dtype and device.

        Raises:
            UsageError: another dtype or device; the engine cannot move its parameters.
        """
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        param = next(self.module.parameters(), None)
        if param is not None and dtype not in (None, param.dtype):
            raise UsageError(
                f"model.to({dtype}): an engine holds the parameters as {param.dtype}; set the precision "
                "in the config (bf16.enabled, fp16.enabled) and remove bf16_full_eval and fp16_full_eval"
            )
        here: torch.device = self.engine.device
        if device is not None and (device.type, device.index or 0) != (here.type, here.index or 0):
            raise UsageError(
                f"model.to({device}): the engine holds the parameters on {here}; call engine.destroy() first"
            )
        return self

    def destroy(self) -> None:
        """Restore the module, whole and without hooks. A collective."""
        self.engine.destroy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@final
class EngineOptimizer(AcceleratedOptimizer):
    """The engine's optimizer for schedules and scripts; step and zero_grad are the engine's."""

    def __init__(self, model: EngineModel) -> None:
        super().__init__(model.engine.optimizer, device_placement=False, scaler=None)
        self.model = model
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """The engine's step on an accumulation boundary; nothing between boundaries."""
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure): the engine does not support a closure; remove it"
            )
        if self.gradient_state.sync_gradients:
            self.model.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients since the last step, on an accumulation boundary."""
        if self.gradient_state.sync_gradients:
            self.model.zero_grad()

    @property
    def step_was_skipped(self) -> bool:
        return self.model.was_skipped


__all__ = ["EngineModel", "EngineOptimizer"]
