"""`safe_get_full_grad` and the other functions that read and write a parameter's states, in DeepSpeed's form.

All are collectives: all ranks call them with the same parameter, in the same order.

- `full`: `xds.zero.get_full_param` and the others, with None where DeepSpeed returns None: for a frozen
  parameter, and for a tensor that no engine has.
- `local`: this rank's slice as DeepSpeed cuts it, [ceil(numel / ranks)] with zeros at the end, at stage 3. The
  shards of xds have other bounds: a read sends as the function with `full`, and a write sends each rank's
  slice to every other one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....utils.errors import UsageError
from ....zero.access import full
from ....zero.core.owners import ParamOwner, find_owner
from ....zero.model.building import broadcast_whole
from ..errors import raises_theirs
from .parameters import gather_slices, is_zero_param, read_slice


def _has_states(param: nn.Parameter) -> bool:
    """The parameter is trained by an engine, or is being built for one."""
    owner = find_owner(param)
    return owner is not None and (owner.trains(param) or param.requires_grad)


# -- whole values -----------------------------------------------------------------------------------------


@raises_theirs
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """`xds.zero.get_full_param`; None for a frozen parameter."""
    return full.get_full_param(param) if _has_states(param) else None


@raises_theirs
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """`xds.zero.set_full_param`, for a frozen parameter of an engine too."""
    full.set_full_param(param, value)


@raises_theirs
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """`xds.zero.get_full_grad`; None where there is none now, and `param.grad` without an engine.

    While gradients are not summed over ranks (inside `no_sync`, and before the last backward of a step at
    stages 0 and 1) it is this rank's own, as in DeepSpeed.
    """
    owner = find_owner(param)
    if owner is None:
        return param.grad
    if not _has_states(param):
        return None
    if param.grad is not None:  # stage 0 shows it until the step
        return param.grad.clone()
    return owner.own_grad(param) if owner.holds_grads(param) else full.safe_get_full_grad(param)


@raises_theirs
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """`xds.zero.set_full_grad`; writes to `param.grad` without an engine, and nothing if frozen.

    Where the ranks pass different values, each writes that of the first one. In DeepSpeed each writes its part
    of its own.
    """
    owner = find_owner(param)
    if owner is None and param.grad is not None:
        param.grad.copy_(value)
    elif owner is None:
        full.set_full_grad(param, value)
    elif _has_states(param):
        first = broadcast_whole(owner.together(param), value.detach().clone())
        if param.grad is None:
            full.set_full_grad(param, first)
        else:  # stage 0 shows it until the step
            with torch.no_grad():
                param.grad.copy_(first)


@raises_theirs
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """`xds.zero.get_full_optimizer_state`; None for a frozen parameter, and where there is none yet."""
    if not _has_states(param):
        return None
    return full.safe_get_full_optimizer_state(param, optim_state_key)


@raises_theirs
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """`xds.zero.set_full_optimizer_state`; nothing if the parameter is frozen."""
    if find_owner(param) is None or _has_states(param):
        full.set_full_optimizer_state(param, value, optim_state_key)


# -- a rank's own slice -------------------------------------------------------------------------------------


def _sharded(doing: str, param: nn.Parameter) -> ParamOwner:
    owner = find_owner(param)
    if owner is None or not is_zero_param(param):
        raise UsageError(
            f"{doing}: is for parameters that are sharded at stage 3 on several ranks; use the function with "
            "`full` instead of `local`, which works at every stage"
        )
    return owner


def _own(doing: str, param: nn.Parameter, read: Callable[[], Tensor | None]) -> Tensor | None:
    owner = _sharded(doing, param)
    whole = read()
    return None if whole is None else read_slice(param, owner, whole)


@raises_theirs
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's slice of the fp32 master; None for a frozen parameter."""
    return _own("safe_get_local_fp32_param", param, lambda: safe_get_full_fp32_param(param))


@raises_theirs
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's slice of the gradient that step() will use; None where there is none now."""
    return _own("safe_get_local_grad", param, lambda: safe_get_full_grad(param))


@raises_theirs
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's slice of an optimizer state, such as "exp_avg"; None where there is none yet."""
    return _own(
        "safe_get_local_optimizer_state",
        param,
        lambda: safe_get_full_optimizer_state(param, optim_state_key),
    )


@raises_theirs
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's slice of the master and of the parameter; padding is ignored."""
    owner = _sharded("safe_set_local_fp32_param", param)
    whole = gather_slices("safe_set_local_fp32_param", param, owner, value)
    safe_set_full_fp32_param(param, whole)


@raises_theirs
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's slice of the gradient that step() will use; padding is ignored."""
    owner = _sharded("safe_set_local_grad", param)
    whole = gather_slices("safe_set_local_grad", param, owner, value)
    safe_set_full_grad(param, whole)


@raises_theirs
def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Overwrite this rank's slice of an optimizer state; padding is ignored."""
    owner = _sharded("safe_set_local_optimizer_state", param)
    whole = gather_slices("safe_set_local_optimizer_state", param, owner, value)
    safe_set_full_optimizer_state(param, whole, optim_state_key)
