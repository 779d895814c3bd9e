"""Lets an optimizer by DeepSpeed's name step without an engine, in a plain loop, as torch's optimizers do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.optim.shard_optimizer import ShardOptimizer
from ...utils.errors import UsageError
from ..errors import raises_theirs


class StepsAlone(ShardOptimizer):
    """A base class: `step` updates whole parameters until an engine has the optimizer."""

    takes_sparse = False
    fp32_optimizer_states = True

    @abstractmethod
    def step_param(
        self,
        values: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        """Update `values` and `states`, [n] fp32, of one parameter in place. grad: [n]."""

    state_names: tuple[str, ...] = ()  # of a parameter's size

    @raises_theirs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter that has a gradient. With an engine: counts for torch's schedules only.

        Returns:
            The result of `closure`, if it is given and no engine has the optimizer.
        """
        if self.is_bound:
            super().step(closure)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_whole(param, group)
        return loss

    def _step_whole(self, param: Tensor, group: dict[str, Any], key: Any = None) -> None:
        """Update one parameter with the states `self.state[key]`; None: its own."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            if not self.takes_sparse:
                raise UsageError(
                    f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} has a sparse gradient: "
                    "needs a dense one; use torch.optim.SparseAdam, or sparse=False in the embedding"
                )
            grad = grad.to_dense()
        state = self.state[param if key is None else key]
        if not state:
            dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
            state["step"] = int(group.get("step", 0))
            for name in self.state_names:
                state[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        state["step"] += 1
        values = _wide(param.detach())
        states = {name: _wide(state[name]) for name in self.state_names}
        self.step_param(values, grad.reshape(-1), states, state["step"], group)
        _write_back(values, param)
        for name, value in states.items():
            _write_back(value, state[name])


def _wide(tensor: Tensor) -> Tensor:
    """The elements as [n] fp32; the tensor's own memory where it has that form."""
    return tensor.to(torch.float32).reshape(-1)


def _write_back(values: Tensor, tensor: Tensor) -> None:
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values.view(tensor.shape))


def step_tensor(step: int, like: Tensor) -> Tensor:
    """The number of a step in the form that the ops take: fp32 []."""
    return torch.full((), float(step), dtype=torch.float32, device=like.device)


__all__ = ["StepsAlone", "step_tensor"]
