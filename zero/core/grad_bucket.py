"""The gradients of one flat buffer: from autograd's tensors to this rank's part of the reduced sum.

    autograd -> param.grad --copy--> local [world_size * n] --reduce--> reduced [n] --(stage 0) gather--> local

- `LocalSum` has the gradients of this rank since the last reduction, `ReducedSum` the sum over ranks since the
  last optimizer step.
- A gradient that arrives after its bucket was sent is late: it stays in the local sum, and the ranks agree on
  a second reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from ...compression.scheme import ExactReducer
from ...offload.interfaces import GradStore, MasterStore
from ...ops.pool import BufferPool
from ..layout.groups import FlatGroup, buffer_of
from ..layout.layout import FlatLayout
from .arrivals import Added, Arrivals
from .local_sum import FreedMemory, GradDtypes, LocalSum
from .reduced_sum import (
    ReducedSum,
    ReplicatedSum,
    ShardedHost,
    ShardedSum,
    SingleRankHost,
    SingleRankSum,
)

SMALL_NUMEL = 1 << 14  # gradients with fewer elements are summed in `.grad` if several arrive
# on a CPU: a gradient of so many elements is copied when it arrives, while it is in the cache
LARGE_NUMEL = 1 << 17


class GradSums(NamedTuple):
    """Gradients since the last step: this rank's [world_size * n], the slots that have one, the reduced [n]."""

    local: Tensor | None
    filled: list[bool]
    reduced: Tensor | None


class BucketState(Enum):
    """The life of a bucket in one step.

    EMPTY --begin_backward--> FILLING --start_reduce--> SENT --finish_reduce--> REDUCED --reset--> EMPTY

    With accumulation the next backward begins in any of the last three.
    """

    EMPTY = 1  # no backward since the last step
    FILLING = 2  # gradients of the last backward are added; they are not sent
    SENT = 3  # the reduction has begun: a gradient is late
    REDUCED = 4  # the reduction has ended: a gradient is late


