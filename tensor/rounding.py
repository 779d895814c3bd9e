"""Values that are rounded otherwise: what that changes in a gradient is no difference of two computations."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def computed_in(tensor: Tensor) -> torch.dtype:
    """Its dtype, or that of autocast, whichever has fewer bits."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor.dtype
    return max(
        tensor.dtype, torch.get_autocast_dtype(kind), key=lambda dtype: torch.finfo(dtype).eps
    )


def rounded_otherwise(values: Tensor) -> Tensor:
    """`values`, of which each is one rounding larger or smaller. Zeros stay."""
    generator = torch.Generator(values.device).manual_seed(2)
    eps = torch.finfo(computed_in(values)).eps
    signs = torch.empty_like(values, dtype=torch.float32).bernoulli_(0.5, generator=generator)
    return values * signs.mul_(2 * eps).add_(1 - eps).to(values.dtype)


@torch.no_grad()
def round_otherwise(block: nn.Module) -> None:
    """The same for the parameters of `block`."""
    for param in block.parameters():
        if param.is_floating_point():
            param.data = rounded_otherwise(param.data)


__all__ = ["computed_in", "round_otherwise", "rounded_otherwise"]
