"""The sum over ranks of one buffer's gradients since the last step: who has which part of it, and where.

SingleRankSum    the local sum is the sum                        one rank, update on the device
SingleRankHost   the local sum is copied to the host's store     one rank, update on the host
ReplicatedSum    every rank has all: shards are reduced, then gathered into the local sum         stage 0
ShardedSum       each rank has its shard [n]                                                      stages 1 to 3
ShardedHost      each rank's shard is copied to the host's store                                  the same

A reduction adds to the sum of earlier ones. `GradBucket` chooses one of these by its group and its store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import final

import torch
from torch import Tensor

from ...compression.scheme import GradientReducer
from ...offload.interfaces import GradStore
from ...ops.comm.handles import Handle
from ...ops.device import wide_place
from ...ops.kernels.decide import exact_square_sum, square_sum
from ..layout.groups import FlatGroup
from .local_sum import FreedMemory, LocalSum


class EarlyUpdate:
    """An update of the bucket that runs on the host before its step is known. By default none does."""

    def sum_sent(self) -> None:
        """A reduced sum is on its way to the host: the update may begin."""
        return

    def undo(self) -> None:
        """The sum is about to change, or the master and its states are read: undo the update."""
        return


class ReducedSum(ABC):
    """The sum over ranks since the last step. `local` is the local sum of the same bucket.

    Attributes:
        keeps_local: the local sum is the sum over ranks: nothing is sent, so no gradient is late.
        sends_held: a local sum leaves after each backward, also where other ranks hold theirs back.
        sees_all: this rank has the sums of the whole buffer; else those of its shard.
        has_sum: something was reduced since the last step.
        store: where the sum is, if it is on the host.
        reducer: how sums are sent.
        early_update: the update of the bucket, if it may begin before its step.
    """

    keeps_local = False
    sends_held = False
    sees_all = True

    def __init__(
        self, group: FlatGroup, local: LocalSum, reducer: GradientReducer, store: GradStore
    ) -> None:
        self.store = store
        self.reducer = reducer
        self.early_update = EarlyUpdate()
        self.has_sum = False
        self._local = local
        self._ranks = group.collectives
        self._policy = group.policy
        self._squares: Tensor | None = None  # of the only sum that has left for the host

    # -- before gradients are added to the local sum -----------------------------------------------------

    def open_local(self) -> None:
        """The local sum is about to be written: it gets memory that it does not share with this sum."""
        if not self._local.is_writable:
            self._local.prepare()
            self.store.wait_on_device()
            self._separate_from_local()

    def _separate_from_local(self) -> None:
        """The local sum is about to change: copy the shard that shares its memory."""
        return

    def before_arithmetic(self, *, adds: bool) -> None:
        """More than a copy is about to be computed in the local sum. adds: a slot has a gradient already."""
        return

    # -- over ranks -------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, local: Tensor) -> None:
        """Start to add the settled local sum. Sends (world_size - 1) * n elements."""

    def finish(self) -> None:
        """Wait for the reduction in flight; afterwards the local sum may be written again."""
        return

    def cross_replicas(self) -> Handle | None:
        """Start to add what the reductions of a step left out; see `GradientReducer.cross_replicas`."""
        return None

    def start_gather(self) -> None:
        """Stage 0: start to gather all shards into the local sum. Sends (world_size - 1) shards per rank."""
        return

    def finish_gather(self) -> None:
        """Wait for the gather in flight."""
        return

    def fill_with_zeros(self) -> None:
        """No backward of the step has run the buffer, on any rank: its sums are zeros, without a message.

        A gradient that has arrived all the same stays late.
        """
        raise AssertionError("one rank sends its own zeros")

    # -- the update's view ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def sums(self) -> Tensor | None:
        """The sums that this rank has: of the whole buffer where `sees_all`, else of its shard."""

    def squares(self, *, exact: bool) -> Tensor:
        """The squared norm of each shard of the sums that this rank has, [world_size] fp64; 0 for the others.

        It is where the sums are, or on the host: see `wide_place`. exact: see `exact_square_sum`.
        """
        if self._squares is not None and not exact:
            return self._squares
        return self._squares_of(self.sums, exact=exact)

    @property
    def norm_before_gather(self) -> bool:
        """The norm of this rank's shard may be read before the gather ends: exact sums on CPUs."""
        return False

    def own_square(self, *, exact: bool) -> Tensor:
        """[] fp64: that of this rank's shard, where `norm_before_gather`."""
        raise AssertionError("the norm comes after the gather")

    def for_update(self) -> Tensor:
        """The sums that the optimizer reads: the shard if its state is sharded, else the whole buffer."""
        sums = self.sums
        assert sums is not None
        return sums

    def for_script(self) -> Tensor | None:
        """The same, which the caller may change; None: nothing was reduced since the last step."""
        if not self.has_sum:
            return None
        return self.store.widened() if self.store.is_on_host else self.for_update()

    def forget_norm(self) -> None:
        """The sums are about to be changed by somebody else."""
        self._squares = None
        self.early_update.undo()

    def _squares_of(self, sums: Tensor | None, *, exact: bool) -> Tensor:
        """The squared norm of each shard in `sums`: all shards, or this rank's; None: nothing."""
        if sums is None or not self.sees_all:
            return self._square_of_own(sums, exact=exact)
        ranks = range(self._ranks.world_size)
        squares = [self._square(self._ranks.shard_of(sums, rank), exact=exact) for rank in ranks]
        return squares[0].view(1) if len(squares) == 1 else torch.stack(squares)

    def _square_of_own(self, shard: Tensor | None, *, exact: bool) -> Tensor:
        """The same of this rank's shard alone."""
        device = wide_place(self._local.device if shard is None else shard.device)
        squares = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=device)
        if shard is not None:
            squares[self._ranks.rank] = self._square(shard, exact=exact)
        return squares

    def _square(self, values: Tensor, *, exact: bool) -> Tensor:
        compute = exact_square_sum if exact else square_sum
        return compute(values, self._local.dtypes.params)

    def abandon(self) -> None:
        """What is in flight will not arrive: forget it, and what is left of the sum. `reset` follows."""
        return

    # -- the end of a step, and of an accumulation ----------------------------------------------------------

    def reset(self) -> None:
        """Drop the sum: the step is done, or skipped. Nothing is in flight."""
        self.has_sum = False
        self._squares = None
        self.store.reset()
        if self._local.freed is not FreedMemory.STAYS:
            self._local.free()

    def release(self) -> None:
        """Free all buffers, which are unused between a step and the next backward."""
        self._local.detach()

    @property
    def held_bytes(self) -> int:
        """Bytes from the first gradient of a step to the update, without those of the pool."""
        local = self._local.buffer
        is_of_pool = self._local.freed is FreedMemory.TO_POOL
        return 0 if is_of_pool or local is None else local.nbytes

    def saved(self) -> Tensor | None:
        """The sum as it lies in memory; None: there is none."""
        return self.store.total() if self.has_sum else None

    @abstractmethod
    def restore(self, saved: Tensor) -> None:
        """Continue from `saved`, directly after `reset`."""

    def _send_to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Start to copy `source` to the host; then its `buffer` returns to the pool."""
        # the norm is that of what is stored: a sum of fewer bits is rounded on the host
        is_exact = not self.has_sum and source.dtype.itemsize <= self._local.dtypes.sums.itemsize
        self._squares = self._squares_of(source, exact=False) if is_exact else None
        self.has_sum = True
        self.early_update.undo()
        self.store.add(source, partial(self._local.pool.give, buffer))
        self.early_update.sum_sent()


@final
class SingleRankSum(ReducedSum):
    """One rank: the local sum is the sum, in the dtype of sums."""

    keeps_local = True

    def start(self, local: Tensor) -> None:
        return

    @property
    def sums(self) -> Tensor | None:
        return self._local.buffer

    def restore(self, saved: Tensor) -> None:  # saved with offload, where sums are on the host
        self._local.continue_sum(saved.to(self._local.device))


class _InStore(ReducedSum):
    """The sum that this rank has is in the host's store."""

    @property
    def sums(self) -> Tensor | None:
        return self.store.total()

    def restore(self, saved: Tensor) -> None:
        self.store.put(saved)
        self.has_sum = True


