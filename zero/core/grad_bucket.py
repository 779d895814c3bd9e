"""The gradients of one flat buffer: from autograd's tensors to this rank's shard of the reduced sum.

    autograd -> param.grad --copy--> local [world_size * n] --reduce--> reduced [n] --(stage 0) gather--> local

- The *local sum* holds this rank's gradients since the last reduction. The *reduced sum* is the sum over ranks
  since the last optimizer step. A reduction adds to the reduced sum of earlier ones.
- A gradient that arrives after its bucket was sent is late: it stays in the local sum, and the ranks agree on
  a second reduction.
- Where the optimizer runs on the host, a reduced sum is copied to the host's store, and its buffers return to
  the pool. One rank sends its own sum in the parameters' dtype while each slot has one gradient.
- On a device no buffer takes memory between the update and the next gradient, when activations take most.
- The dtype of the local sum: that of the parameters, so one gradient is only copied. With a second gradient it
  becomes that of sums. On a CPU the memory is a pool's block: new pages cost more than a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...compression.scheme import ExactReducer
from ...offload.interfaces import GradStore, MasterStore
from ...ops.comm.handles import Handle
from ...ops.kernels.decide import exact_square_sum, square_sum
from ...ops.pool import BufferPool
from ...ops.torch_internals import will_execute
from ..layout.groups import FlatGroup, buffer_of
from ..layout.layout import FlatLayout
from .param_bucket import views_in


@final
class Arrivals:
    """The arrivals of the running backward, by slot.

    Nearly all slots get one gradient. For them the hook only clears `awaits` and counts `remaining`.

    awaits: the slot expects its only gradient, which may stay in `.grad` until all have arrived. The list stays
        the same object.
    remaining: slots that are not complete.
    has_frozen: some parameters were frozen after `initialize`, so they get no gradient in this backward.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], is_small: Sequence[bool], is_large: Sequence[bool]
    ) -> None:
        """
        Args:
            is_small: by slot; its gradient may stay in `.grad` in the first backward already, when it is not
                known yet that there is one only.
            is_large: by slot; its gradient never stays there.
        """
        self.awaits = [False] * len(params)
        self.remaining = 0
        self._params = params
        self._is_small, self._is_large = is_small, is_large
        self._expected = [1] * len(params)  # number of arrivals that make each slot complete
        self._counts = [0] * len(params)  # without those of `awaits`
        # `awaits` as `open` set it: a slot that is True here and False in `awaits` has had its gradient
        self._awaited = [False] * len(params)
        self._has_counts = False  # an earlier backward has been counted
        self._next = (
            0  # the gradients before this slot have arrived, or the graph does not produce them
        )
        self.has_frozen = False

    def begin_backward(self) -> None:
        """A backward starts. Its gradients arrive after `open`."""
        seen = self._seen()
        self._expected = [
            (count or 1) if param.requires_grad else 0
            for param, count in zip(self._params, seen, strict=True)
        ]
        self._has_counts = self._has_counts or any(seen)
        self._counts = [0] * len(self._params)
        self._next = 0
        self._close()
        num_frozen = self._expected.count(0)
        self.has_frozen = num_frozen > 0
        self.remaining = len(self._params) - num_frozen

    def open(self) -> None:
        """From now on gradients are counted."""
        self.awaits[:] = [  # in place: the hooks keep this list
            expected == 1 and (is_small or self._has_counts) and not is_large
            for expected, is_small, is_large in zip(
                self._expected, self._is_small, self._is_large, strict=True
            )
        ]
        self._awaited = list(self.awaits)

    def add(self, position: int) -> bool:
        """A gradient has arrived in slot `position`. True: all slots are complete now."""
        if self.awaits[position]:
            self.awaits[position] = False
        else:
            count = self._counts[position] + 1
            self._counts[position] = count
            if self._awaited[position] or count != self._expected[position]:
                return False
        self.remaining -= 1
        return self.remaining == 0

    def _seen(self) -> list[int]:
        """The arrivals of each slot since `begin_backward`."""
        return [
            count + (awaited and not awaits)
            for count, awaited, awaits in zip(self._counts, self._awaited, self.awaits, strict=True)
        ]

    def _close(self) -> None:
        self.awaits[:] = self._awaited = [False] * len(self._params)

    @property
    def absent(self) -> list[nn.Parameter]:
        """Parameters that need a gradient and have none in the running or last backward."""
        slots = zip(self._params, self._seen(), strict=True)
        return [param for param, seen in slots if param.requires_grad and not seen]

    @property
    def is_complete(self) -> bool:
        """Every expected gradient has arrived."""
        return self.remaining <= 0

    def expect_no_more(self) -> None:
        """The missing gradients will not arrive. One that does is late."""
        if self.remaining:
            self._counts = self._seen()
            self._close()
            self.remaining = 0

    def expects_more(self) -> bool:
        """The graph of the running backward still produces some gradient. Call only inside of a backward.

        Each module of a unit asks when it ends. A slot that awaits nothing does so until the backward ends, so
        all calls of a backward look at each slot once.
        """
        while self._next < len(self._params) and not self._is_awaited(self._next):
            self._next += 1
        return self._next < len(self._params)

    def _is_awaited(self, position: int) -> bool:
        """The graph produces a gradient for this slot, and none has arrived."""
        param = self._params[position]
        was_awaited = self._awaited[position] and not self.awaits[position]
        if was_awaited or self._counts[position] or not param.requires_grad:
            return False
        return will_execute(get_gradient_edge(param).node)


