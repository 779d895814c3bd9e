"""What a script sees in place of a dropped parameter: NaN of the right shape, which torch refuses to write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def placeholder_like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The placeholder for a dropped parameter: one NaN expanded to its shape; torch refuses most writes.

    Integers read as their smallest value. Bools read as True, stored as a byte that no write produces.
    """
    if dtype == torch.bool:
        one = torch.full((1,), 2, dtype=torch.uint8, device=device).view(torch.bool)
    elif dtype.is_floating_point:
        one = torch.full((1,), torch.nan, device=device).to(dtype)
    else:
        one = torch.full((1,), torch.iinfo(dtype).min, dtype=dtype, device=device)
    return one[0].expand(tuple(shape))


def bytes_of(scalar: Tensor) -> Tensor:
    """The bytes of one element, as a view."""
    return scalar.view(1).view(torch.uint8)


__all__ = ["bytes_of", "placeholder_like"]
