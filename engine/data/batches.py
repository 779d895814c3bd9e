"""Moves batches to the device, calls the module with them, and takes the loss from its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from .lanes import lane_to
from .nested import replaced


def move(batch: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """Move every tensor in `batch` to `device`; cast fp32 tensors to `float_dtype`, if given.

    Scalars are not cast: they are counts or weights, which 16 bits would round, and a scalar never decides
    the dtype of a result. Tensors that xds's loaders have pinned are copied beside the computation.
    """
    copies = lane_to(device).copies_of(batch)

    def one(tensor: Tensor) -> Tensor:
        casts = tensor.dtype == torch.float32 and tensor.dim() > 0
        arrived = copies.get(id(tensor), tensor)
        return arrived.to(device=device, dtype=float_dtype if casts else None, non_blocking=True)

    def other(value: Any) -> Any:
        return value.to(device) if _moves_itself(value) else value

    # what goes into a module in 16 bits may be an object that the module writes to: it stays the same one
    return replaced(batch, one, other) if float_dtype is None else replaced(batch, one)


def _moves_itself(value: Any) -> bool:
    is_movable = callable(getattr(value, "to", None))
    return is_movable and not isinstance(value, nn.Module | type)


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call `function` with a mapping as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, tuple | list):
        return function(*batch)
    return function(batch)


def loss_of(output: Any) -> Tensor:
    """The loss in a module's output: the output itself, its `loss`, or the first element of a tuple.

    Raises:
        UsageError: the output has no loss.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0] if output else None
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the module returned {type(output).__name__} without a loss: train_batch and eval_batch need the "
            "loss itself, a tuple that starts with it, or an object with .loss"
        )
    return loss


def check_loss(loss: object) -> None:
    """Raises UsageError unless `loss` is a scalar that backward can start from."""
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"backward({type(loss).__name__}): needs the loss, a scalar tensor; if the model returns an "
            "output object, pass its .loss"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"backward() got a loss of shape {tuple(loss.shape)}: the loss must be a scalar tensor; reduce it "
            "with .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "backward() got a loss without a graph: compute it from the engine's output with gradients enabled"
        )
