"""Weights that `zero_to_fp32` has not read yet, and weights in memory with the form that an export reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ...engine.checkpoint.io.reader import CheckpointReader, Saved, chosen


@final
class LazyTensor:
    """A tensor of a checkpoint: `contiguous()` reads it. It has no other values or operations."""

    def __init__(self, reader: CheckpointReader, saved: Saved) -> None:
        self._reader = reader
        self._saved = saved
        self.shape = torch.Size(saved.shape)
        self.dtype = torch.float32 if saved.dtype.is_floating_point else saved.dtype

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> Tensor:
        """The values on the CPU, read and verified at each call; numbers with a point in fp32."""
        return self._reader.read(self._saved, self.dtype)


@final
class LazyWeights(dict[str, LazyTensor]):
    """The state dict of an open checkpoint; tied names have one object."""

    def __init__(self, reader: CheckpointReader, *, exclude_frozen: bool) -> None:
        kept = chosen(reader, exclude_frozen=exclude_frozen)
        super().__init__({name: LazyTensor(reader, one) for name, one in kept.items()})
        self.update({other: self[name] for other, name in reader.tied.items() if name in self})
        self.reader = reader


@final
class WeightsInMemory:
    """A state dict with the parts of `CheckpointReader` that an export uses."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.left_out: list[str] = []
        self.tied: dict[str, str] = {}
        self.values: dict[str, Saved] = {}
        self._weights = weights
        first: dict[int, str] = {}
        for name, value in weights.items():
            if first.setdefault(id(value), name) != name:
                self.tied[name] = first[id(value)]
                continue
            form = (tuple(value.shape), value.dtype, value.dtype)
            self.values[name] = Saved("either", name, "value", *form, True)

    def pieces(self, saved: Saved, dtype: torch.dtype, piece_bytes: int) -> Iterator[Tensor]:
        """The flattened tensor in pieces of [n]."""
        flat = self._weights[saved.name].contiguous().detach().view(-1)
        for part in flat.split(max(piece_bytes // dtype.itemsize, 1)) if flat.numel() else ():
            yield part.to(dtype)


__all__ = ["LazyTensor", "LazyWeights", "WeightsInMemory"]
