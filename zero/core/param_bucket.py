"""The parameters of one flat buffer: permanent views of it, while its storage is allocated and freed.

    gathered   param.data --view--> full [world_size * shard_numel] --storage--> memory
    dropped    param.data = NaN, expanded to its shape      full --storage--> nothing
                                                             ^ raw: an alias with its own version counter

- Dropping resizes the storage to zero and gathering fills it in place, so every view that autograd saved is
  valid again. Swapping `.data` alone would keep the full storages alive through saved tensors.
- User code that reads a dropped parameter gets a placeholder: NaN of the right shape. Reading a view of an
  empty storage can crash the process. torch refuses writes to a placeholder.
- The engine writes only through `raw`: gloo increments the version counter of its output from a worker
  thread, and the counter of `raw` is not the one that autograd checks.
- What user code writes to a gathered parameter counts: a drop copies this rank's part of it into the shard,
  and a tensor that was assigned to `.data` is copied into the buffer. On a device the copy is always made, for
  writes through `.data` change no version counter. To the host it is made where a counter has changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import final

import torch
from torch import Tensor, nn

from ...compression.scheme import ExactSender, ParamSender
from ...offload.interfaces import JobHandle, Shard, ShardCopy, ShardStore
from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Done, Handle
from ...ops.flat import overlap, shaped
from ...ops.torch_internals import NoTorchFunction
from ...utils.errors import UsageError
from ..layout.groups import FlatGroup
from ..layout.layout import FlatLayout
from .owners import find_owner


class ParamMemory(ABC):
    """`raw` [world_size * n]: the buffer. `own` [n]: this rank's part of it, to which the engine may write.

    num_holders: so many ranks have the memory in common. sender: how the buffer is sent.
    writable: `raw`, to write to, on the one holder that sets initial and loaded values; None on the others.
    """

    raw: Tensor
    own: Tensor
    num_holders: int
    sender: ParamSender
    writable: Tensor | None

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Other ranks have the same memory, and user code may only read it."""

    @abstractmethod
    def fill(self, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` set a tensor like `raw` to the first values, for which it may communicate."""

    @abstractmethod
    def refuse_assigned(self, assigned: Sequence[tuple[nn.Parameter, Tensor, str]]) -> None:
        """Undo what user code has assigned to `.data`, where other ranks have the same memory.

        assigned: each parameter, its values and its name.
        Raises UsageError: some are other values; the parameters have their own again.
        """

    @abstractmethod
    def check_place(self) -> None:
        """Raises UsageError: user code has moved the memory."""

    @abstractmethod
    def wait_for_readers(self) -> None:
        """This rank's parts are about to be written, or have been. For all ranks, once for all buffers."""

    @abstractmethod
    def release(self) -> Tensor:
        """This engine ends: the tensor that takes the place of `raw`, to which user code may write."""


@final
class OwnMemory(ParamMemory):
    """Memory of this rank."""

    is_shared = False
    num_holders = 1

    def __init__(self, raw: Tensor, collectives: Collectives, sender: ParamSender) -> None:
        self.sender = sender
        self.raw = self.writable = raw
        self.own = collectives.shard_of(raw)

    def fill(self, fill: Callable[[Tensor], None]) -> None:
        fill(self.raw)

    def refuse_assigned(self, assigned: Sequence[tuple[nn.Parameter, Tensor, str]]) -> None:
        raise AssertionError("user code may write to it")

    def check_place(self) -> None:
        return

    def wait_for_readers(self) -> None:
        return

    def release(self) -> Tensor:
        return self.raw


def own_memory(
    collectives: Collectives,
    numel: int,
    dtype: torch.dtype,
    sender: ParamSender,
    *,
    is_dropped: bool,
) -> OwnMemory:
    """Memory for a flat buffer; is_dropped: it is dropped between uses."""
    # what is dropped changes its size; what stays is read by other ranks where it is
    empty = torch.empty if is_dropped else collectives.empty
    raw = empty(numel, dtype=dtype, device=collectives.device).zero_()
    return OwnMemory(raw, collectives, sender)


def views_in(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """The parts of `flat` [world_size * n] that are the slots of `layout`."""
    return [
        shaped(flat.narrow(0, slot.offset, slot.numel), slot.shape, slot.channels_last)
        for slot in layout.slots
    ]


class ShardState(Enum):
    """The life of the full buffer.

    SHARDED --start_unshard--> IN_FLIGHT --wait--> UNSHARDED --reshard, start_publish--> SHARDED
    """

    SHARDED = 1  # it has no memory, or has old values of other ranks
    IN_FLIGHT = 2  # the shards of other ranks are on their way
    UNSHARDED = 3  # it may be used


class Deferred(Enum):
    """What the next `start_unshard` waits for, where an update on the host goes on under the next forward."""

    NOTHING = 1
    OWN = 2  # this rank's new values
    ALL = 3  # these, and then those of the other ranks


@final
class LiveElements:
    """Counts the elements of all buffers that are gathered. Each buffer adds and subtracts its own."""

    def __init__(self) -> None:
        self.numel = 0


@final
class ParamBucket:
    """Owns one flat buffer of parameters: its memory, this rank's shard, what `.data` of each parameter is.

    Attributes:
        shards_params: ranks keep one shard each between uses (stage 3); else each keeps the full buffer.
        is_written: user code has written to parameters since the owner of the master last cleared it, as far
            as version counters and assignments to `.data` show.
        is_held: its unit stays gathered for now, whatever is called.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        group: FlatGroup,
        *,
        index: int,
        store: ShardStore,
        memory: ParamMemory,
        live: LiveElements,
        most_numel: int,
    ) -> None:
        """Move `params` (in the order of `layout.slots`) into `memory`, with the values of rank 0.

        Peak memory: the parameters plus this buffer; each parameter frees its memory as soon as it is
        copied. With `shards_params` only the shard stays.

        Args:
            live: counts the buffer while it is gathered, with `most_numel` elements.
        """
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.shards_params = shards_params = group.policy.shards_params
        self.group = group
        self.collectives = collectives = group.collectives
        self.sender = memory.sender
        self._state = ShardState.UNSHARDED
        self._live, self._most_numel = live, most_numel
        live.numel += most_numel
        self._handle: Handle | None = None  # while it is in flight
        self._reshards = shards_params
        self._overridden: dict[int, Tensor] = {}  # position -> the tensor that replaces `.data`
        self.memory = memory
        self.raw = memory.raw
        self._views = views_in(self.raw, layout)
        memory.fill(self._fill)
        self._placeholder = placeholder_like((), self.dtype, collectives.device)
        bits = bytes_of(self._placeholder)  # checked on CPUs alone
        self._placeholder_bytes = bytes(bits.tolist()) if bits.device.type == "cpu" else b""
        self._placeholders = [self._placeholder.expand(slot.shape) for slot in layout.slots]
        self._counted = [param for param in self.params if not param.is_inference()]
        self._counted_places = {id(param): place for place, param in enumerate(self._counted)}
        self._versions = self._read_versions()
        self.is_written = self.is_held = False
        self.stored_shard: Shard = Shard(memory.own)
        if shards_params:
            self.stored_shard = store.add(index, memory.own, self._to_device)
        self._arrival: JobHandle | None = None
        self._deferred = Deferred.NOTHING
        if shards_params:
            self.reshard()

    def _to_device(self, values: Tensor) -> Tensor:
        """A copy of `values` from which the other ranks gather."""
        return self.collectives.empty(values.numel(), values.dtype).copy_(values)

    def _fill(self, whole: Tensor) -> None:
        """Copy the parameters' values into `whole`, and make the parameters views of the buffer."""
        written: list[Tensor] = []
        for param, into, view in zip(
            self.params, views_in(whole, self.layout), self._views, strict=True
        ):
            owner = find_owner(param)
            if owner is None:
                written.append(into)
                into.copy_(param.data)
            else:
                owner.move_into(param, into)
            param.data = view
        for part in [whole] if len(written) == len(self.params) else written:
            self.group.everyone.broadcast(part)

    def _become(self, state: ShardState) -> None:
        is_gathered, was_gathered = state is ShardState.UNSHARDED, self.is_unsharded
        self._live.numel += self._most_numel * (is_gathered - was_gathered)
        self._state = state

    @property
    def dtype(self) -> torch.dtype:
        return self.raw.dtype

    @property
    def full_bytes(self) -> int:
        return self.layout.numel * self.raw.element_size()

    @property
    def is_unsharded(self) -> bool:
        """The full buffer may be used."""
        return self._state is ShardState.UNSHARDED

    @property
    def may_be_resharded(self) -> bool:
        """The buffer does not stay gathered all the time."""
        return self._reshards

    @property
    def shard(self) -> Tensor:
        """This rank's part, [shard_numel], with its values: waits for an update, and reads it from a disk."""
        self.arrive()
        self.stored_shard.load()
        return self.stored_shard.tensor

    def arrive(self) -> None:
        """Wait for values that an update is still sending from the host."""
        if self._arrival is not None:
            arrival, self._arrival = self._arrival, None
            arrival.wait_on_device()

    def expect(self, arrival: JobHandle) -> None:
        """New values of the shard are complete when `arrival` is."""
        self.sender.forget()
        self._arrival = arrival

    def defer(self, arrival: JobHandle, *, gathers: bool) -> None:
        """New values are complete when `arrival` is; `start_unshard` waits for it.

        Until then parameters read as if dropped. For buffers that are not sharded.
        gathers: only this rank's part arrives; the rest is gathered then.
        """
        self._arrival = arrival
        self._deferred = Deferred.ALL if gathers else Deferred.OWN
        self._become(ShardState.SHARDED)
        self._point_to(self._placeholders)

    @property
    def is_deferred(self) -> bool:
        """Parameters read as if dropped until `unshard`."""
        return self._deferred is not Deferred.NOTHING

    @property
    def gathers_deferred(self) -> bool:
        """The next `unshard` after `defer` sends something."""
        return self._deferred is Deferred.ALL and self.collectives.world_size > 1

    def keep_gathered(self) -> None:
        """From now on `reshard` does nothing: the full buffer stays gathered between steps."""
        self._reshards = False

    def start_unshard(self) -> None:
        """Start to gather all shards into the buffer, unless it is gathered or in flight.

        Sends (world_size - 1) shards per rank.
        """
        if self._state is not ShardState.SHARDED:
            return
        storage = self.raw.untyped_storage()
        if storage.nbytes() == 0:
            self._check_not_written()
            storage.resize_(self.full_bytes)
        self._handle = self._start_gather()
        self._become(ShardState.IN_FLIGHT)

    def _start_gather(self) -> Handle:
        if self.is_deferred:
            self._check_not_written()
            if self._deferred is Deferred.OWN:
                self.arrive()
                return Done()
        shard = self.collectives.shard_of(self.raw)
        if not self.is_on_host:
            return self.sender.gather(self.raw, self.shard)
        arrival, self._arrival = self._arrival, None
        fetched = self.stored_shard.fetch(shard, arrival)
        if self.collectives.world_size == 1:
            return ShardCopy(fetched)
        fetched.wait_on_device()
        return self.sender.gather(self.raw, shard)

    @property
    def may_start(self) -> bool:
        """`start_unshard` would not wait for an update on the host.

        Ranks may differ, as the updates of one may end earlier. Without tags all gathers must start in one
        order on all ranks, so there it is False until the update was waited for.
        """
        if self._arrival is None:
            return True
        if self.collectives.world_size == 1:
            return self._arrival.is_done or self.is_on_host
        return self.collectives.has_tags and self._arrival.is_done

    @property
    def is_on_host(self) -> bool:
        """The shard is in host memory, or on a disk."""
        return self.shards_params and self.stored_shard.is_on_host

    def exchange_shard(self, shard: Shard) -> Shard:
        """Gathers bring the values of `shard` from now on. Returns the one before. For all ranks."""
        self.sender.forget()
        before, self.stored_shard = self.stored_shard, shard
        return before

    @property
    def is_on_disk(self) -> bool:
        """The shard is on a disk."""
        return self.stored_shard.is_on_disk

    def serve(self, receivers: Sequence[int]) -> None:
        """Take part in a gather to the ranks `receivers` only, which may or may not include this one."""
        self.sender.forget()
        receives = self.collectives.rank in receivers
        if receives:
            self._check_not_written()
            self.raw.untyped_storage().resize_(self.full_bytes)
        shard = self._fetched_shard() if self.is_on_host else self.shard
        self.collectives.serve(self.raw if receives else None, shard, receivers, buffer=self.index)
        if receives:
            self._become(ShardState.UNSHARDED)
            self._point_to(self._views)

    def _fetched_shard(self) -> Tensor:
        """A copy of the shard on the device, of which the copying goes on until the device needs it."""
        arrival, self._arrival = self._arrival, None
        shard = torch.empty(
            self.layout.shard_numel, dtype=self.dtype, device=self.collectives.device
        )
        self.stored_shard.fetch(shard, arrival).wait_on_device()
        return shard

    def unshard(self) -> None:
        """Gather the full buffer."""
        if not self.is_unsharded:
            self.start_unshard()
            self.wait()

    def wait(self) -> None:
        """Wait for a gather in flight."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._become(ShardState.SHARDED)  # if the wait raises
            handle.wait()
            self._become(ShardState.UNSHARDED)
            if self.shards_params or self.is_deferred:
                self._deferred = Deferred.NOTHING
                self._point_to(self._views)

    def _point_to(self, values: Sequence[Tensor]) -> None:
        with NoTorchFunction():
            for position, (param, value) in enumerate(zip(self.params, values, strict=True)):
                if position not in self._overridden:
                    param.data = value

    def reshard(self) -> None:
        """Free the full buffer; the shard stays."""
        if self._reshards and self.is_unsharded:
            self.take_edits()
            self.sender.keep(self.raw)
            self._point_to(self._placeholders)
            self.raw.untyped_storage().resize_(0)
            self._become(ShardState.SHARDED)

    def discard(self) -> str:
        """`reshard`, without what user code has written. Returns a name if this rank's part was written."""
        start, stop = self.layout.shard_range(self.collectives.rank)
        changed = [self.layout.slots[position].name for position in self._assigned(self._views)]
        gathered, kept = self.collectives.shard_of(self.raw), self.shard.to(self.collectives.device)
        if not gathered.view(torch.uint8).equal(kept.view(torch.uint8)):
            pieces = self.layout.pieces_in(start, stop)
            cuts = [(piece.slot.name, slice(piece.start, piece.stop)) for piece in pieces]
            changed += [
                name for name, elements in cuts if not gathered[elements].equal(kept[elements])
            ]
        self._point_to(self._placeholders)
        self.raw.untyped_storage().resize_(0)
        self._become(ShardState.SHARDED)
        self._versions = self._read_versions()
        return changed[0] if changed else ""

    def abandon(self) -> None:
        """Be dropped, without a wait: what is in flight will not arrive, for the group has failed.

        Values that were deferred count as gathered, as others may have them: all ranks publish their own again.
        """
        self._handle = None
        self.is_held = False
        if self._deferred is Deferred.ALL:
            self._deferred = Deferred.NOTHING
            self._become(ShardState.UNSHARDED)
            self._point_to(self._views)
            self._versions = self._read_versions()
        elif self._reshards and self.raw.untyped_storage().nbytes():
            self._become(ShardState.SHARDED)
            self._point_to(self._placeholders)
            self.raw.untyped_storage().resize_(0)
            self._versions = self._read_versions()
        elif self._state is ShardState.IN_FLIGHT:
            self._become(ShardState.SHARDED)

    def start_publish(self, target: Tensor | None = None) -> None:
        """The shard has changed: start to gather it, if the full buffer stays gathered between steps.

        Earlier writes to the full parameters are lost, unless `take_edits` was called first.
        target: new values of this rank's part, which the buffer moves to: see `ParamSender.publish`.
        """
        self.sender.forget()
        if self._reshards:
            return
        self._become(ShardState.SHARDED)
        if target is None:
            self.start_unshard()
        else:
            self._handle = self.sender.publish(self.raw, target)
            self._become(ShardState.IN_FLIGHT)

    # -- what `param.data` refers to --------------------------------------------------------------------

    def end_sharing(self) -> None:
        """The engine ends: parameters get memory of their own."""
        self.raw = self.memory.release()
        self._views = views_in(self.raw, self.layout)
        self._point_to(self._views)

    def release(self) -> None:
        """The engine has ended: keep the gathered buffer alone, also in backward of a graph from before."""
        self.keep_gathered()
        if self.is_unsharded:
            self.stored_shard = Shard(self.collectives.shard_of(self.raw))
        self.sender = ExactSender(self.collectives, self.index)

    def override(self, position: int, full: Tensor) -> None:
        """`.data` of the parameter in slot `position` is `full`, a separate tensor, until `clear_override`."""
        self._overridden[position] = full
        self.params[position].data = full

    def clear_override(self, position: int) -> None:
        """End `override`; the values of `full` are lost unless they were written to the shard."""
        del self._overridden[position]
        is_dropped = self.is_deferred or (self.shards_params and not self.is_unsharded)
        views = self._placeholders if is_dropped else self._views
        self.params[position].data = views[position]

    @property
    def overridden(self) -> list[str]:
        """Names of the parameters whose `.data` is a tensor given to `override`."""
        return [self.layout.slots[position].name for position in self._overridden]

    def is_overridden(self, position: int) -> bool:
        """`.data` of the parameter in slot `position` is a tensor given to `override`."""
        return position in self._overridden

    def hide(self) -> None:
        """The memory of the buffer is about to be freed: parameters read as NaN, as if dropped."""
        self._point_to(self._placeholders)

    def show(self) -> None:
        """The memory of the buffer is allocated again: end `hide`."""
        if self.is_unsharded:
            self._point_to(self._views)

    def frozen_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """[from, to) of what is frozen now in [start, stop) of the buffer, in elements from `start` on."""
        frozen = {
            slot.offset
            for slot, param in zip(self.layout.slots, self.params, strict=True)
            if not param.requires_grad
        }
        if not frozen:
            return []
        pieces = self.layout.pieces_in(start, stop)
        return [(piece.start, piece.stop) for piece in pieces if piece.slot.offset in frozen]

    # -- writes by user code ---------------------------------------------------------------------------

    def take_edits(self, only: int | None = None) -> None:
        """Make user code's writes to full parameters, or assignments to their `.data`, their values.

        Args:
            only: the slot of the only parameter to look at; None: all.

        Raises:
            UsageError: a tensor of another shape or dtype was assigned, or `.data` was assigned while the
                parameter was dropped; the parameter is unchanged.
        """
        # none: it is dropped, or `hide` came before its memory was freed, where the state stays UNSHARDED
        has_memory = bool(self.raw.untyped_storage().nbytes())
        if not has_memory or self.is_deferred:
            self._check_not_written(only)
        if not (self.is_unsharded and has_memory):
            return
        with NoTorchFunction():
            if only is None:
                versions, self._versions = self._versions, self._read_versions()
                is_written = versions != self._versions
            else:
                is_written = self._is_written_alone(only)
            is_assigned = False
            if only is None or not _is_same(self.params[only], self._views[only]):
                is_assigned = self._take_assigned()
        is_written |= is_assigned
        self.is_written |= is_written
        if self.shards_params and (is_written or not self.is_on_host):
            self._write_back(None if is_assigned else only)

    def _read_versions(self) -> list[int]:
        """Numbers that grow with each write to a parameter, but not with the engine's own."""
        return [param._version for param in self._counted]

    def _is_written_alone(self, position: int) -> bool:
        """The parameter in slot `position` was written since this was asked last, about it or about all."""
        param = self.params[position]
        place = self._counted_places.get(id(param))
        if place is None or param._version == self._versions[place]:
            return False
        self._versions[place] = param._version
        return True

    def _take_assigned(self) -> bool:
        """Copy what was assigned to `.data`. True: something was."""
        assigned = self._assigned(self._views)
        if self.memory.is_shared:
            slots = self.layout.slots
            self.memory.refuse_assigned(
                [
                    (self.params[position], self._views[position], slots[position].name)
                    for position in assigned
                ]
            )
            return False
        for position in assigned:
            self._copy_assigned(position)
        return bool(assigned)

    def _assigned(self, values: Sequence[Tensor]) -> list[int]:
        """Positions of parameters whose `.data` is not their entry in `values`, without overridden ones."""
        with suppress(RuntimeError):  # dtypes differ
            if all(map(Tensor.is_set_to, self.params, values)):  # nearly always; in each step
                return []
        pairs = zip(self.params, values, strict=True)
        changed = [
            position for position, (param, value) in enumerate(pairs) if not _is_same(param, value)
        ]
        return [position for position in changed if position not in self._overridden]

    def _write_back(self, only: int | None) -> None:
        """Copy this rank's part of the full buffer, or of one slot of it, into the shard."""
        start, stop = self.layout.shard_range(self.collectives.rank)
        if only is not None:
            slot = self.layout.slots[only]
            start, stop = overlap((slot.offset, slot.stop), (start, stop))
        if start < stop:
            first = self.layout.shard_range(self.collectives.rank)[0]
            self.sender.take_written(self.raw, self.shard, start - first, stop - first)

    def gather_exactly(self) -> None:
        """From now on the buffer stays gathered, with exact values. For all ranks."""
        if self.sender.rounds:
            self.wait()
            self.take_edits()
            self.sender = ExactSender(self.collectives, self.index)
            self._become(ShardState.SHARDED)
        self.unshard()

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
                f"xds.initialize: the parameter has {tuple(view.shape)} and {view.dtype}, and is unchanged; "
                "assign a tensor of that shape and dtype, or use xds.zero.set_full_param"
            )
        view.copy_(given.clone())  # it may be another view of the same memory

    @torch.no_grad()
    def other_dtypes(self) -> list[int]:
        """Undo dtype changes by user code (`module.float()`); returns the positions of the parameters.

        Gathered parameters keep the values that were cast; dropped ones have no values to cast.
        """
        with NoTorchFunction():
            dtype = self.raw.dtype
            positions = [
                position for position, param in enumerate(self.params) if param.dtype is not dtype
            ]
            for position in positions:
                param, view = self.params[position], self._views[position]
                if self.is_unsharded and position not in self._overridden:
                    if not self.memory.is_shared:
                        view.copy_(param.data)
                    param.data = view
                else:
                    param.data = self._placeholders[position]
        return positions

    def _check_not_written(self, only: int | None = None) -> None:
        """Check for writes to dropped parameters: torch lets fill_ and zero_ pass, and assignments to .data."""
        with NoTorchFunction():
            is_one = only is not None and _is_same(self.params[only], self._placeholders[only])
            changed = [] if is_one else self._assigned(self._placeholders)
            for position in changed:
                self.params[position].data = self._placeholders[position]
            assigned = [self.layout.slots[position].name for position in changed]
        if assigned:
            shown = ", ".join(assigned[:3]) + (", ..." if len(assigned) > 3 else "")
            raise UsageError(f".data of {shown} was assigned while dropped (stage 3): {_REMEDY}")
        bits = bytes_of(self._placeholder)
        if bits.device.type == "cpu" and bytes(bits.tolist()) != self._placeholder_bytes:
            names = self.layout.slots[0].name, self.layout.slots[-1].name
            bits.copy_(bits.new_tensor(list(self._placeholder_bytes)))
            raise UsageError(
                f"a parameter between {names[0]} and {names[1]} was written while it was dropped (stage 3): "
                f"{_REMEDY}"
            )


def placeholder_like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The placeholder for a dropped parameter: one NaN expanded to its shape; torch refuses most writes.

    Integers read as their smallest value. Bools read as True, stored as a byte that no write produces.
    """
    if dtype == torch.bool:
        value = torch.full((1,), 2, dtype=torch.uint8, device=device).view(torch.bool)
    elif dtype.is_floating_point:
        value = torch.full((1,), torch.nan, device=device).to(dtype)
    else:
        value = torch.full((1,), torch.iinfo(dtype).min, dtype=dtype, device=device)
    return value[0].expand(tuple(shape))


def bytes_of(scalar: Tensor) -> Tensor:
    """The bytes of one element, as a view."""
    return scalar.view(1).view(torch.uint8)


_REMEDY = (
    "the value is lost and the parameters are unchanged; write inside "
    "xds.zero.GatheredParameters(params, modifier_rank=0), or use xds.zero.set_full_param"
)


def _is_same(param: Tensor, value: Tensor) -> bool:
    """`.data` of `param` is `value`: the same dtype, memory, shape and strides."""
    return param.dtype is value.dtype and param.is_set_to(value)


def computed_values(params: ParamBucket, *, is_sharded: bool) -> Tensor:
    """The values that forward computes with, [n]: all of them, or this rank's shard."""
    params.arrive()
    return params.shard if is_sharded or params.shards_params else params.raw


__all__ = [
    "LiveElements",
    "ParamBucket",
    "ParamMemory",
    "ShardState",
    "computed_values",
    "own_memory",
    "placeholder_like",
    "views_in",
]
