"""Checks what a script passes to `xds.initialize`, before anything is read or started."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ...pipe.module import PipelineModule
from ...utils.arguments import wrong
from ...utils.errors import UsageError


def check_arguments(model: object, *, lr_scheduler: Any, collate_fn: Any, group: Any) -> None:
    """Check the arguments that are objects.

    Raises:
        UsageError: `model` is no module, or has parameters without a shape; or another is of a wrong type.
    """
    if not isinstance(model, nn.Module):
        raise wrong("model", model, "a torch.nn.Module object; build it before xds.initialize")
    whole = (
        model.outline() if isinstance(model, PipelineModule) else model
    )  # LayerSpecs stay unbuilt
    tensors = [*whole.named_parameters(), *whole.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} is one of {len(lazy)} tensors of the model that have no shape yet (lazy modules): "
            "call the model once with a batch before xds.initialize"
        )
    if not (lr_scheduler is None or callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        raise wrong("lr_scheduler", lr_scheduler, "a scheduler, or a callable that makes one")
    if not (collate_fn is None or callable(collate_fn)):
        raise wrong("collate_fn", collate_fn, "a callable, as torch's DataLoader takes it")
    if not (group is None or hasattr(group, "size")):
        raise wrong("group", group, "a process group of torch.distributed, or None")


__all__ = ["check_arguments"]
