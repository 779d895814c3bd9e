"""The full state dict of a sharded model: gathered parameter by parameter, to one rank or all, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...utils.progress import counted
from ..core.owners import find_owner
from ..layout.groups import FlatGroups
from .stages import GATHERING, spans_stages, whole_state_dict


def full_state_dict(
    model: nn.Module,
    groups: FlatGroups,
    *,
    target: int | None,
    full_precision: bool = False,
) -> dict[str, Any]:
    """The result of `model.state_dict()` as if nothing were sharded. A collective.

    Names and order are those of `model.state_dict()`, stage by stage where it is cut into pipeline stages; tied
    names share one tensor. Peak memory: the result plus one parameter.

    Args:
        groups: of the engine.
        target: the rank that gets it, the others return {}; None: every rank.
        full_precision: fp32 masters instead of the 16-bit values that forward uses.

    Sends: each rank sends its part of every parameter, to `target` or to all.
    """
    if spans_stages(groups):
        return whole_state_dict(model, groups, target=target, full_precision=full_precision)
    state_dict: dict[str, Any] = {}
    done: dict[int, Tensor | None] = {}
    values = model.state_dict(keep_vars=True)
    shows = groups.world.rank == 0
    with torch.no_grad():
        for name, value in counted(
            values.items(), GATHERING, len(values), "tensors", is_shown=shows
        ):
            if not isinstance(value, Tensor):
                state_dict[name] = value
                continue
            if id(value) not in done:
                done[id(value)] = _on_cpu(value, target, full_precision)
            state_dict[name] = done[id(value)]
    wanted = all(value is not None for value in done.values())
    return state_dict if wanted else {}


def _on_cpu(value: Tensor, target: int | None, full_precision: bool) -> Tensor | None:
    owner = find_owner(value)
    if owner is None:
        return value.detach().to("cpu", copy=True)
    param: nn.Parameter = value  # type: ignore[assignment]
    stored = owner.value(param) if full_precision else owner.compute(param)
    if target is not None and not owner.is_first_replica(param):
        return None
    full = stored.read(owner.group_of(param), target)
    return None if full is None else full.cpu().contiguous()


__all__ = ["full_state_dict"]
