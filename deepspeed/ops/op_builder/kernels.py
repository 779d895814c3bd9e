"""What `CPUAdamBuilder().load()` and the like return: DeepSpeed's functions over xds's ops.

All of them update the given tensors in place. The number `optimizer_id` has no meaning here, except for
Adam: every call gets all hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ....ops.kernels.adagrad import adagrad_
from ....ops.kernels.adam import adam_
from ....ops.kernels.lion import lion_
from ..alone import step_tensor


def _in_fp32(run: Callable[..., None], tensors: Sequence[Tensor]) -> None:
    """Call `run` with [n] fp32 forms of `tensors`, and copy the results to those that have another form."""
    wide = [tensor.to(torch.float32).reshape(-1) for tensor in tensors]
    run(*wide)
    for values, tensor in zip(wide, tensors, strict=True):
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values.view(tensor.shape))


def _nothing(*_: object) -> int:
    return 0


class _Ops:
    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "destroy_")):
            return _nothing
        raise AttributeError(
            f"{type(self).__name__} has no function {name!r}; see ops/kernels of xds"
        )


@final
class CPUAdamOps(_Ops):
    """The op "cpu_adam". `create_adam` tells whether weight decay is decoupled, so it is kept by number."""

    def __init__(self) -> None:
        self._is_decoupled: dict[int, bool] = {}

    def create_adam(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        optimizer_id: int,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        self._is_decoupled[optimizer_id] = bool(adamw_mode)
        return 0

    def destroy_adam(self, optimizer_id: int) -> int:
        self._is_decoupled.pop(optimizer_id, None)
        return 0

    @torch.no_grad()
    def adam_update(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        """One step of Adam. grad is not changed."""
        options = (float(lr), beta1, beta2, eps, weight_decay, self._is_decoupled[optimizer_id])
        number, flat = step_tensor(step, param), grad.reshape(-1)
        _in_fp32(
            lambda p, m, v: adam_(
                p, flat, m, v, None, number, None, None, *options, bool(bias_correction)
            ),
            (param, exp_avg, exp_avg_sq),
        )
        return 0


@final
class CPULionOps(_Ops):
    """The op "cpu_lion"."""

    @torch.no_grad()
    def lion_update(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
    ) -> int:
        flat = grad.reshape(-1)
        _in_fp32(
            lambda p, m: lion_(p, flat, m, None, None, None, float(lr), beta1, beta2, weight_decay),
            (param, exp_avg),
        )
        return 0


@final
class CPUAdagradOps(_Ops):
    """The op "cpu_adagrad"."""

    @torch.no_grad()
    def adagrad_update(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        eps: float,
        weight_decay: float,
        param: Tensor,
        grad: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        number, flat = step_tensor(step, param), grad.reshape(-1)
        _in_fp32(
            lambda p, s: adagrad_(
                p, flat, s, None, number, None, None, float(lr), 0.0, eps, weight_decay
            ),
            (param, exp_avg_sq),
        )
        return 0


@final
class FusedAdamOps(_Ops):
    """The op "fused_adam": `multi_tensor_applier(ops.multi_tensor_adam, ...)`."""

    @torch.no_grad()
    def multi_tensor_adam(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        chunk_size: int,
        flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        adam_w_mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        """One step. tensor_lists: gradients, parameters, first and second moments."""
        ops = CPUAdamOps()
        ops.create_adam(0, adamw_mode=bool(adam_w_mode))
        for grad, param, mean, square in zip(*tensor_lists, strict=True):
            ops.adam_update(
                0,
                step,
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                bool(bias_correction),
                param,
                grad,
                mean,
                square,
            )


@final
class FusedLionOps(_Ops):
    """The op "fused_lion"."""

    def multi_tensor_lion(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        chunk_size: int,
        flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        step: int,
        weight_decay: float,
    ) -> None:
        """One step. tensor_lists: gradients, parameters, momenta."""
        for grad, param, mean in zip(*tensor_lists, strict=True):
            CPULionOps().lion_update(0, step, lr, beta1, beta2, weight_decay, param, grad, mean)


@final
class UtilsOps(_Ops):
    """The op "utils": one tensor of many, and back."""

    flatten = staticmethod(_flatten_dense_tensors)
    unflatten = staticmethod(_unflatten_dense_tensors)

    @staticmethod
    def cast_to_byte_tensor(value: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The bytes of a contiguous tensor, or of each: uint8 [n], the same memory."""
        if isinstance(value, Tensor):
            return value.view(-1).view(torch.uint8)
        return [tensor.view(-1).view(torch.uint8) for tensor in value]


__all__ = ["CPUAdagradOps", "CPUAdamOps", "CPULionOps", "FusedAdamOps", "FusedLionOps", "UtilsOps"]
