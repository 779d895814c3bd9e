"""`OnDevice`: builds a model on a device and in a dtype."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, final

import torch

from ..missing import placeholder


@final
class OnDevice:
    """A context in which new tensors of floating point have `dtype`, and all new tensors are on `device`.

    Args:
        dtype: of parameters; None is torch's default.
        device: "meta" allocates nothing; `zero.Init`, `xds.zero.load_weights` and `initialize` fill it later.
        enabled: False: the context does nothing.
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            before = torch.get_default_dtype()
            self._stack.callback(torch.set_default_dtype, before)
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            self._stack.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["OnDevice"]