@final
class SingleRankHost(_InStore):
    """One rank: local sums are copied to the host, in the parameters' dtype while each slot has one gradient.

    More than a copy is computed in the dtype of sums, whatever the buffer's dtype was.
    """

    sends_held = True

    def before_arithmetic(self, *, adds: bool) -> None:
        self._local.widen()
        if adds and self.has_sum:
            self._load_sum()

    def _load_sum(self) -> None:
        """A slot gets a second gradient in this backward: sums are taken in the order of arrival.

        (earlier + first) + second differs in the last bit from earlier + (first + second).
        """
        self.early_update.undo()
        earlier = self.store.total()
        assert earlier is not None
        self._local.continue_sum(earlier)
        self.store.reset()
        self.has_sum, self._squares = False, None

    def start(self, local: Tensor) -> None:
        self._send_to_host(local, local)
        self._local.detach()


class _OverRanks(ReducedSum):
    """Several ranks: each has the shard `_reduced` [n] of the sum, possibly as a part of the local sum."""

    _reduced: Tensor | None = None
    # for `held_bytes`, also between steps: of the last one on a device, if it had memory of its own
    _reduced_bytes = 0
    _payload: Tensor | None = None  # the local sum in the dtype that is sent
    _handle: Handle | None = None  # of the reduction or the gather in flight

    @property
    def _is_in_local(self) -> bool:
        local = self._local.buffer
        if self._reduced is None or local is None:
            return False
        return bool(self._reduced.untyped_storage()._cdata == local.untyped_storage()._cdata)

    def _separate_from_local(self) -> None:
        if self.has_sum and self._is_in_local:
            assert self._reduced is not None
            self._reduced = self._reduced.clone()

    def _fits(self, local: Tensor) -> bool:
        """The shard of the sum may be a part of the local sum."""
        return local.dtype == self._local.dtypes.sums and not self._policy.shards_grads

    def start(self, local: Tensor) -> None:
        adds = self.has_sum and self._reduced is not None
        assert self._handle is None
        if self._fits(local) and not adds:
            self._reduced = self._ranks.shard_of(local)
        elif self._reduced is None:
            self._reduced = self._new_reduced()
        self._send(local, self._reduced, adds=adds)
        self._local.mark_empty()

    def _send(self, local: Tensor, reduced: Tensor, *, adds: bool) -> None:
        sent = self._local.dtypes.sent
        payload = local
        if local.dtype != sent and not self.reducer.is_lossy:
            payload = self._local.pool.take(local.numel(), sent, local.device)
            payload.copy_(local)
            self._payload = payload
        self._handle = self.reducer.reduce(payload, reduced, add=adds)

    def _new_reduced(self) -> Tensor:
        layout, device = self._local.layout, self._local.device
        reduced = self._local.pool.empty(layout.shard_numel, self._local.dtypes.sums, device)
        self._reduced_bytes = 0 if device.type == "cpu" else reduced.nbytes
        return reduced

    def finish(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        handle.wait()
        self._local.is_writable = False
        if self._payload is not None:
            self._local.pool.give(self._payload)
            self._payload = None
        self._leave()
        self.has_sum = True

    def _leave(self) -> None:
        """The sum has arrived: free what nobody needs now."""
        if self._policy.shards_grads:
            self._local.free()

    def cross_replicas(self) -> Handle | None:
        if self._reduced is None or not self.has_sum:
            return None
        return self.reducer.cross_replicas(self._reduced)

    def finish_gather(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()

    def abandon(self) -> None:
        self._handle = self._payload = None
        self._reduced = None  # of the shard that this rank had in the group before

    def reset(self) -> None:
        is_on_device = self._local.device.type != "cpu"
        if is_on_device or (self.store.is_on_host and self._is_in_local):
            self._reduced = None
        super().reset()
        local = self._local.buffer
        if self._local.freed is FreedMemory.STAYS and local is not None:
            fits = local.dtype == self._local.dtypes.sums
            if fits or self._is_in_local:
                self._reduced = self._ranks.shard_of(local) if fits else None

    def release(self) -> None:
        super().release()
        self._reduced = None
        self._reduced_bytes = 0

    @property
    def held_bytes(self) -> int:
        reduced = None if self._is_in_local else self._reduced
        return super().held_bytes + (self._reduced_bytes if reduced is None else reduced.nbytes)

    def saved(self) -> Tensor | None:
        if self._reduced is None:
            return super().saved()
        return self._reduced if self.has_sum else None

    def restore(self, saved: Tensor) -> None:
        self._reduced = saved.to(self._local.device)
        self.has_sum = True


@final
class ReplicatedSum(_OverRanks):
    """Every rank has all sums, in the local sum, or in the host's store."""

    _next_handle: Handle | None = None  # of the gather that follows the reduction in flight

    def _send(self, local: Tensor, reduced: Tensor, *, adds: bool) -> None:
        if local.dtype == self._local.dtypes.sent and not adds:
            whole = self.reducer.reduce_whole(local, reduced)
            if whole is not None:
                self._handle, self._next_handle = whole
                return
        super()._send(local, reduced, adds=adds)

    def abandon(self) -> None:
        super().abandon()
        self._next_handle = None

    def start_gather(self) -> None:
        if self._next_handle is not None:
            self._handle, self._next_handle = self._next_handle, None
            return
        local = self._local.buffer
        assert local is not None and self._reduced is not None
        # late gradients are not overwritten
        whole = torch.empty_like(local) if self._local.has_arrived else local
        self._handle = self.reducer.gather(self._reduced, whole)
        # every rank has the same sums, which are not quite the reduced ones
        if self.reducer.is_lossy:
            self._reduced = self._ranks.shard_of(whole)

    def finish_gather(self) -> None:
        if self._next_handle is not None:  # a late gradient comes before `start_gather`
            self._next_handle.wait()
        if self._handle is None:
            return
        super().finish_gather()
        if self.store.is_on_host and not self._local.has_arrived:  # else they are gathered again
            local = self._local.buffer
            assert local is not None
            self._squares = self._squares_of(local, exact=False)
            self.store.replace(local)

    def fill_with_zeros(self) -> None:
        if self._local.has_arrived:
            self._reduced, self.has_sum = self._new_reduced().zero_(), True
            return
        self.open_local()
        local = self._local.settle()
        self.has_sum = True
        is_wide = local.dtype == self._local.dtypes.sums
        self._reduced = self._ranks.shard_of(local) if is_wide else self._new_reduced().zero_()
        self._local.mark_empty()
        self._local.is_writable = False
        if self.store.is_on_host:
            self.store.replace(local)

    @property
    def sums(self) -> Tensor | None:
        return self.store.total() if self.store.is_on_host else self._local.buffer

    @property
    def norm_before_gather(self) -> bool:
        # a device runs the gather first, and the host does not wait for it
        is_on_cpu = self._ranks.device.type == "cpu" and not self.store.is_on_host
        return is_on_cpu and not self.reducer.is_lossy

    def own_square(self, *, exact: bool) -> Tensor:
        local = self._local.buffer
        shard = None if local is None else self._ranks.shard_of(local)
        return self._square_of_own(shard, exact=exact)[self._ranks.rank]

    def for_update(self) -> Tensor:
        self.finish_gather()
        return super().for_update()


@final
class ShardedSum(_OverRanks):
    """Each rank has its shard, on the device."""

    sees_all = False

    def fill_with_zeros(self) -> None:
        self._reduced, self.has_sum = self._new_reduced().zero_(), True

    @property
    def sums(self) -> Tensor | None:
        return self._reduced


@final
class ShardedHost(_InStore, _OverRanks):
    """Each rank's shard is copied to the host's store, and its buffers return to the pool."""

    sees_all = False

    def _new_reduced(self) -> Tensor:
        layout, dtypes = self._local.layout, self._local.dtypes
        return self._local.pool.take(layout.shard_numel, dtypes.sums, self._local.device)

    def _leave(self) -> None:
        """Copy this rank's part of the sum to the host. The local sum is free, unless it contains that part."""
        reduced, local = self._reduced, self._local.buffer
        assert reduced is not None and local is not None
        # a sum on the host is not summed again on the device
        rest = self.reducer.cross_replicas(reduced)
        if rest is not None:
            rest.wait()
        if self._is_in_local:
            self._send_to_host(reduced, local)
            self._local.detach()
        else:
            self._local.free()
            self._send_to_host(reduced, reduced)
        self._reduced = None

    def fill_with_zeros(self) -> None:
        zeros = self._new_reduced().zero_()
        self.has_sum = True
        self._send_to_host(zeros, zeros)


__all__ = [
    *("EarlyUpdate", "ReducedSum", "ReplicatedSum"),
    *("ShardedHost", "ShardedSum", "SingleRankHost", "SingleRankSum"),
]
