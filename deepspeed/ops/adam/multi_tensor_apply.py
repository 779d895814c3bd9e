"""`MultiTensorApply`: calls an op on lists of tensors, with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from ...missing import placeholder


@final
class MultiTensorApply:
    """Calls `op(chunk_size, flag, tensor_lists, *arguments)`.

    chunk_size: elements of a block, for ops that use it.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], flag: Any, tensor_lists: Any, *arguments: Any
    ) -> Any:
        return op(self.chunk_size, flag, tensor_lists, *arguments)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
