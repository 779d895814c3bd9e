"""A value of a state dict that is in parts: shape, dtype and device can be read, any other use raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError

_READABLE = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "ndim",
        "is_sparse",
        "layout",
        "is_meta",
    )
)
_METHODS = frozenset(
    (Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.is_floating_point)
)


@final
class InParts(Tensor):
    """Holds a placeholder, and the sentence that a use raises. It can neither be saved nor copied."""

    _why: str

    @staticmethod
    def of(value: Tensor, why: str) -> InParts:
        """`value` is the placeholder; `why` the error's text."""
        made = value.detach().as_subclass(InParts)
        made._why = why
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READABLE or func in _METHODS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
        found = next((one for one in given if isinstance(one, InParts)), None)
        raise UsageError(found._why if found is not None else f"{func}: a value is in parts")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"InParts({tuple(self.shape)}, {self.dtype})"


__all__ = ["InParts"]
