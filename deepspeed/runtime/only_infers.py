"""An engine without an optimizer: its parameters are frozen while `initialize` and its forwards run.

In between they keep `requires_grad`. TRL makes such an engine for the model that it trains afterwards, and the
optimizer of the training takes the parameters that have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import nn


@final
class OnlyInfers:
    """A context in which parameters need no gradient. It may be entered again."""

    def __init__(self, params: Iterable[nn.Parameter] = ()) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._frozen: list[nn.Parameter] = []
        self._depth = 0

    def __bool__(self) -> bool:
        return bool(self._params)

    def __enter__(self) -> None:
        if self._depth == 0:  # a script may have frozen some since
            self._frozen = [param for param in self._params if param.requires_grad]
            self._set(False)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._set(True)

    def _set(self, needed: bool) -> None:
        for param in self._frozen:
            param.requires_grad_(needed)


__all__ = ["OnlyInfers"]
