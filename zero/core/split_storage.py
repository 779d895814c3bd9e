"""The masters of one flat buffer as two halves of 16 bits, of which the parameters are one: see ops/halves.py.

    parameters   compute [n] bf16    the upper halves: what a script writes there counts, and the rest stays
    here         low [n] int16       the lower halves
    for a load   joined [n] fp32     while `Updater.in_memory` is open

The tensors of the masters read as NaN otherwise. An update reads and writes the halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from ...offload.interfaces import Blocks, StateStorage
from ...ops.halves import Halves
from .param_bucket import ParamBucket, computed_values

BLOCK_NUMEL = 1 << 20  # of a master that is read in parts


@final
class SplitStorage(StateStorage):
    """Owns `low`, and the memory of the masters while they are joined."""

    def __init__(self, params: ParamBucket, *, is_sharded: bool) -> None:
        """The masters are the values of `params`."""
        self._params, self._is_sharded = params, is_sharded
        high = computed_values(params, is_sharded=is_sharded)
        self.low = torch.zeros_like(high, dtype=torch.int16)
        self._nan = torch.full((1,), torch.nan, dtype=torch.float32, device=high.device)
        self._before: Tensor | None = None  # the upper halves, while a script may have written them
        self._is_joined = False
        self.master = self._nan.expand(high.shape)
        self._views: list[tuple[Tensor, int]] = [(self.master, 0)]

    def begin_edit(self) -> None:
        """Parameters are about to be written: what differs in `take_edits` is exact, without a lower half."""
        if self._before is None:
            self._before = self.halves.high.clone()

    def take_edits(self) -> None:
        """See `begin_edit`. Values that are what they were keep their lower half."""
        if self._before is not None:
            before, self._before = self._before, None
            self.low.masked_fill_(before.view(torch.int16) != self.halves.high.view(torch.int16), 0)

    @property
    def halves(self) -> Halves:
        """The masters, [n]."""
        return Halves(computed_values(self._params, is_sharded=self._is_sharded), self.low)

    def add_view(self, view: Tensor, start: int) -> None:
        self._views.append((view, start))

    def join(self) -> None:
        """The tensors of the masters have their values until `divide` or `drop`."""
        if not self._is_joined:
            self.take_edits()  # what is written now, such as a checkpoint, comes after them
            self._is_joined = True
            values = self.halves.joined()
            for view, start in self._views:
                view.data = values[start : start + view.numel()]

    def divide(self) -> None:
        """What was written to the tensors since `join` counts."""
        if self._is_joined:
            self.halves.write(self.master)
            self.drop()

    def drop(self) -> None:
        """End `join`; what was written is lost."""
        if self._is_joined:
            self._is_joined = False
            for view, _ in self._views:
                view.data = self._nan.expand(view.shape)

    def release(self) -> None:
        self.drop()
        self.low.data = self.low.new_empty(0)

    def blocks_of(self, tensor: Tensor) -> Blocks | None:
        if tensor is not self.master or self._is_joined:
            return None
        halves = self.halves

        def blocks(start: int, stop: int) -> Iterator[Tensor]:
            for begin in range(start, stop, BLOCK_NUMEL):
                block = halves.part(begin, min(begin + BLOCK_NUMEL, stop)).joined()
                yield block  # a reader may keep its address alone

        return blocks


__all__ = ["SplitStorage"]
