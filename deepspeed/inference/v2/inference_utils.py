"""`deepspeed.inference.v2.inference_utils`: sizes of dtypes, and division that rounds up."""

from __future__ import annotations

from typing import Any

import torch

from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder


@raises_theirs
def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up.

    Raises:
        UsageError: b is 0.
    """
    if b == 0:
        raise UsageError(f"ceil_div({a}, 0): b must be non-zero")
    return -(-a // b)


@raises_theirs
def elem_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"elem_size({dtype!r}): needs a torch.dtype, such as torch.bfloat16")
    return dtype.itemsize


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
