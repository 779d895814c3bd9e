"""Norms and overflow of gradients outside an engine: functions of `deepspeed.runtime.utils`.

With an `mpu` a norm is that of a model cut over its model-parallel ranks. The engine has its own, which a step
uses: `engine.get_global_grad_norm()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..utils import groups

IS_PARALLEL = ("model_parallel", "tensor_model_parallel")


def has_inf_or_nan(x: Tensor) -> Tensor:
    """A bool tensor without dimensions: some element is not finite."""
    return ~torch.isfinite(x).all()


def is_invalid_grad_norm(norm: Any) -> bool:
    """A norm that is not finite, or negative: `get_weight_norm` returns -1 for such a one.

    Shapes:  any, if it is a tensor: one invalid element is enough.
    """
    if isinstance(norm, Tensor):
        return bool((~torch.isfinite(norm) | (norm < 0)).any())
    value = float(norm)
    return value < 0 or not math.isfinite(value)


def is_model_parallel_parameter(p: Any) -> bool:
    """The parameter is marked as cut over model-parallel ranks."""
    return any(bool(getattr(p, name, False)) for name in IS_PARALLEL)


def _is_expert(param: Any) -> bool:
    return not getattr(param, "allreduce", True)


def _counts(p: Any, mpu: Any) -> bool:
    """Whether this rank counts the tensor: one that every model-parallel rank has is counted once."""
    return mpu is None or mpu.get_model_parallel_rank() == 0 or is_model_parallel_parameter(p)


def _norm(tensors: Sequence[Tensor], norm_type: float, mpu: Any, device: torch.device) -> Tensor:
    """The p-norm of all elements; over the model-parallel ranks where there is an mpu."""
    norms = [torch.linalg.vector_norm(one.detach().float(), norm_type) for one in tensors]
    total = torch.zeros((), device=device)
    if norms:
        stacked = torch.stack(norms)
        total = stacked.max() if norm_type == math.inf else stacked.pow(norm_type).sum()
    if mpu is not None:
        op = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return total if norm_type == math.inf else total.pow(1.0 / norm_type)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before.

    The norm is the mean over the data-parallel ranks, whose experts may differ. A collective of them.
    """
    several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    graded = [(param, param.grad) for param in several if param.grad is not None]
    if not graded:
        return torch.zeros(())
    counted = [grad for param, grad in graded if _counts(param, mpu)]
    norm = _norm(counted, float(norm_type), mpu, graded[0][1].device)
    group = groups.get_data_parallel_group()
    norm /= dist.get_world_size(group)
    dist.all_reduce(norm, group=group)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, grad in graded:
        grad.mul_(factor)
    return norm


def get_weight_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None
) -> float:
    """The norm of tensors; -1 where it is not finite."""
    several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    counted = [one for one in several if _counts(one, mpu)]
    device = several[0].device if several else torch.device("cpu")
    norm = float(_norm([one.data for one in counted], float(norm_type), mpu, device))
    return norm if math.isfinite(norm) else -1.0


def get_flattened_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    grad_norm_mask: Any = None,
) -> float:
    """The norm of the gradients; -1 where it is not finite."""
    several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    counted = [one for one in several if one.grad is not None and _counts(one, mpu)]
    device = several[0].device if several else torch.device("cpu")
    grads = [one.grad for one in counted if one.grad is not None]
    norm = float(_norm(grads, float(norm_type), mpu, device))
    return norm if math.isfinite(norm) else -1.0


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The 2-norm of parts with these norms; inf where one of them is no norm, such as -1."""
    norms = [float(norm) for norm in norm_list]
    if any(is_invalid_grad_norm(norm) for norm in norms):
        return math.inf
    return math.sqrt(sum(norm**2 for norm in norms))


def combine_grad_norm_groups(norm_groups: Iterable[Tensor | float], norm_type: float = 2) -> Tensor:
    """The norm of groups with these norms, []; inf where one of them is no norm, such as -1."""
    norms = list(norm_groups)
    device = next((one.device for one in norms if isinstance(one, Tensor)), None)
    stacked = torch.stack([torch.as_tensor(one, device=device).float() for one in norms])
    combined = torch.linalg.vector_norm(stacked, norm_type)
    is_valid = (torch.isfinite(stacked) & (stacked >= 0)).all()
    return torch.where(is_valid, combined, torch.full_like(combined, math.inf))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """The norm of all elements of the tensors; -1 where it is not finite."""
    norm = _norm_of(input_tensors, norm_type, mpu)
    return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, -1.0))


def _norm_of(tensors: Sequence[Tensor], norm_type: float, mpu: Any) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return _norm(tensors, float(norm_type), mpu, device)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Scale the tensors so that their norm is at most `max_norm`; returns the norm before."""
    norm = _norm_of(input_tensors, 2, mpu) if global_norm is None else global_norm
    factor = max_norm / (float(norm) + eps)
    if factor < 1:
        for one in input_tensors:
            one.detach().mul_(factor)
    return norm


@final
class CheckOverflow:
    """Whether some gradient is not finite, on this rank or on one with another part of the model.

    Args:
        param_groups: lists of parameters.
        zero_reduce_scatter: ask all ranks.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params = [param for group in param_groups or () for param in group]
        self.zero_reduce_scatter = zero_reduce_scatter
        self.has_moe_params = any(map(_is_expert, self.params))

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Whether a norm is -1 or not finite. A collective where there are experts, an mpu, or `reduce`."""
        is_over = any(map(is_invalid_grad_norm, norm_group))
        return self._anywhere(
            is_over, self.has_moe_params or (self.mpu is None and reduce_overflow)
        )

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Whether a gradient is not finite."""
        given = param_groups is not None
        params = (
            [param for group in param_groups or () for param in group] if given else self.params
        )
        return self.has_overflow(params)

    def has_overflow(self, params: Sequence[Tensor], has_moe_params: bool | None = None) -> bool:
        has_experts = any(map(_is_expert, params)) if has_moe_params is None else has_moe_params
        return self._anywhere(
            self.has_overflow_serial(params), has_experts or self.zero_reduce_scatter
        )

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """On this rank alone."""
        return any(one.grad is not None and bool(has_inf_or_nan(one.grad)) for one in params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor, i: int = 0) -> Tensor:
        return has_inf_or_nan(x)

    def _anywhere(self, is_over: bool, asks_everyone: bool) -> bool:
        """The answer of this rank, of all ranks, or of the model-parallel ranks."""
        if not asks_everyone and self.mpu is None:
            return is_over
        device = getattr(self.params[0], "device", None) if self.params else None
        flag = torch.tensor([float(is_over)], device=device)
        group = None if asks_everyone else self.mpu.get_model_parallel_group()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())


__all__ = ["CheckOverflow", "clip_grad_norm_", "get_weight_norm", "has_inf_or_nan"]
