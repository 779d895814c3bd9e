"""What sums of gradients are multiplied with to be mean gradients, for messages that keep errors of them.

Flat buffers are built before the engine knows its loss scale. So they get this object, and it is bound later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final


@final
class GradientUnit:
    """The factor on a sum of scaled gradients that makes it their mean over the ranks, unscaled."""

    def __init__(self) -> None:
        self._read: Callable[[], float] = _one

    def bind(self, read: Callable[[], float]) -> None:
        """From now on `value` is what `read` returns."""
        self._read = read

    @property
    def value(self) -> float:
        return self._read()


def _one() -> float:
    return 1.0


__all__ = ["GradientUnit"]