SMALL_NUMEL = 1 << 14  # below it, one that arrives more than once is summed in `.grad`
# on a CPU: from it on, the copy of a gradient in the cache saves more than a call
LARGE_NUMEL = 1 << 17


class GradSums(NamedTuple):
    """Gradients since the last step: this rank's [world_size * n], the slots that have one, the reduced [n]."""

    local: Tensor | None
    filled: list[bool]
    reduced: Tensor | None


class Added(Enum):
    """What became of a gradient that has arrived."""

    NOT_READY = 1  # the bucket expects more gradients
    READY = 2  # it was the last one that the bucket expects
    LATE = 3  # the bucket is being sent: nothing was done; see `add_late`


class EarlyUpdate:
    """An update of the bucket that runs on the host before its step is known. By default none does."""

    def sum_sent(self) -> None:
        """A reduced sum is on its way to the host: the update may begin."""
        return

    def undo(self) -> None:
        """The sum is about to change, or the master and its states are read: undo the update."""
        return


@final
class GradBucket:
    """Owns one flat buffer of gradients: accumulates, reduces, and keeps the sums for the update.

    Attributes:
        layout, params, index: the slots, the parameter of each, and the number of the buffer.
        arrivals: the gradients that the running backward has computed and will compute.
        is_sent: the reduction has begun in this backward.
        reducer: how sums are sent.
        store: the store of the reduced sum, if the update runs on the host.
        early_update: the update of the bucket, if it may begin before its step.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        group: FlatGroup,
        pool: BufferPool,
        store: GradStore,
        index: int,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.group = group
        self.is_single_rank = group.collectives.world_size == 1
        self._policy = policy = group.policy
        self._collectives = group.collectives
        self._pool = pool
        self._device = params[0].device
        self._is_on_cpu = self._device.type == "cpu"
        self._param_dtype = params[0].dtype
        self._sum_dtype = policy.sum_dtype(self._param_dtype)
        self._sent_dtype = policy.sent_dtype(self._param_dtype)
        self._sees_all = self.is_single_rank or not policy.shards_optimizer
        self._gathers_sums = self._sees_all and not self.is_single_rank
        self.reducer = group.scheme.reducer(buffer_of(layout, index, self._param_dtype, group))
        self.early_update = EarlyUpdate()

        self._is_small = [slot.numel < SMALL_NUMEL for slot in layout.slots]
        is_large = [self._is_on_cpu and slot.numel >= LARGE_NUMEL for slot in layout.slots]
        self.arrivals = Arrivals(self.params, self._is_small, is_large)
        self.is_sent = False
        self._was_held = False  # some rank held back gradients since the last step

        # the local sum: None between its release and the next gradient
        self._local: Tensor | None = None
        self._views: list[Tensor] = []  # its slots
        # by slot: it has a gradient; the others are undefined
        self._filled = [False] * len(layout.slots)
        self._is_writable = False  # allocated, and not shared with the reduced sum
        self._factor = 1.0  # of the gradients of this backward
        self._uses_sum_dtype = False

        # the reduced sum
        self._reduced: Tensor | None = None
        self._has_reduced = False  # `_reduced`, the gathered local sum or the store has a sum
        # for `held_bytes`, also between steps: of the last one on a device, if it had memory of its own
        self._reduced_bytes = 0
        self._squares: Tensor | None = (
            None  # of the only sum that was sent to the host since the last step
        )
        self._payload: Tensor | None = None  # the local sum in the dtype that is sent
        self._handle: Handle | None = None  # of the reduction or the gather in flight
        self._next_handle: Handle | None = (
            None  # of the gather that follows the reduction in flight
        )
        self._is_kept = False  # the reducer has gradients that no message had yet
        self._use_store(store)

    def _use_store(self, store: GradStore) -> None:
        self.store = store
        # a rank's buffers are freed when they are reduced, or when their sum is copied to the host
        self._frees = self._policy.shards_grads or store.is_on_host
        self._keeps_local = self.is_single_rank and not store.is_on_host
        self._keeps_views = not (self._is_on_cpu or self._frees)
        # more than a copy is computed in the dtype of sums, whatever the buffer's dtype was
        self._widens = self.is_single_rank and store.is_on_host
        self._factor, self._uses_sum_dtype = 1.0, self._keeps_local or self._policy.holds_grads

    def move(self, store: MasterStore) -> None:
        """From now on sums are stored at `store`: directly after `reset`."""
        self.release()
        self._use_store(store.sums(self._sum_dtype))

    # -- gradients from autograd ------------------------------------------------------------------------

    def begin_backward(self, *, hold: bool) -> None:
        """A backward starts. With `hold` its gradients are not reduced at its end."""
        self.arrivals.begin_backward()
        self.is_sent = False
        self._was_held |= hold  # all ranks must send the same dtype
        self._factor = 1.0
        self._is_writable = False
        self._uses_sum_dtype = self._was_held or self._keeps_local or self._policy.holds_grads

    def scale_by(self, factor: float) -> None:
        """Multiply the following gradients of this backward by `factor`."""
        self._factor = factor

    def add(self, position: int) -> Added:
        """`.grad` of the parameter in slot `position` has arrived."""
        if self.is_sent:
            return Added.LATE
        return Added.READY if self._take(position) else Added.NOT_READY

    def add_late(self, position: int) -> None:
        """Take a gradient that was `Added.LATE`. Nothing is in flight any more."""
        self._take(position)

    def _take(self, position: int) -> bool:
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

    # -- the local sum ----------------------------------------------------------------------------------

    def _accumulate(self, position: int, grad: Tensor) -> None:
        view = self._writable_views()[position]
        if self._filled[position] or self._factor != 1.0:
            self._widen()
            if self._filled[position]:
                self._load_sum()
            view = self._views[position]
        if self._filled[position]:
            if self._factor != 1.0:
                grad = grad.to(view.dtype).mul(self._factor)  # rounded as if it were stored
            view.add_(grad)
        elif grad.layout == torch.strided:
            view.copy_(grad)
            if self._factor != 1.0:
                view.mul_(self._factor)
        else:
            view.zero_().add_(grad, alpha=self._factor)
        self._filled[position] = True

    def collect(self) -> None:
        """Take every gradient that is still in `.grad`, in one call for the copies and one for the sums."""
        waiting = [at for at, param in enumerate(self.params) if param.grad is not None]
        if self._factor != 1.0:
            self._widen()
        if not waiting:
            return
        views = self._writable_views()
        if True in self._filled and any(self._filled[at] for at in waiting):
            self._widen()
            self._load_sum()  # every slot may have an earlier sum then
            views = self._views
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for at in waiting:
            grad, self.params[at].grad = self.params[at].grad, None
            assert grad is not None
            if grad.layout != torch.strided:
                self._accumulate(at, grad)
                continue
            into = added if self._filled[at] else copied
            into[0].append(views[at])
            into[1].append(grad)
            self._filled[at] = True
        if copied[0]:
            torch._foreach_copy_(*copied)
            if self._factor != 1.0:
                torch._foreach_mul_(copied[0], self._factor)
        if added[0]:
            views, grads = added
            if self._factor != 1.0:  # rounded as if it were stored
                wide = [grad.to(view.dtype) for view, grad in zip(views, grads, strict=True)]
                grads = list(torch._foreach_mul(wide, self._factor))
            torch._foreach_add_(views, grads)

    def _settled(self) -> Tensor:
        """The local sum with every gradient that has arrived, and zeros elsewhere."""
        self.collect()
        views = self._writable_views()
        if False in self._filled:
            for view, is_filled in zip(views, self._filled, strict=True):
                if not is_filled:
                    view.zero_()
            self._filled = [True] * len(views)
        assert self._local is not None
        return self._local

    def _writable_views(self) -> list[Tensor]:
        """The slots of the local sum, allocated, and not shared with the reduced sum."""
        if self._is_writable:
            return self._views
        dtype = self._sum_dtype if self._uses_sum_dtype else self._param_dtype
        if self._local is None or (self._local.dtype != dtype and True not in self._filled):
            self._allocate(dtype)
        elif not self._local.untyped_storage().nbytes():
            self._local.untyped_storage().resize_(self._local.nbytes)
            self._zero_gaps(self._local)
        self._is_writable = True
        self.store.wait_on_device()
        if self._has_reduced and self._reduced_is_in_local():
            assert self._reduced is not None
            self._reduced = self._reduced.clone()
        return self._views

    def _widen(self) -> None:
        narrow = self._local
        if not self._widens:
            return
        if narrow is not None and narrow.dtype != self._sum_dtype:
            self._allocate(self._sum_dtype).copy_(narrow)
            self._pool.give(narrow)
        self._uses_sum_dtype = True

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        """A new local sum; only its gaps are defined, as zeros."""
        take = self._pool.take if self._frees else self._pool.empty
        local = take(self.layout.numel, dtype, self._device)
        self._zero_gaps(local)
        self._local = local
        self._views = views_in(local, self.layout)
        return local

    def _zero_gaps(self, local: Tensor) -> None:
        for start, stop in self.layout.gaps():
            local[start:stop].zero_()

    def _load_sum(self) -> None:
        """A slot gets a second gradient in this backward: sums on one rank are taken in the order of arrival.

        (earlier + first) + second differs in the last bit from earlier + (first + second).
        """
        if self.is_single_rank and self.store.is_on_host and self._has_reduced:
            self.early_update.undo()
            earlier = self.store.total()
            assert earlier is not None
            self._continue_sum(earlier)
            self.store.reset()
            self._has_reduced, self._squares = False, None

    def _continue_sum(self, earlier: Tensor) -> None:
        """The sum `earlier` [world_size * n] comes before the gradients in the local sum."""
        if self._local is None:
            self._allocate(self._sum_dtype)
        whole = views_in(earlier, self.layout)
        for view, value, is_filled in zip(self._views, whole, self._filled, strict=True):
            # the same additions in the same order as if the earlier sum were still in the buffer
            view.copy_(value.to(view) + view if is_filled else value)
        self._filled = [True] * len(self._filled)

    def _mark_empty(self) -> None:
        """The gradients are being sent, or dropped: the next one of a slot is its first."""
        self._filled = [False] * len(self._filled)

    def _detach_local(self) -> None:
        """Give up the buffer, without its return to the pool."""
        self._local, self._views = None, []
        self._mark_empty()
        self._is_writable = False

    def _free_local(self) -> None:
        """Free the memory of the buffer, or return it to the pool."""
        if self._keeps_views and self._local is not None:
            self._local.untyped_storage().resize_(0)
            self._mark_empty()
            self._is_writable = False
            return
        if self._local is not None:
            self._pool.give(self._local)
        self._detach_local()

    @property
    def _has_arrived(self) -> bool:
        """Some gradient has arrived since the last reduction."""
        return True in self._filled or any(param.grad is not None for param in self.params)

    @property
    def has_local(self) -> bool:
        """This rank has gradients that are not reduced yet."""
        return self._is_kept or self._has_arrived

    @property
    def is_lossy(self) -> bool:
        """What is sent now is not exact."""
        return self.reducer.is_lossy

    @property
    def has_kept(self) -> bool:
        """The reducer has gradients of micro-batches that no message had yet."""
        return self._is_kept

    @property
    def is_late(self) -> bool:
        """Gradients have arrived since the reduction, so the ranks must reduce again."""
        return not self._keeps_local and self.has_local

    def _reduced_is_in_local(self) -> bool:
        if self._reduced is None or self._local is None:
            return False
        return bool(self._reduced.untyped_storage()._cdata == self._local.untyped_storage()._cdata)

    # -- the reduction over ranks -----------------------------------------------------------------------

    def hold_back(self) -> None:
        """The running backward has ended, and its gradients are not reduced yet.

        On one rank they are copied to the host, also where several ranks hold theirs back. A lossy reducer adds
        them to its pending error.
        """
        if self._widens and self.has_local:
            self.start_reduce()
        if self.is_lossy and self._has_arrived:
            self.reducer.keep(self._settled())
            self._is_kept = True
            self._free_local() if self._policy.shards_grads else self._mark_empty()

    def start_reduce(self) -> None:
        """Start to add this rank's sums to those of all ranks. Sends (world_size - 1) * n elements."""
        local = self._settled()
        self.is_sent, self._is_kept = True, False
        if self.is_single_rank:
            if self.store.is_on_host:
                self._send_to_host(local, local)
                self._detach_local()
            return
        adds = self._has_reduced and self._reduced is not None
        assert self._handle is None
        fits = local.dtype == self._sum_dtype and not self._policy.shards_grads
        if fits and not adds:
            self._reduced = self._collectives.shard_of(local)
        elif self._reduced is None:
            self._reduced = self._new_reduced()
        if self._gathers_sums and local.dtype == self._sent_dtype and not adds:
            whole = self.reducer.reduce_whole(local, self._reduced)
            if whole is not None:
                self._handle, self._next_handle = whole
                self._mark_empty()
                return
        payload = local
        if local.dtype != self._sent_dtype and not self.is_lossy:
            payload = self._pool.take(local.numel(), self._sent_dtype, local.device)
            payload.copy_(local)
            self._payload = payload
        self._handle = self.reducer.reduce(payload, self._reduced, add=adds)
        self._mark_empty()

    def fill_with_zeros(self) -> None:
        """No backward of the step has run this buffer, on any rank: its sums are zeros, without a message.

        A gradient that has arrived all the same stays late.
        """
        if self._has_reduced:  # by a checkpoint in the middle of the step
            return
        if self.is_single_rank:
            self.start_reduce()
            return
        has_late = self._has_arrived
        if self._gathers_sums:
            if not has_late:
                local = self._settled()
                fits = local.dtype == self._sum_dtype
                zeros = self._collectives.shard_of(local) if fits else self._new_reduced().zero_()
                self._reduced, self._has_reduced = zeros, True
                self._mark_empty()
                self._is_writable = False
                if self.store.is_on_host:
                    self.store.replace(local)
                return
            self._reduced, self._has_reduced = self._new_reduced().zero_(), True
            return
        reduced = self._new_reduced().zero_()
        self._has_reduced = True
        if self.store.is_on_host:
            self._send_to_host(reduced, reduced)
        else:
            self._reduced = reduced

    def _new_reduced(self) -> Tensor:
        numel = self.layout.shard_numel
        if self.store.is_on_host and not self._gathers_sums:
            return self._pool.take(numel, self._sum_dtype, self._device)
        reduced = self._pool.empty(numel, self._sum_dtype, self._device)
        self._reduced_bytes = 0 if self._is_on_cpu else reduced.nbytes
        return reduced

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight; afterwards the local sum may be written again."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        handle.wait()
        self._is_writable = False
        if self._payload is not None:
            self._pool.give(self._payload)
            self._payload = None
        if self.store.is_on_host and not self._gathers_sums:
            self._send_reduced_to_host()
        elif self._policy.shards_grads:
            self._free_local()
        self._has_reduced = True

    def _send_reduced_to_host(self) -> None:
        """Copy this rank's part of the sum to the host. The local sum is free, unless it contains that part."""
        reduced, local = self._reduced, self._local
        assert reduced is not None and local is not None
        # a sum on the host is not summed again on the device
        rest = self.reducer.cross_replicas(reduced)
        if rest is not None:
            rest.wait()
        if self._reduced_is_in_local():
            self._send_to_host(reduced, local)
            self._detach_local()
        else:
            self._free_local()
            self._send_to_host(reduced, reduced)
        self._reduced = None

    def _send_to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Start to copy `source` to the host; then its `buffer` returns to the pool."""
        # the norm is that of what is stored: a sum of fewer bits is rounded on the host
        is_exact = not self._has_reduced and source.dtype.itemsize <= self._sum_dtype.itemsize
        self._squares = self._squares_of(source, exact=False) if is_exact else None
        self._has_reduced = True
        self.early_update.undo()
        self.store.add(source, partial(self._pool.give, buffer))
        self.early_update.sum_sent()

    def cross_replicas(self) -> Handle | None:
        """Start to add what the reductions of a step left out; see `GradientReducer.cross_replicas`."""
        if self._reduced is None or not self._has_reduced:
            return None
        return self.reducer.cross_replicas(self._reduced)

    def start_gather(self) -> None:
        """Stage 0: start to gather all reduced sums into `local`. Sends (world_size - 1) shards per rank."""
        if self.is_single_rank:
            return
        if self._next_handle is not None:
            self._handle, self._next_handle = self._next_handle, None
            return
        assert self._local is not None and self._reduced is not None
        # late gradients are not overwritten
        whole = torch.empty_like(self._local) if self._has_arrived else self._local
        self._handle = self.reducer.gather(self._reduced, whole)
        # every rank has the same sums, which are not quite the reduced ones
        if self.is_lossy:
            self._reduced = self._collectives.shard_of(whole)

    def finish_gather(self) -> None:
        """Wait for the gather in flight."""
        if self._next_handle is not None:  # a late gradient comes before `start_gather`
            self._next_handle.wait()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
            if self.store.is_on_host and not self.is_late:  # else they are gathered again
                assert self._local is not None
                self._squares = self._squares_of(self._local, exact=False)
                self.store.replace(self._local)

    # -- the update's view ------------------------------------------------------------------------------

    def square_sums(self, *, exact: bool) -> Tensor:
        """The squared norm of each shard of the sums that this rank has, [world_size] fp64; 0 for the others.

        It is where the sums are. This rank has all shards at stage 0, none before any backward, else its own.
        exact: see `exact_square_sum`.
        """
        if self._keeps_local and self.has_local:
            self._settled()  # nothing is sent, so no gradient is late
        if self._squares is not None and not exact:
            return self._squares
        if self.store.is_on_host:
            sums = self.store.total()
        else:
            sums = self._local if self._sees_all else self._reduced
        return self._squares_of(sums, exact=exact)

    def own_square(self, *, exact: bool) -> Tensor:
        """[] fp64: that of this rank's shard. Others may still be gathered. Where `norm_before_gather`."""
        ranks = self._collectives
        shard = None if self._local is None else ranks.shard_of(self._local)
        return self._square_of_shard(shard, exact=exact)[ranks.rank]

    def _squares_of(self, sums: Tensor | None, *, exact: bool) -> Tensor:
        """The squared norm of each shard in `sums`: all shards, or this rank's; None: nothing."""
        if sums is None or not self._sees_all:
            return self._square_of_shard(sums, exact=exact)
        compute = exact_square_sum if exact else square_sum
        shards = [
            self._collectives.shard_of(sums, rank) for rank in range(self._collectives.world_size)
        ]
        squares = [compute(shard, self._param_dtype) for shard in shards]
        return squares[0].view(1) if self.is_single_rank else torch.stack(squares)

    def _square_of_shard(self, shard: Tensor | None, *, exact: bool) -> Tensor:
        compute = exact_square_sum if exact else square_sum
        device = self._device if shard is None else shard.device
        squares = torch.zeros(self._collectives.world_size, dtype=torch.float64, device=device)
        if shard is not None:
            squares[self._collectives.rank] = compute(shard, self._param_dtype)
        return squares

    @property
    def norm_before_gather(self) -> bool:
        """The norm of this rank's shard may be read before the gather ends: exact sums on CPUs."""
        # a device runs the gather first, and the host does not wait for it
        gains = self._collectives.device.type == "cpu" and not self.store.is_on_host
        return self._gathers_sums and gains and not self.is_lossy

    def for_update(self) -> Tensor:
        """The sums that the optimizer reads: the shard if its state is sharded, else the whole buffer."""
        if self._policy.shards_optimizer and not self.store.is_on_host:
            shard = self._local if self.is_single_rank else self._reduced
            assert shard is not None
            return shard
        self.finish_gather()
        whole = self.store.total() if self.store.is_on_host else self._local
        assert whole is not None
        return whole

    def reduced(self) -> Tensor | None:
        """The sums over ranks that an update would read now; None: no backward since the last step.

        The caller may write to them, so their norm is computed again.
        """
        self._squares = None
        self.early_update.undo()
        if self._keeps_local:
            return self._settled() if self.has_local else None
        if self.is_single_rank and self.has_local:
            self.start_reduce()
        if self.store.is_on_host and self._has_reduced:
            return self.store.widened()
        return self.for_update() if self._has_reduced else None

    # -- the end of a step ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped. A CPU's buffers keep their memory."""
        self.finish_gather()
        self.early_update.undo()
        self.reducer.end_step()
        self._is_kept = False
        self._mark_empty()
        self._is_writable = False
        for param in self.params:  # a large one is still there if user code's hook raised
            param.grad = None
        self._has_reduced = False
        self._was_held = False
        self._squares = None
        self.store.reset()
        local = self._local
        if not self._is_on_cpu:
            self._reduced = None
            self._free_local()
        elif self._frees:
            if self.store.is_on_host and self._reduced_is_in_local():
                self._reduced = None
            self._free_local()
        elif local is not None and not self.is_single_rank:
            fits = local.dtype == self._sum_dtype
            if fits or self._reduced_is_in_local():
                self._reduced = self._collectives.shard_of(local) if fits else None

    def release(self) -> None:
        """Free all buffers, which are unused between a step and the next backward."""
        self._detach_local()
        self._reduced = None
        self._reduced_bytes = 0

    def end(self) -> None:
        """The engine has ended: free what is kept between steps as well."""
        self.release()
        self.store.release()
        self.reducer = ExactReducer(self._collectives, self.index)

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients from the first one of a step to the update, without those of the pool."""
        local = None if self._frees else self._local
        reduced = None if self._reduced_is_in_local() else self._reduced
        reduced_bytes = self._reduced_bytes if reduced is None else reduced.nbytes
        return self.reducer.held_bytes + reduced_bytes + (0 if local is None else local.nbytes)

    # -- checkpoints in the middle of an accumulation ---------------------------------------------------

    def sums(self) -> GradSums:
        """The sums as they lie in memory; None if there are none. No reduction may be in flight."""
        self.collect()
        filled = list(self._filled)
        reduced = self.store.total() if self._reduced is None else self._reduced
        local = self._local if any(filled) else None
        return GradSums(local, filled, reduced if self._has_reduced else None)

    def mark_held(self) -> None:
        """Some rank held back gradients since the last step, possibly another one than this."""
        self._was_held = True

    def mark_kept(self) -> None:
        """What the reducer was given by a load has gradients of micro-batches that no message had yet."""
        self._was_held = self._is_kept = True

    def restore(self, saved: GradSums) -> None:
        """Continue from `saved`, directly after `reset`. Keeps `saved.reduced` and copies `saved.local`."""
        if saved.local is not None:
            self._allocate(saved.local.dtype).copy_(saved.local)
            self._filled = list(saved.filled)
        # saved with offload, where sums are on the host
        if saved.reduced is not None and self._keeps_local:
            self._continue_sum(saved.reduced.to(self._device))
        elif saved.reduced is not None:
            if self.store.is_on_host and not self._gathers_sums:
                self.store.put(saved.reduced)
            else:
                self._reduced = saved.reduced.to(self._device)
            self._has_reduced = True


__all__ = ["Added", "Arrivals", "EarlyUpdate", "GradBucket", "GradSums", "SMALL_NUMEL"]
