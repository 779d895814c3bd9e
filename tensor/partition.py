"""Keeps inputs of recomputed blocks in parts: each tensor rank has its share until backward needs the whole.

    forward     block 1 <- input [n] on all ranks      kept: rank 0 |n/T|, rank 1 |n/T|, ...
    backward    block 1 <- input [n] <- gather         before the block runs again

Source: Rajbhandari et al., ZeRO, 2020, section 6.1 (partitioned activation checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import EqualParts

KIND = "activation gathers"
MIN_NUMEL = 1 << 10  # a smaller tensor costs more to gather than to keep


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's elements of a tensor. `values`: what `keep` made of them."""

    shape: torch.Size
    values: Any


@final
class PartitionedInputs:
    """Cuts tensors of one model over the ranks of a tensor group, which have the same values."""

    def __init__(
        self,
        group: Collectives,
        keep: Callable[[Tensor], Any] = lambda part: part,
        bring: Callable[[Any], Tensor] = lambda kept: kept,
    ) -> None:
        """
        Args:
            keep: stores a part [n] until backward. By default it stays where it is.
            bring: the part [n], of what `keep` returned.
        """
        self._parts = EqualParts(group, KIND)
        self._keep, self._bring = keep, bring

    def cutting(self, inputs: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, tensors that autograd saves are cut if they are among `inputs` and not small.

        Tensors that need no gradient stay, because several blocks share them (masks, positions); leaves stay,
        because the script holds them. Backward sends each part to all other ranks.
        """
        wanted = {
            tensor.data_ptr()
            for tensor in inputs
            if tensor.requires_grad and not tensor.is_leaf and tensor.numel() >= MIN_NUMEL
        }

        def pack(tensor: Tensor) -> Tensor | _Part:
            if tensor.data_ptr() not in wanted or not tensor.is_contiguous():
                return tensor
            return _Part(tensor.shape, self._keep(self._parts.own(tensor)))

        return torch.autograd.graph.saved_tensors_hooks(pack, self._join)

    def _join(self, saved: Tensor | _Part) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        part = self._bring(saved.values)
        return self._parts.joined(part, saved.shape, "the input of a recomputed block")


__all__ = ["KIND", "PartitionedInputs"]
