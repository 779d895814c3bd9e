"""`deepspeed.runtime.zero.offload_states`: where an engine's states are, and moves of a plain optimizer's.

`engine.offload_states` and `engine.reload_states` move those of an engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....engine.engine import Engine
from ....zero.core.state_memory import StateMemory
from ...accelerator.real_accelerator import get_accelerator
from ...missing import placeholder
from .offload_config import OffloadStateTypeEnum


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices of this rank's part of a state of the engine `model`; nothing is sent.

    Gradients that `offload_states` has released are nowhere: contiguous_grad_buffer has no device then, and
    lp_grads has the host's, because sums are made there again after a reload.
    """
    engine: Engine = getattr(model, "_engine", model)
    memory = StateMemory(engine._parts.updater)
    own = engine.device if engine.device.type == "cpu" or engine.device.index is not None else None
    device = own or torch.device(engine.device.type, torch.cuda.current_device())
    is_away = engine._states.are_offloaded
    if state == OffloadStateTypeEnum.contiguous_grad_buffer:
        return set() if is_away else {device}
    if state == OffloadStateTypeEnum.lp_grads:
        is_on_host = engine.config.zero_optimization.offload_optimizer.device != "none"
        return {torch.device("cpu") if is_away or is_on_host else device}
    tensors = {
        OffloadStateTypeEnum.optim_states: memory.state_tensors,
        OffloadStateTypeEnum.hp_params: memory.master_tensors,
        OffloadStateTypeEnum.lp_params: engine._parts.sharded.memory.param_tensors,
    }[OffloadStateTypeEnum(state)]
    host = torch.device("cpu")
    return {
        host if is_moved else one.device
        for one in tensors()
        for is_moved in (engine._states.is_on_host(one),)
        if one.numel() and (is_moved or one.untyped_storage().nbytes())  # not gathered at stage 3
    }


def offload_optimizer_states(
    optimizer: torch.optim.Optimizer,
    device: Any,
    pin_memory: bool = False,
    non_blocking: bool = False,
) -> None:
    """Move the state tensors of a plain optimizer to `device`; to page-locked memory with `pin_memory`."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            moved = value.to(device, non_blocking=non_blocking)
            pins = pin_memory and value.device.type != "cpu" and moved.device.type == "cpu"
            state[name] = get_accelerator().pin_memory(moved) if pins else moved


def reload_optimizer_states(
    optimizer: torch.optim.Optimizer, device: Any, non_blocking: bool = False
) -> list[Tensor]:
    """Move them to `device`; returns the tensors from before, which a non-blocking copy may still read."""
    before: list[Tensor] = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                before.append(value)
                state[name] = value.to(device, non_blocking=non_blocking)
    return before


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
