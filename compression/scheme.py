"""What a group of ranks sends in a step, chosen once: gradients, then their sums or parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, final

import torch

from ..ops.comm.collectives import Collectives
from ..ops.comm.levels import Split
from .reducer import ExactReducer, GradientReducer
from .sender import ExactSender, ParamSender


@final
@dataclass(frozen=True)
class Buffer:
    """One flat buffer: its number, its elements on all ranks together, and [start, stop) of its gaps.

    dtype: of the parameters. is_sharded: each rank updates a shard of it; else all of it.
    is_gathered: its parameters are dropped and gathered (stage 3). trains: they are not frozen.
    """

    index: int
    numel: int
    gaps: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    is_sharded: bool
    is_gathered: bool = False
    trains: bool = True


class CommScheme(ABC):
    """Builds what sends the gradients and the parameters of each flat buffer of a group."""

    @abstractmethod
    def reducer(self, buffer: Buffer) -> GradientReducer:
        """What reduces the gradients of `buffer`."""

    @abstractmethod
    def sender(self, buffer: Buffer) -> ParamSender:
        """What sends the parameters of `buffer`."""


class BuildScheme(Protocol):
    """Makes the scheme of a group.

    num_copies: so many of its ranks compute the same gradient. split: opens blocks of its ranks; None: the
    group has no blocks. For all ranks.
    """

    def __call__(
        self, collectives: Collectives, num_copies: int = 1, split: Split | None = None
    ) -> CommScheme: ...


@final
class ExactScheme(CommScheme):
    """Exact sums and values."""

    def __init__(
        self, collectives: Collectives, num_copies: int = 1, split: Split | None = None
    ) -> None:
        """num_copies: so many ranks compute the same gradient, which counts once. split: not needed."""
        self._collectives = collectives
        self._num_copies = num_copies

    def reducer(self, buffer: Buffer) -> GradientReducer:
        return ExactReducer(self._collectives, buffer.index, self._num_copies)

    def sender(self, buffer: Buffer) -> ParamSender:
        return ExactSender(self._collectives, buffer.index)


__all__ = ["Buffer", "BuildScheme", "ExactScheme", "CommScheme"]
