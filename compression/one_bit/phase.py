"""What messages carry now, and what they need to know of the optimizer.

exact gradients  --freeze-->  momenta, one bit per element; the variance stays
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor


class MomentumRange(NamedTuple):
    """`momentum` [n] fp32 of elements [start, start + n) of a flat buffer, or of a rank's part of it."""

    start: int
    momentum: Tensor


class OneBitState(ABC):
    """What the messages of an engine read of its optimizer and its loss scale."""

    @property
    @abstractmethod
    def is_frozen(self) -> bool:
        """The variance stays from this step on, so messages carry momenta, one bit per element."""

    @property
    @abstractmethod
    def variance_steps(self) -> int:
        """How many steps the variance has seen."""

    @property
    @abstractmethod
    def beta(self) -> float:
        """The decay of the momentum, the same for all parameters."""

    @property
    @abstractmethod
    def unit(self) -> float:
        """What a sum of gradients over the ranks is multiplied with to be the mean gradient of the loss."""

    @abstractmethod
    def momentum_of(self, buffer: int) -> Sequence[MomentumRange]:
        """The momentum of flat buffer `buffer`: of all of it at stage 0, else of this rank's part."""

    @abstractmethod
    def still(self, buffer: int, numel: int) -> Tensor:
        """The elements of this rank's part of flat buffer `buffer` that do not move, bool [numel]."""


@final
class Phase:
    """The state of an engine, which is known only after its flat buffers are built."""

    def __init__(self) -> None:
        self._state: OneBitState | None = None

    def bind(self, state: OneBitState) -> None:
        """From now on messages follow `state`."""
        self._state = state

    @property
    def is_compressed(self) -> bool:
        """The messages of this step have one bit per element."""
        return self._state is not None and self._state.is_frozen

    @property
    def state(self) -> OneBitState:
        """What `bind` was given."""
        assert self._state is not None
        return self._state


__all__ = ["MomentumRange", "OneBitState", "Phase"]
