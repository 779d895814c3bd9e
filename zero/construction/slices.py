"""Parameters in slices before an engine exists: rank r of its group holds elements [r*c, (r+1)*c) of each.

    full  --shard-->  slice [c], param.data = NaN expanded to its shape  --unshard-->  full

`zero.Init` and the loading of pretrained weights fill the store; building an engine empties it unit by unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...ops.comm.collectives import Collectives
from ...ops.flat import cut, numel_of
from ...ops.torch_internals import set_values
from ..core.owners import IN_SHARDS, ParamOwner, ShardView, clear_owner, set_owner
from ..core.param_bucket import placeholder_like
from ..layout.groups import FlatGroups
from ..layout.slices import Reader

CHUNK_NUMEL = 1 << 22  # elements that a rank sends at a time in `move_into`


@dataclass(eq=False)
class _Slice:
    shape: tuple[int, ...]
    device: torch.device  # of the full parameter
    dtype: torch.dtype  # of the full parameter
    read: Callable[[], Tensor]  # `local`, when it is needed first
    kept_dtype: torch.dtype
    number: int
    is_overridden: bool = False

    @cached_property
    def local(self) -> Tensor:
        """[own elements] on the collectives' device."""
        return self.read()


@final
class SliceStore(ParamOwner):
    """Owns slices of parameters. All ranks call every method in the same order."""

    def __init__(
        self,
        collectives: Collectives,
        dtype: torch.dtype | None = None,
        *,
        reads_late: bool = False,
        groups: FlatGroups | None = None,
    ) -> None:
        """
        Args:
            collectives: the ranks that a parameter is sharded over, unless `groups` has others for it.
            dtype: of floating values; None keeps each parameter's own.
            reads_late: `shard_from` reads a slice when it is needed, for models that do not fit the memory.
        """
        self.collectives = collectives
        self._dtype = dtype
        self._reads_late = reads_late
        self._groups = groups
        self._slices = WeakTensorKeyDictionary()  # parameter -> _Slice
        self._numbers = 0

    def holds(self, param: Tensor) -> bool:
        """This store holds `param` in slices."""
        return param in self._slices

    def shard(self, param: nn.Parameter) -> None:
        """Keep this rank's slice of rank 0's values and free the parameter. Rank 0 sends the slices."""
        group = self.group_of(param)
        full = param.data.contiguous().view(-1)
        full = full.to(device=group.device, dtype=self._kept_dtype(param.dtype))
        bounds = cut(full.numel(), group.world_size)
        start, stop = bounds[group.rank]
        local = full.new_empty(stop - start)
        group.scatter(full, local, bounds)
        self._keep(param, param.device, local.dtype, lambda: local)

    def shard_from(self, param: nn.Parameter, reader: Reader) -> None:
        """Keep this rank's slice of the values from `reader`; the parameter's own values are not read."""
        group, dtype = self.group_of(param), self._kept_dtype(param.dtype)
        start, stop = cut(param.numel(), group.world_size)[group.rank]

        def read() -> Tensor:
            local = torch.empty(stop - start, dtype=dtype, device=group.device)
            if stop > start:
                local.copy_(reader(start, stop))
            return local

        piece = self._keep(param, group.device, dtype, read)
        if not self._reads_late:
            assert piece.local is not None

    def _kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def _keep(
        self,
        param: nn.Parameter,
        device: torch.device,
        kept_dtype: torch.dtype,
        read: Callable[[], Tensor],
    ) -> _Slice:
        piece = _Slice(tuple(param.shape), device, param.dtype, read, kept_dtype, self._numbers)
        self._slices[param] = piece
        self._numbers += 1
        set_values(param, placeholder_like(piece.shape, kept_dtype, self.collectives.device))
        set_owner(param, self, keep=True)
        return piece

    def unshard(self, param: nn.Parameter) -> None:
        """Make `param` a full, ordinary parameter again. Every rank sends its slice."""
        piece = self._slices.pop(param)  # type: ignore[no-untyped-call]
        clear_owner(param)
        full = self._stored(param, piece).read(self.group_of(param))
        assert full is not None
        param.data = full.to(device=piece.device, dtype=piece.dtype)

    def move_into(self, param: nn.Parameter, target: Tensor) -> None:
        """Write the full value into `target` and stop owning `param`.

        The value is sent in chunks, so that no second copy of a large parameter is made, unless `target` is
        channels_last.
        """
        piece = self._slices.pop(param)  # type: ignore[no-untyped-call]
        clear_owner(param)
        group = self.group_of(param)
        bounds = cut(target.numel(), group.world_size)
        is_plain = target.is_contiguous()
        flat = target.view(-1) if is_plain else target.new_empty(target.numel())
        longest = max(stop - start for start, stop in bounds)
        for offset in range(0, longest, CHUNK_NUMEL):
            parts = [(min(a + offset, b), min(a + offset + CHUNK_NUMEL, b)) for a, b in bounds]
            ends = [0]
            for start, stop in parts:
                ends.append(ends[-1] + stop - start)
            packed = piece.local.new_empty(ends[-1])
            local = piece.local[offset : offset + CHUNK_NUMEL]
            group.collect(packed, local, list(zip(ends[:-1], ends[1:], strict=True)))
            for (start, stop), begin in zip(parts, ends[:-1], strict=True):
                flat[start:stop] = packed[begin : begin + stop - start]
        if not is_plain:
            target.copy_(flat.view(target.shape))

    def _stored(self, param: nn.Parameter, piece: _Slice) -> ShardView:
        bounds = cut(numel_of(piece.shape), self.group_of(param).world_size)
        return ShardView(piece.shape, piece.local, bounds)

    # -- the interface of ParamOwner -------------------------------------------------------------------------

    def group_of(self, param: nn.Parameter) -> Collectives:
        group = None if self._groups is None else self._groups.of(param)
        # stages build what they share in different orders
        return self.collectives if group is None or group.is_shared else group.everyone

    def name_of(self, param: nn.Parameter) -> str:
        return f"parameter {self.number_of(param)} of zero.Init, {tuple(self._slices[param].shape)}"

    def number_of(self, param: nn.Parameter) -> int:
        return int(self._slices[param].number)

    def value(self, param: nn.Parameter) -> ShardView:
        return self._stored(param, self._slices[param])

    def compute(self, param: nn.Parameter) -> ShardView:
        return self.value(param)

    def write(self, param: nn.Parameter, reader: Reader) -> None:
        self.value(param).write(reader, self.group_of(param).rank)

    def why_in_parts(self, param: nn.Parameter) -> str:
        return IN_SHARDS

    def is_overridden(self, param: nn.Parameter) -> bool:
        return bool(self._slices[param].is_overridden)

    def override(self, param: nn.Parameter, full: Tensor) -> None:
        self._slices[param].is_overridden = True
        param.data = full

    def clear_override(self, param: nn.Parameter) -> None:
        piece = self._slices[param]
        param.data = placeholder_like(piece.shape, piece.kept_dtype, self.collectives.device)
        piece.is_overridden = False  # last: until then a `Construction` ignores the parameter
