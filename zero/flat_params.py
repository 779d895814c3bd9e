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

from ..ops.collectives import Collectives
from ..ops.errors import UsageError
from ..ops.handles import Handle
from .layout import FlatLayout
from .owners import find_owner


def absent_like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a dropped parameter shows: NaN of its shape, in no memory; torch refuses most writes to it."""
    return torch.full((), torch.nan, device=device).to(dtype).expand(tuple(shape))


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

        Peak memory: what the parameters hold plus this buffer; each lets go of its own memory as soon as it
        is copied. With `is_sharded` only the shard stays.
        """
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.is_sharded = is_sharded
        self._collectives = collectives
        self._handle: Handle | None = None
        self._drops = is_sharded
        self._lent: dict[int, Tensor] = {}  # position -> what a script may edit
        self.raw = torch.zeros(layout.numel, dtype=dtype, device=collectives.device)
        self._views = [
            self.raw.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in layout.slots
        ]
        self._fill()
        self._nothing = absent_like((), dtype, collectives.device)
        self._absent = [self._nothing.expand(slot.shape) for slot in layout.slots]
        own = collectives.shard_of(self.raw)
        self.shard = own.clone() if is_sharded else own
        self.is_gathered = True
        if is_sharded:
            self.drop()

    def _fill(self) -> None:
        """The parameters' values into the buffer, and the parameters onto it."""
        own: list[Tensor] = []
        for param, view in zip(self.params, self._views, strict=True):
            owner = find_owner(param)
            if owner is None:
                own.append(view)
                view.copy_(param.data)
            else:
                owner.hand_over(param, view)
            param.data = view
        for part in [self.raw] if len(own) == len(self.params) else own:
            self._collectives.broadcast(part)

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
        self._check_untouched()
        storage = self.raw.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full_bytes)
        self._handle = self._collectives.all_gather(
            self.raw, self.shard, buffer=self.index, kind="all_gather"
        )

    def serve(self, receivers: Sequence[int]) -> None:
        """A gather that only the ranks `receivers` want; this one may be none of them."""
        wants = self._collectives.rank in receivers
        if wants:
            self._check_untouched()
            self.raw.untyped_storage().resize_(self.full_bytes)
        self._collectives.serve(
            self.raw if wants else None, self.shard, receivers, buffer=self.index
        )
        if wants:
            self.is_gathered = True
            self._point_to(self._views)

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
                self._point_to(self._views)

    def _point_to(self, values: Sequence[Tensor]) -> None:
        for position, (param, value) in enumerate(zip(self.params, values, strict=True)):
            if position not in self._lent:
                param.data = value

    def drop(self) -> None:
        """Give the whole buffer's memory back; the shard stays."""
        if self._drops and self.is_gathered:
            self._point_to(self._absent)
            self.raw.untyped_storage().resize_(0)
            self.is_gathered = False

    def start_publish(self) -> None:
        """The shard has changed: gather it into a buffer that stays whole between steps."""
        if self._drops:
            return
        self.is_gathered = False
        self.start_gather()

    # -- what scripts hold on to ------------------------------------------------------------------------

    def lend(self, position: int, full: Tensor) -> None:
        """The parameter in slot `position` is `full`, a tensor of its own, until `take_back`."""
        self._lent[position] = full
        self.params[position].data = full

    def take_back(self, position: int) -> None:
        """End `lend`; what `full` holds is forgotten unless it was written to the shard."""
        del self._lent[position]
        here = self._views if self.is_gathered or not self.is_sharded else self._absent
        self.params[position].data = here[position]

    def is_lent(self, position: int) -> bool:
        """The parameter in slot `position` shows what `lend` gave it."""
        return position in self._lent

    def hide(self) -> None:
        """The buffer's memory is about to go away: parameters show NaN, as if it had been dropped."""
        self._point_to(self._absent)

    def show(self) -> None:
        """It is back."""
        if self.is_gathered:
            self._point_to(self._views)

    def _check_untouched(self) -> None:
        """fill_ and zero_ pass on a dropped parameter, where torch refuses every other write."""
        if self.raw.device.type == "cpu" and not self._nothing.isnan():
            names = self.layout.slots[0].name, self.layout.slots[-1].name
            self._nothing.fill_(torch.nan)
            raise UsageError(
                f"a parameter between {names[0]} and {names[1]} was written while it was dropped (stage 3): "
                "the value is lost, the parameters are as they were; write inside "
                "xds.zero.GatheredParameters(params, modifier_rank=0), or use xds.zero.set_full_param"
            )