@final
class GradBucket:
    """Owns the gradients of one flat buffer: counts and accumulates them, and starts their reduction.

    Attributes:
        layout, params, index, group: the slots, the parameter of each, the number of the buffer, its ranks.
        arrivals: the gradients that the running backward has computed and will compute.
        local: this rank's gradients since the last reduction.
        total: the sum over ranks since the last step.
        has_kept: the reducer has gradients of micro-batches that no message had yet.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        group: FlatGroup,
        dtypes: GradDtypes,
        *,
        pool: BufferPool,
        store: GradStore,
        index: int,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.group = group
        self.is_single_rank = group.collectives.world_size == 1
        self.has_kept = False
        self.state = BucketState.EMPTY
        self.reducer = group.scheme.reducer(buffer_of(layout, index, dtypes.params, group))
        self.local = LocalSum(layout, self.params, pool, dtypes)
        self._is_small = [slot.numel < SMALL_NUMEL for slot in layout.slots]
        is_on_cpu = self.local.device.type == "cpu"
        is_large = [is_on_cpu and slot.numel >= LARGE_NUMEL for slot in layout.slots]
        self.arrivals = Arrivals(self.params, self._is_small, is_large)
        self._was_held = False  # some rank held back gradients since the last step
        self._use_store(store)

    def _use_store(self, store: GradStore) -> None:
        if self.is_single_rank:
            kind: type[ReducedSum] = SingleRankHost if store.is_on_host else SingleRankSum
        elif not self.group.policy.shards_optimizer:
            kind = ReplicatedSum
        else:
            kind = ShardedHost if store.is_on_host else ShardedSum
        self.total: ReducedSum = kind(self.group, self.local, self.reducer, store)
        # a rank's buffers are freed when they are reduced, or when their sum is copied to the host
        if self.group.policy.shards_grads or store.is_on_host:
            self.local.freed = FreedMemory.TO_POOL
        else:
            is_on_cpu = self.local.device.type == "cpu"
            self.local.freed = FreedMemory.STAYS if is_on_cpu else FreedMemory.RESIZED
        self._begin_local()

    def move(self, store: MasterStore) -> None:
        """From now on sums are stored at `store`: directly after `reset`."""
        self.total.release()
        self._use_store(store.sums(self.local.dtypes.sums))

    def _begin_local(self) -> None:
        """The next gradients have no factor; one that is only copied keeps its dtype until it is sent."""
        is_added = self._was_held or self.total.keeps_local or self.group.policy.holds_grads
        self.local.factor = 1.0
        self.local.dtype = self.local.dtypes.sums if is_added else self.local.dtypes.params

    # -- gradients from autograd ------------------------------------------------------------------------

    def begin_backward(self, *, hold: bool) -> None:
        """A backward starts. With `hold` its gradients are not reduced at its end."""
        self.arrivals.begin_backward()
        self.state = BucketState.FILLING
        self._was_held |= hold  # all ranks must send the same dtype
        self.local.is_writable = False
        self._begin_local()

    def scale_by(self, factor: float) -> None:
        """Multiply the following gradients of this backward by `factor`."""
        self.local.factor = factor

    @property
    def takes_gradients(self) -> bool:
        """A gradient that arrives now is not late."""
        return self.state is BucketState.FILLING

    def add(self, position: int) -> Added:
        """`.grad` of the parameter in slot `position` has arrived: take it, unless it is late."""
        return self.take(position) if self.takes_gradients else Added.LATE

    def take(self, position: int) -> Added:
        """Take it, also a late one. The buffer is not in flight."""
        if not (self.arrivals.awaits[position] or self._is_small[position]):
            param = self.params[position]
            grad, param.grad = param.grad, None
            if grad is not None:
                self._accumulate(position, grad)
        return self.arrivals.add(position)

    @torch.no_grad()
    def add_by_call(self, position: int, grad: Tensor) -> None:
        """Add a gradient of slot `position` after its backward. The buffer must not be in flight."""
        param = self.params[position]
        earlier, param.grad = param.grad, None
        if earlier is not None:  # it came before
            self._accumulate(position, earlier)
        self._accumulate(position, grad)

    def _accumulate(self, position: int, grad: Tensor) -> None:
        self.total.open_local()
        adds = self.local.filled[position]
        if adds or self.local.factor != 1.0:
            self.total.before_arithmetic(adds=adds)
        self.local.add(position, grad)

    def collect(self) -> None:
        """Take every gradient that is still in `.grad`."""
        waiting = self.local.waiting
        if self.local.factor != 1.0:
            self.total.before_arithmetic(adds=False)
        if not waiting:
            return
        self.total.open_local()
        if self.local.is_filled and any(self.local.filled[position] for position in waiting):
            self.total.before_arithmetic(adds=True)  # every slot may have an earlier sum then
        self.local.collect(waiting)

    def _settled(self) -> Tensor:
        """The local sum with every gradient that has arrived, and zeros elsewhere."""
        self.collect()
        self.total.open_local()
        return self.local.settle()

    @property
    def has_local(self) -> bool:
        """This rank has gradients that are not reduced yet."""
        return self.has_kept or self.local.has_arrived

    @property
    def is_lossy(self) -> bool:
        """What is sent now is not exact."""
        return self.reducer.is_lossy

    @property
    def is_late(self) -> bool:
        """Gradients have arrived since the reduction, so the ranks must reduce again."""
        return not self.total.keeps_local and self.has_local

    # -- the reduction over ranks -----------------------------------------------------------------------

    def hold_back(self) -> None:
        """The running backward has ended, and its gradients are not reduced yet.

        On one rank they are copied to the host, also where several ranks hold theirs back. A lossy reducer adds
        them to its pending error.
        """
        if self.total.sends_held and self.has_local:
            self.start_reduce()
        if self.is_lossy and self.local.has_arrived:
            self.reducer.keep(self._settled())
            self.has_kept = True
            self.local.free() if self.group.policy.shards_grads else self.local.mark_empty()

    def start_reduce(self) -> None:
        """Start to add this rank's sums to those of all ranks. Sends (world_size - 1) * n elements."""
        local = self._settled()
        self.state, self.has_kept = BucketState.SENT, False
        self.total.start(local)

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight; afterwards the local sum may be written again."""
        self.total.finish()
        if self.state is BucketState.SENT:
            self.state = BucketState.REDUCED

    def fill_with_zeros(self) -> None:
        """No backward of the step has run this buffer, on any rank: its sums are zeros, without a message."""
        if self.total.has_sum:  # by a checkpoint in the middle of the step
            return
        if self.is_single_rank:
            self.start_reduce()
        else:
            self.total.fill_with_zeros()

    # -- the sums ---------------------------------------------------------------------------------------

    def squares(self, *, exact: bool) -> Tensor:
        """See `ReducedSum.squares`."""
        if self.total.keeps_local and self.has_local:
            self._settled()  # nothing is sent, so no gradient is late
        return self.total.squares(exact=exact)

    def reduced(self) -> Tensor | None:
        """The sums over ranks that an update would read now; None: no backward since the last step.

        The caller may write to them, so their norm is computed again.
        """
        self.total.forget_norm()
        if self.total.keeps_local:
            return self._settled() if self.has_local else None
        if self.is_single_rank and self.has_local:
            self.start_reduce()
        return self.total.for_script()

    # -- the end of a step ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped. A CPU's buffers keep their memory."""
        self.total.finish_gather()
        self.total.early_update.undo()
        self.reducer.end_step()
        self.state = BucketState.EMPTY
        self.has_kept = self._was_held = False
        self.local.mark_empty()
        self.local.is_writable = False
        for param in self.params:  # a large one is still there if user code's hook raised
            param.grad = None
        self.total.reset()

    def abandon(self) -> None:
        """What is in flight will not arrive. `reset` follows."""
        self.total.abandon()

    def end(self) -> None:
        """The engine has ended: free what is kept between steps as well."""
        self.total.release()
        self.total.store.release()
        self.reducer = self.total.reducer = ExactReducer(self.group.collectives, self.index)

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients from the first one of a step to the update, without those of the pool."""
        return self.reducer.held_bytes + self.total.held_bytes

    # -- checkpoints in the middle of an accumulation ---------------------------------------------------

    def sums(self) -> GradSums:
        """The sums as they lie in memory; None if there are none. No reduction may be in flight."""
        self.collect()
        local = self.local.buffer if self.local.is_filled else None
        return GradSums(local, list(self.local.filled), self.total.saved())

    def mark_held(self) -> None:
        """Some rank held back gradients since the last step, possibly another one than this."""
        self._was_held = True

    def mark_kept(self) -> None:
        """What the reducer was given by a load has gradients of micro-batches that no message had yet."""
        self._was_held = self.has_kept = True

    def restore(self, saved: GradSums) -> None:
        """Continue from `saved`, directly after `reset`. Keeps `saved.reduced` and copies `saved.local`."""
        if saved.local is not None:
            self.local.allocate(saved.local.dtype).copy_(saved.local)
            self.local.filled = list(saved.filled)
        if saved.reduced is not None:
            self.total.restore(saved.reduced)


__all__ = ["BucketState", "GradBucket", "GradSums", "SMALL_NUMEL"]
