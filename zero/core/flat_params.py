"""The parameters of one flat buffer: views of it for ever, while its storage comes and goes.

    gathered   param.data --view--> full [world_size * shard_numel] --storage--> memory
    dropped    param.data = NaN, expanded to its shape      full --storage--> nothing
                                                             ^ raw: an alias with its own version counter

Dropping resizes the storage to zero and gathering fills it in place, so every view that autograd saved is
valid again; swapping `.data` alone would keep whole storages alive through saved tensors. What a script
reads of a dropped parameter has the right shape and is NaN (reading a view of an empty storage can crash
the process); writing to it is refused by torch. Every write of ours goes through `raw`: gloo bumps the
version counter of its output from a worker thread, and through `raw` autograd never sees that.

What a script writes to a whole parameter counts: a drop copies this rank's part of it into the shard, and a
tensor that was assigned to `.data` is taken over. No version counter tells of writes through `.data`, so
the copy is made without asking; it is one shard long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from ...ops.flat import overlap
from ...utils.errors import UsageError
from ..access.owners import find_owner
from .layout import FlatLayout

# what the engine itself does with parameters is no use of them: no mode around a forward is to see it
_NoTorchFunction = torch._C.DisableTorchFunction


def placeholder_like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a dropped parameter shows: NaN of its shape, in no memory; torch refuses most writes to it.

    Integers show their smallest value. A bool holds a byte that no write leaves there; it reads as True.
    """
    if dtype == torch.bool:
        one = torch.full((1,), 2, dtype=torch.uint8, device=device).view(torch.bool)
    elif dtype.is_floating_point:
        one = torch.full((1,), torch.nan, device=device).to(dtype)
    else:
        one = torch.full((1,), torch.iinfo(dtype).min, dtype=dtype, device=device)
    return one[0].expand(tuple(shape))


