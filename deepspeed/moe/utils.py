"""`deepspeed.moe.utils`: parameter groups of models, which have no parameters of expert groups here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder

Group = dict[str, Any]


def is_moe_param(param: Tensor) -> bool:
    """DeepSpeed's mark of a parameter that not all data ranks share: `param.allreduce = False`."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(those that all data ranks share, those of experts), by DeepSpeed's mark."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of both kinds, in the dtype of the parameters, where there are any."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return _grads(shared), _grads(experts)


def _grads(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad.to(param.dtype) for param in params if param.grad is not None]


def is_moe_param_group(param_group: Group) -> bool:
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): DeepSpeed's layers of experts cannot be built here."""
    return False, 0


@raises_theirs
def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | tuple[Group, ...] | list[Group], max_group_size: float = 178956971
) -> list[Group]:
    """The groups as a list: every parameter is shared by all data ranks, so none is split.

    Args:
        max_group_size: of a group of experts; without effect.
    Raises:
        UsageError: a parameter is marked as an expert's; or param_groups is something else.
    """
    if not isinstance(param_groups, dict | tuple | list):
        raise UsageError(
            f"param_groups = {type(param_groups).__name__}: give a dict with params, or a list of them"
        )
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        _refuse_experts(group["params"])
    return groups


@raises_theirs
def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters as one group of the name dense-params; groups as they are."""
    if not isinstance(model_parameters, list):
        raise UsageError(f"model_parameters = {type(model_parameters).__name__}: give a list")
    for one in model_parameters:
        if not isinstance(one, Tensor | dict):
            raise TypeError(
                f"model_parameters holds a {type(one).__name__}: give parameters or groups"
            )
    if model_parameters and isinstance(model_parameters[0], nn.Parameter):
        model_parameters = [{"params": model_parameters, "name": "dense-params"}]
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def _refuse_experts(params: Iterable[Tensor]) -> None:
    if any(is_moe_param(param) for param in params):
        raise UsageError(
            "a parameter has allreduce = False, which marks experts of DeepSpeed: expert parallelism is not "
            "supported yet; experts in a plain nn.ModuleList train at every stage, all on each rank"
        )


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
