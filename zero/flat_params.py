"""The parameters of one flat buffer: views of it for ever, while its storage comes and goes.

    gathered   param.data --view--> full [world_size * shard_numel] --storage--> memory
    dropped    param.data = NaN, expanded to its shape      full --storage--> nothing
                                                             ^ raw: an alias with its own version counter

Dropping resizes the storage to zero and gathering fills it in place, so every view that autograd saved is
valid again; swapping `.data` alone would keep whole storages alive through saved tensors. What a script
reads of a dropped parameter has the right shape and is NaN (reading a view of an empty storage can crash
the process); writing to it is refused by torch. Every write of ours goes through `raw`: gloo bumps the
version counter of its output from a worker thread, and through `raw` autograd never sees that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ..ops.collectives import Collectives, Handle
from .layout import FlatLayout


@final
class FlatParams:
    """Owns one flat buffer of parameters. `is_gathered`: all of it is in memory and may be used."""

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        dtype: torch.dtype,
        collectives: Collectives,
        *,
        index: int,
        is_sharded: bool,
    ) -> None:
        """Move `params` (in the order of `layout.slots`) into one buffer; rank 0's values win.

        Peak memory: the model plus this buffer. With `is_sharded` only the shard stays.
        """
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.is_sharded = is_sharded
        self._collectives = collectives
        self._handle: Handle | None = None
        self._drops = is_sharded
        self._views: list[Tensor] = []
        device = params[0].device
        full = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.raw = full.data
        for slot, param in zip(layout.slots, params, strict=True):
            view = self.raw.narrow(0, slot.offset, slot.numel).view(slot.shape)
            view.copy_(param.data)
            param.data = view
            self._views.append(view)
        collectives.broadcast(self.raw)
        nothing = torch.full((), torch.nan, device=device).to(dtype)
        self._absent = [nothing.expand(slot.shape) for slot in layout.slots] if is_sharded else []
        own = collectives.shard_of(self.raw)
        self.shard = own.clone() if is_sharded else own
        self.is_gathered = True
        if is_sharded:
            self.drop()

    @property
    def dtype(self) -> torch.dtype:
        return self.raw.dtype

    @property
    def full_bytes(self) -> int:
        return self.layout.numel * self.raw.element_size()

    def keep_gathered(self) -> None:
        """From now on `drop` does nothing: this buffer stays whole between steps."""
        self._drops = False

    def start_gather(self) -> None:
        """Begin to fill the buffer with every rank's shard, unless it is whole or on its way.

        Sends (world_size - 1) shards a rank.
        """
        if self.is_gathered or self._handle is not None:
            return
        storage = self.raw.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full_bytes)
        self._handle = self._collectives.all_gather(
            self.raw, self.shard, buffer=self.index, kind="all_gather"
        )

    def gather(self) -> None:
        """The buffer is whole on return."""
        if not self.is_gathered:
            self.start_gather()
            self.wait()

    def wait(self) -> None:
        """End a gather that is under way."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
            self.is_gathered = True
            if self.is_sharded:
                for param, view in zip(self.params, self._views, strict=True):
                    param.data = view

    def drop(self) -> None:
        """Give the whole buffer's memory back; the shard stays."""
        if self._drops and self.is_gathered:
            for param, nothing in zip(self.params, self._absent, strict=True):
                param.data = nothing
            self.raw.untyped_storage().resize_(0)
            self.is_gathered = False

    def start_publish(self) -> None:
        """The shard has changed: gather it into a buffer that stays whole between steps."""
        if self._drops:
            return
        self.is_gathered = False
        self.start_gather()
