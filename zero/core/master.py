"""The master weights of one flat buffer, at their store, and the values that forward computes with.

device store    master [n] ──cast──> compute [n]               one memory if there is no cast
                compute [n] and its rest [n]                   halves of fp32 masters: see split_storage.py
host store      master [n] (host) ──cast──> buffer ──to_device──> compute [n]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ...offload.interfaces import (
    DeviceToHostCopy,
    FinishedJob,
    JobHandle,
    Mark,
    MasterStore,
    StateStorage,
)
from ...ops.flat import fingerprint, take_edits
from ...ops.halves import write_upper
from ...ops.optim.shard_optimizer import Item, Old, ParamPart, Update
from ...ops.rounding import narrowed
from ..layout.layout import Piece
from .grad_bucket import GradBucket
from .param_bucket import ParamBucket, computed_values

if TYPE_CHECKING:
    from ...offload.host import HostStore
    from .split_storage import SplitStorage


@final
class Master:
    """The master weights of one flat buffer, or of this rank's shard of it, and their items.

    The *compute values* are those that forward computes with.

    Attributes:
        casts: they have a narrower dtype than the master.
        crosses_device: one of master and compute values is on the host, and the other is not; or the compute
            values are on a disk.
        rounds_away: they are rounded as upper halves, see ops/halves.py, whether the master is split or not.
        split: the master has no memory, but is the compute values and what is there; None: it has memory.
        has_compute_copy: they have memory of their own, for a cast, another device, or how they are sent.
        has_sent_delta: how they change was sent last, so they are close to the cast master, and not equal.
    """

    def __init__(self, params: ParamBucket, grads: GradBucket, store: MasterStore) -> None:
        layout, policy = params.layout, grads.group.policy
        dtype = policy.master_dtype(params.dtype)
        is_sharded = policy.shards_optimizer
        self.rank = rank = grads.group.collectives.rank  # in the group of the buffer
        self.params = params
        self.grads = grads
        self.store = store
        self.is_sharded = is_sharded
        self.casts = params.dtype != dtype
        self.rounds_away = policy.rounds_away(params.dtype)
        self.has_sent_delta = False
        self._use_store(store)
        self._update: JobHandle = FinishedJob()
        self.split: SplitStorage | None = None
        if self.rounds_away and not (store.is_on_host or self.crosses_device or self._keeps_master):
            from .split_storage import SplitStorage

            self.split = SplitStorage(params, is_sharded=is_sharded)
            self._tensor = self.split.master
        elif self.has_compute_copy:
            self._tensor = store.copy_in(self.compute, dtype)
        else:  # the parameters themselves are the master
            self._tensor = self.compute.detach()
        # after a delta: the fingerprint of the compute values that the engine wrote
        self._published: Tensor | None = None
        self.remember()
        start, stop = layout.shard_range(rank) if is_sharded else (0, layout.numel)
        pieces = layout.pieces_in(start, stop)
        self.items = [
            Item(
                master=self._tensor[segment.start : segment.stop],
                group=segment.group,
                parts=parts_in(pieces, segment.start, segment.stop),
                flat=params.index,
                start=segment.start,
                state_dtype=policy.state_dtype(params.dtype),
                rounding_seed=policy.rounding_seed,
                rounds_away=self.rounds_away,
            )
            for segment in layout.segments_in(start, stop)
        ]
        self.state_storage: StateStorage = self.split or store.state_storage(
            params.index, self._tensor, holds_master=self.has_compute_copy
        )
        for item in self.items:  # on a disk the values leave memory, also those of the items' views
            self.state_storage.add_view(item.master, item.start)

    def _use_store(self, store: MasterStore) -> None:
        self.store = store
        self.crosses_device = store.is_on_host != self.params.is_on_host or self.params.is_on_disk
        self.has_compute_copy = self.casts or self.crosses_device or self._keeps_master

    @property
    def _keeps_master(self) -> bool:
        return self.is_sharded and self.params.sender.keeps_master

    @torch.no_grad()
    def move(self, store: MasterStore, device: torch.device) -> None:
        """Continue at `store`, whose memory is on `device`: between two steps, without gradients.

        `raw` and the items' tensors stay the same objects. Views that others made keep the old memory.
        """
        self.load()
        self.state_storage.release()
        self.state_storage = StateStorage()
        self._use_store(store)
        self._tensor.data = (
            self._tensor.to(device, copy=True) if self.has_compute_copy else self.compute.detach()
        )
        for item in self.items:
            item.master.data = self._tensor[item.start : item.start + item.master.numel()]
        self.remember()
        self.grads.move(store)

    @property
    def read_state_dtype(self) -> torch.dtype:
        """The dtype in which a script reads a state of it: fp32 for codes of 8 bits."""
        dtype = self.grads.group.policy.state_dtype(self.params.dtype)
        return dtype if dtype.is_floating_point else torch.float32

    @property
    def sends_differences(self) -> bool:
        """The next update publishes differences: see `ParamSender.publish`."""
        return self.is_sharded and self.params.sender.sends_differences

    @property
    def copy_bytes(self) -> int:
        """Bytes that the master would take on the device, beside forward's values."""
        return self._tensor.nbytes if self.casts or self.params.is_on_host else 0

    @property
    def tensor(self) -> Tensor:
        """The master weights [n], with their values. Waits like `wait`."""
        self.load()
        return self._tensor

    @property
    def raw(self) -> Tensor:
        """The same without waiting, for the update itself. Between updates it may read as NaN."""
        return self._tensor

    @property
    def memory(self) -> Tensor:
        """The memory that the master has, [n]: `raw`, or the lower halves."""
        return self._tensor if self.split is None else self.split.low

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of this object that share its memory."""
        return [self.memory, self._tensor, *(item.master for item in self.items)]

    @property
    def compute(self) -> Tensor:
        """The values that forward computes with, [n]."""
        return computed_values(self.params, is_sharded=self.is_sharded)

    @property
    def host(self) -> HostStore:
        """Its store, which is on the host."""
        from ...offload.host import HostStore

        assert isinstance(self.store, HostStore)
        return self.store

    def wait(self) -> None:
        """Wait for the update that runs on the host. An early one whose step is not decided yet is undone."""
        self.grads.total.early_update.undo()
        update, self._update = self._update, FinishedJob()
        update.wait()

    def load(self) -> None:
        """The master and its states have their values in memory; see `StateStorage.load`.

        Those of halves have them after `join`.
        """
        self.wait()
        self.state_storage.load()

    def join(self) -> None:
        """Let a master of halves have its values in memory until `write_compute` or `drop`."""
        if self.split is not None:
            self.split.join()

    def drop(self) -> None:
        """End `join`; what was written is lost."""
        if self.split is not None:
            self.split.drop()

    # -- writes by user code ----------------------------------------------------------------------------

    def remember(self) -> None:
        """The values that forward computes with are the engine's own."""
        if self.has_sent_delta:
            self._published = fingerprint(self.compute)
        self.params.is_written = False

    def written(self) -> Tensor:
        """After a delta: not 0 if user code has written to the compute values since `remember`; int64 []."""
        assert self._published is not None
        return fingerprint(self.compute) - self._published

    @torch.no_grad()
    def take_edits(self, start: int = 0, stop: int | None = None) -> None:
        """Copy computed values [start, stop) that user code wrote: those that differ from the rounded master.

        Where the master or the values are on the host: only if `ParamBucket.is_written` says so. Of a split
        master they are the upper halves, and the lower ones stay, if `SplitStorage.begin_edit` was not called.
        """
        if not self.has_compute_copy:
            return
        stop = self._tensor.numel() if stop is None else stop
        if self.split is not None:
            self.split.take_edits()
            return
        if self.has_sent_delta:
            is_written = bool(int(self.written()))
        else:
            is_written = self.params.is_written
        if not (self.store.is_on_host or self.crosses_device or self.has_sent_delta):
            own, values = self.tensor[start:stop], self.compute[start:stop]
            take_edits(own, values, rounds_away=self.rounds_away)
        elif is_written:
            self.take_edits_across()

    @torch.no_grad()
    def take_edits_across(self) -> None:
        """The same over devices or after a delta, for all values. A delta that was not sent is lost."""
        values = self.compute.to(self._tensor.device)
        if self.casts and not self.has_sent_delta:
            take_edits(self.tensor, values, rounds_away=self.rounds_away)
        else:
            self.tensor.copy_(values)
            self.has_sent_delta = False
        self.remember()

    # -- an update --------------------------------------------------------------------------------------

    def frozen_ranges(self) -> list[tuple[int, int]]:
        """[from, to) of what is frozen now, in this rank's part."""
        layout = self.params.layout
        whole = (0, layout.numel)
        bounds = layout.shard_range(self.rank) if self.is_sharded else whole
        return self.params.frozen_ranges(*bounds)

    def updates(
        self,
        groups: Sequence[dict[str, Any]],
        grad: Tensor,
        out: Tensor | None,
        *,
        has_old: bool,
        old: Sequence[Old] | None = None,
        is_counted: bool = False,
    ) -> list[Update]:
        """For each item its gradient, the place of its new values and its hyperparameters.

        old: for each item the values before, if they are in other memory.
        """
        updates = []
        halves = None if self.split is None else self.split.halves
        for index, item in enumerate(self.items):
            elements = slice(item.start, item.start + item.master.numel())
            values = None if out is None else out[elements]
            before = None if old is None else old[index]
            group = groups[item.group]
            both = None if halves is None else halves.part(elements.start, elements.stop)
            updates.append(
                Update(item, grad[elements], values, group, has_old, before, is_counted, both)
            )
        return updates

    def use_memory(self, memory: Tensor) -> None:
        """Continue in `memory` [n], whose contents count from now on. All tensors stay the same objects."""
        storage, start = memory.untyped_storage(), int(memory.storage_offset())
        self._tensor.set_(storage, start, self._tensor.shape, self._tensor.stride())
        for item in self.items:
            tensor = item.master
            tensor.set_(storage, start + item.start, tensor.shape, tensor.stride())

    def begin_update(self, handle: JobHandle) -> None:
        """An update runs on the host until `handle` is done; it reads the gradients until then."""
        self._update = handle
        self.grads.total.store.set_reader(handle)

    def begin_send(self) -> Tensor:
        """New values will be sent; the result is what `send` takes for them. Writes to old ones are lost."""
        if not self.params.is_on_disk:
            return self.compute
        self.params.arrive()
        self.params.stored_shard.discard()
        return self.params.stored_shard.tensor

    @torch.no_grad()
    def send(self, values: Tensor, compute: Tensor, after: Mark | None) -> JobHandle:
        """Start to copy `values`, a buffer of the sender, to `compute`. In the thread of updates.

        compute: the result of `begin_send`, which must not be called in that thread: it may wait for this copy.
        """
        if self.params.is_on_disk:
            self.params.stored_shard.write(values)
            return FinishedJob()
        return self.host.copier.send(values, compute, after)

    @property
    def publishes(self) -> bool:
        """Other ranks need this rank's new values, or the values of a unit are gathered again."""
        return self.is_sharded or self.params.shards_params

    def publish(self) -> None:
        """Start to send this rank's new values, or how they differ from what all ranks hold; if it must."""
        if not self.publishes:
            return
        self.has_sent_delta = self.sends_differences
        if self.has_sent_delta:
            self.params.start_publish(target=self._tensor)
        else:
            self.params.start_publish()

    def write_copy(self) -> None:
        """After an update: set the values that forward computes with if it has not, and if they are sent."""
        is_written = self.casts and not self.crosses_device
        if self.has_compute_copy and not is_written and not self.sends_differences:
            self.write_compute()

    def _narrowed(self) -> Tensor:
        return narrowed(self.tensor, self.params.dtype, rounds_away=self.rounds_away)

    @torch.no_grad()
    def write_compute(self) -> None:
        """Set the values that forward computes with from the masters."""
        self.has_sent_delta = False
        if self.split is not None:
            self.split.divide()
            self.remember()
            return
        if self.params.is_on_disk and not self.store.is_on_host:
            self.send(self._narrowed().to("cpu"), self.begin_send(), None)
            return
        if not self.crosses_device:
            if self.has_compute_copy:
                self.compute.copy_(self._narrowed())
            self.remember()
            return
        if not self.store.is_on_host:
            # on this stream, so that a fetch of the new values comes after it; one wait for all masters
            self.compute.copy_(self._narrowed(), non_blocking=True)
            self.params.expect(DeviceToHostCopy(self._tensor.device))
            self.remember()
            return
        tensor, compute = self.tensor, self.begin_send()
        mark = self.host.queues.to_device.mark()
        handles: list[JobHandle] = []

        def work() -> None:
            values = self.host.copier.buffer(tensor.numel(), self.params.dtype)
            if self.rounds_away:
                write_upper(values, tensor)
            else:
                values.copy_(tensor)
            handles.append(self.send(values, compute, mark))

        self.host.queues.updates.run(work).wait()
        handles[0].wait_on_device()


def parts_in(pieces: Sequence[Piece], start: int, stop: int) -> tuple[ParamPart, ...]:
    """The pieces that begin in [start, stop), relative to `start`. pieces: in the order of their starts."""
    first = bisect_left(pieces, start, key=_start_of)
    last = bisect_left(pieces, stop, lo=first, key=_start_of)
    return tuple(
        ParamPart(
            p.slot.name,
            p.slot.shape,
            p.slot.group,
            p.start - start,
            p.stop - start,
            p.slot_start,
            p.slot.channels_last,
        )
        for p in pieces[first:last]
    )


def _start_of(piece: Piece) -> int:
    return piece.start


__all__ = ["Master", "parts_in"]
