"""Moves a model to its device and checks that it can be trained, before it is sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...ops.torch_internals import set_values
from ...utils.errors import UsageError
from ..core.owners import find_owner, is_trained


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to `device`, in place; parameters in slices are there already."""
    for param in model.parameters():
        if find_owner(param) is None:
            set_values(param, param.data.to(device))
    for buffer in model.buffers():
        set_values(buffer, buffer.data.to(device))


def check_model(model: nn.Module, groups: Mapping[int, int], *, must_train: bool = True) -> None:
    """Check that this model can be trained, before anything is moved or allocated.

    Raises:
        UsageError: parameters without values, of unsupported dtype, of another engine, on several devices,
            or none to train; lists all problems.
    """
    problems: list[str] = []
    if must_train and torch.is_inference_mode_enabled():
        problems.append(
            "xds.initialize was called inside torch.inference_mode(): tensors made there cannot be trained; "
            "call it outside"
        )
    for name, param in model.named_parameters():
        if param.is_meta:
            problems.append(f"{name} is on the meta device: give it values before initialize")
        elif id(param) in groups and param.is_inference():
            problems.append(
                f"{name} was made inside torch.inference_mode(): build the model outside"
            )
        elif param.dtype.is_complex:
            problems.append(f"{name} is {param.dtype}: complex parameters are not supported")
        if is_trained(param):
            problems.append(
                f"{name} already belongs to another engine: call destroy() on that engine first, or "
                "give this one a model of its own"
            )
    if must_train and not any(id(p) in groups and p.numel() for p in model.parameters()):
        problems.append(
            "the model has no trainable parameter: set requires_grad on at least one, "
            "and pass it in model_parameters"
        )
    devices = {str(param.device) for param in model.parameters() if find_owner(param) is None}
    if len(devices) > 1:
        problems.append(f"parameters lie on {sorted(devices)}: move the model to one device")
    if problems:
        shown = problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else [])
        raise UsageError("; ".join(shown))


__all__ = ["check_model", "move_model"]