@final
class FlatParams:
    """Owns one flat buffer of parameters. `is_unsharded`: all of it is in memory and may be used."""

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
        self._reshards = is_sharded
        self._overridden: dict[int, Tensor] = {}  # position -> what a script may edit
        self.raw = torch.zeros(layout.numel, dtype=dtype, device=collectives.device)
        self._views = [
            self.raw.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in layout.slots
        ]
        self._fill()
        self._placeholder = placeholder_like((), dtype, collectives.device)
        self._placeholder_bytes = bytes(_bytes_of(self._placeholder).tolist())
        self._placeholders = [self._placeholder.expand(slot.shape) for slot in layout.slots]
        own = collectives.shard_of(self.raw)
        self.shard = own.clone() if is_sharded else own
        self.is_unsharded = True
        if is_sharded:
            self.reshard()

    def _fill(self) -> None:
        """The parameters' values into the buffer, and the parameters onto it."""
        own: list[Tensor] = []
        for param, view in zip(self.params, self._views, strict=True):
            owner = find_owner(param)
            if owner is None:
                own.append(view)
                view.copy_(param.data)
            else:
                owner.move_into(param, view)
            param.data = view
        for part in [self.raw] if len(own) == len(self.params) else own:
            self._collectives.broadcast(part)

    @property
    def dtype(self) -> torch.dtype:
        return self.raw.dtype

    @property
    def full_bytes(self) -> int:
        return self.layout.numel * self.raw.element_size()

    @property
    def may_be_resharded(self) -> bool:
        """It is not whole all the time."""
        return self._reshards

    def keep_gathered(self) -> None:
        """From now on `drop` does nothing: this buffer stays whole between steps."""
        self._reshards = False

    def start_unshard(self) -> None:
        """Begin to fill the buffer with every rank's shard, unless it is whole or on its way.

        Sends (world_size - 1) shards a rank.
        """
        if self.is_unsharded or self._handle is not None:
            return
        storage = self.raw.untyped_storage()
        if storage.nbytes() == 0:
            self._check_not_written()
            storage.resize_(self.full_bytes)
        self._handle = self._collectives.all_gather(
            self.raw, self.shard, buffer=self.index, kind="all_gather"
        )

    def serve(self, receivers: Sequence[int]) -> None:
        """A gather that only the ranks `receivers` want; this one may be none of them."""
        wants = self._collectives.rank in receivers
        if wants:
            self._check_not_written()
            self.raw.untyped_storage().resize_(self.full_bytes)
        self._collectives.serve(
            self.raw if wants else None, self.shard, receivers, buffer=self.index
        )
        if wants:
            self.is_unsharded = True
            self._point_to(self._views)

    def unshard(self) -> None:
        """The buffer is whole on return."""
        if not self.is_unsharded:
            self.start_unshard()
            self.wait()

    def wait(self) -> None:
        """End a gather that is under way."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
            self.is_unsharded = True
            if self.is_sharded:
                self._point_to(self._views)

    def _point_to(self, values: Sequence[Tensor]) -> None:
        with _NoTorchFunction():
            for position, (param, value) in enumerate(zip(self.params, values, strict=True)):
                if position not in self._overridden:
                    param.data = value

    def reshard(self) -> None:
        """Give the whole buffer's memory back; the shard stays."""
        if self._reshards and self.is_unsharded:
            self.take_edits()
            self._point_to(self._placeholders)
            self.raw.untyped_storage().resize_(0)
            self.is_unsharded = False

    def start_publish(self) -> None:
        """The shard has changed: gather it into a buffer that stays whole between steps.

        What was written to the whole parameters before is gone, unless `take_edits` came first.
        """
        if self._reshards:
            return
        self.is_unsharded = False
        self.start_unshard()

    # -- what scripts hold on to ------------------------------------------------------------------------

    def override(self, position: int, full: Tensor) -> None:
        """The parameter in slot `position` is `full`, a tensor of its own, until `clear_override`."""
        self._overridden[position] = full
        self.params[position].data = full

    def clear_override(self, position: int) -> None:
        """End `override`; what `full` holds is forgotten unless it was written to the shard."""
        del self._overridden[position]
        here = self._views if self.is_unsharded or not self.is_sharded else self._placeholders
        self.params[position].data = here[position]

    def is_overridden(self, position: int) -> bool:
        """The parameter in slot `position` shows what `override` gave it."""
        return position in self._overridden

    def hide(self) -> None:
        """The buffer's memory is about to go away: parameters show NaN, as if it had been dropped."""
        self._point_to(self._placeholders)

    def show(self) -> None:
        """It is back."""
        if self.is_unsharded:
            self._point_to(self._views)

    # -- what scripts write -----------------------------------------------------------------------------

    @torch.no_grad()
    def take_edits(self, only: int | None = None) -> None:
        """What was written to whole parameters, or assigned to their `.data`, is from now on their value.

        With `only` that of the parameter in this slot.
        Raises:
            UsageError: a tensor of another shape or dtype was assigned, or one was while the parameter was
                dropped; the parameter is as it was.
        """
        if not self.raw.data_ptr():
            self._check_not_written(only)
        if self._handle is not None or not self.is_unsharded or not self.raw.data_ptr():
            return
        with _NoTorchFunction():
            if only is None or not _is_same(self.params[only], self._views[only]):
                for at in self._assigned(self._views):
                    self._copy_assigned(at)
        if self.is_sharded:
            self._write_back(only)

    def _assigned(self, values: Sequence[Tensor]) -> list[int]:
        """Positions of parameters whose `.data` is not theirs of `values`, but for those that are lent."""
        pairs = zip(self.params, values, strict=True)
        changed = [  # _is_same written out: it is asked of every parameter in every step
            at
            for at, (param, value) in enumerate(pairs)
            if param.dtype is not value.dtype or not param.is_set_to(value)
        ]
        return [at for at in changed if at not in self._overridden]

    def _write_back(self, only: int | None) -> None:
        """This rank's part of the whole buffer, or of one slot of it, into the shard."""
        start, stop = self.layout.shard_range(self._collectives.rank)
        if only is not None:
            slot = self.layout.slots[only]
            start, stop = overlap((slot.offset, slot.stop), (start, stop))
        if start < stop:
            first = self.layout.shard_range(self._collectives.rank)[0]
            self.shard[start - first : stop - first].copy_(self.raw[start:stop])

    def _copy_assigned(self, position: int) -> None:
        param, view, slot = (
            self.params[position],
            self._views[position],
            self.layout.slots[position],
        )
        given = param.data
        param.data = view
        if given.shape != view.shape or given.dtype != view.dtype:
            raise UsageError(
                f"{slot.name}.data was set to a tensor of shape {tuple(given.shape)} and {given.dtype}, after "
                f"xds.initialize: it is {tuple(view.shape)} and {view.dtype}, and is as it was. Assign that "
                "shape and dtype, or use xds.zero.set_full_param"
            )
        view.copy_(given.clone())  # it may be another view of this very memory

    @torch.no_grad()
    def other_dtypes(self) -> list[int]:
        """Positions of parameters whose dtype the script changed (`module.float()`); it is undone.

        Values that were cast are taken over; at stage 3 there were none to cast.
        """
        with _NoTorchFunction():
            dtype = self.raw.dtype
            found = [at for at, param in enumerate(self.params) if param.dtype is not dtype]
            for position in found:
                param, view = self.params[position], self._views[position]
                if self.is_unsharded and position not in self._overridden:
                    view.copy_(param.data)
                    param.data = view
                else:
                    param.data = self._placeholders[position]
        return found

    def _check_not_written(self, only: int | None = None) -> None:
        """fill_ and zero_ pass on a dropped parameter, where torch refuses every other write."""
        with _NoTorchFunction():
            is_one = only is not None and _is_same(self.params[only], self._placeholders[only])
            changed = [] if is_one else self._assigned(self._placeholders)
            for at in changed:
                self.params[at].data = self._placeholders[at]
            assigned = [self.layout.slots[at].name for at in changed]
        if assigned:
            told = ", ".join(assigned[:3]) + (", ..." if len(assigned) > 3 else "")
            raise UsageError(f".data of {told} was assigned while dropped (stage 3): {_REMEDY}")
        bits = _bytes_of(self._placeholder)
        if bits.device.type == "cpu" and bytes(bits.tolist()) != self._placeholder_bytes:
            names = self.layout.slots[0].name, self.layout.slots[-1].name
            bits.copy_(bits.new_tensor(list(self._placeholder_bytes)))
            raise UsageError(
                f"a parameter between {names[0]} and {names[1]} was written while it was dropped (stage 3): "
                f"{_REMEDY}"
            )


_REMEDY = (
    "the value is lost, the parameters are as they were; write inside "
    "xds.zero.GatheredParameters(params, modifier_rank=0), or use xds.zero.set_full_param"
)


def _is_same(param: Tensor, value: Tensor) -> bool:
    """`.data` of `param` is `value`: the same memory, shape and strides."""
    return param.dtype is value.dtype and param.is_set_to(value)


def _bytes_of(scalar: Tensor) -> Tensor:
    return scalar.view(1).view(torch.uint8)
