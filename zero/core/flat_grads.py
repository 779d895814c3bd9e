"""The gradients of one flat buffer: from autograd's tensors to this rank's shard of the reduced sum.

    autograd -> param.grad --copy--> local [world_size * n] --reduce--> total [n] --(stage 0) gather--> local

- `local` holds this rank's own sum since the last reduction; `total` the sum over ranks since the last
  optimizer step. No accumulated gradient is dropped: a reduction adds to the total of earlier ones.
- A gradient that arrives after the buffer was sent is late: it stays in `local`, and the ranks agree on a
  second reduction.
- Where the optimizer runs on the host, a reduced sum leaves for its home there, and its buffers return to
  the pool. One rank sends its own sum in the parameters' dtype while each slot has one gradient.
- On a device no buffer takes memory between the update and the next gradient, when activations take most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from torch import Tensor, nn

from ...compression.reducer import ExactReducer
from ...offload.homes import Home
from ...offload.host_sums import SumHome
from ...ops.comm.handles import Handle
from ...ops.pool import BufferPool
from .arrivals import Arrivals
from .groups import FlatGroup, buffer_of
from .layout import FlatLayout
from .local_sum import GradSums, LocalSum
from .squares import Squares


@final
class FlatGrads:
    """Owns one flat gradient buffer.

    is_sent: its reduction has begun in this backward. reducer: how. arrivals: the gradients of this backward.
    home: where sums are for the update, if that runs on the host.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        group: FlatGroup,
        pool: BufferPool,
        home: SumHome,
        index: int,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.is_sent = False
        self.group = group
        self.is_single_rank = group.collectives.world_size == 1
        self._policy = policy = group.policy
        self._collectives = group.collectives
        self.reducer = group.legs.reducer(buffer_of(layout, index, params[0].dtype, group))
        self._pool = pool
        self._is_on_cpu = params[0].device.type == "cpu"
        self._param_dtype = params[0].dtype
        self._sum_dtype = policy.sum_dtype(self._param_dtype)
        self._sent_dtype = policy.sent_dtype(self._param_dtype)
        self._sees_all = self.is_single_rank or not policy.shards_optimizer
        self._gathers_sums = self._sees_all and not self.is_single_rank
        self._settle_in(home)
        self.arrivals = Arrivals(self.params, self._local.is_small, self._local.is_large)
        self._was_held = False  # some rank held back gradients since the last step
        self._squares: Tensor | None = None  # of the only sum that has left since the last step
        self._total: Tensor | None = None
        self._total_bytes = 0  # of the last one on a device that had memory of its own
        self._has_total = False
        self._on_left: Callable[[], None] = _nothing
        self._before_change: Callable[[], None] = _nothing
        self._payload: Tensor | None = None
        self._handle: Handle | None = None
        self._is_kept = False  # the reducer has gradients that are not reduced yet
        self._gathers: Handle | None = None  # the gather that follows the reduction in flight

    def _settle_in(self, home: SumHome) -> None:
        self.home = home
        # a rank's buffers are freed when they are reduced, or when their sum has left
        self._frees = self._policy.shards_grads or home.is_on_host
        self._keeps_local = self.is_single_rank and not home.is_on_host
        self._local = LocalSum(
            self.layout,
            self.params,
            self._pool,
            (self._param_dtype, self._sum_dtype),
            is_pooled=self._frees,
            widens=self.is_single_rank and home.is_on_host,
            before_write=self._separate_total,
            before_second=self._bring_back,
        )
        self._local.begin_backward(uses_sum_dtype=self._keeps_local or self._policy.holds_grads)

    def move(self, home: Home) -> None:
        """From now on sums are stored at `home`: directly after `reset`."""
        self.release()
        self._settle_in(home.sums(self._sum_dtype))

    # -- gradients from autograd ------------------------------------------------------------------------

    def begin_backward(self, *, hold: bool) -> None:
        """A backward starts. With `hold` its gradients are not reduced at its end."""
        self.arrivals.begin_backward()
        self.is_sent = False
        self._was_held |= hold  # all ranks must send the same dtype
        uses_sum_dtype = self._was_held or self._keeps_local or self._policy.holds_grads
        self._local.begin_backward(uses_sum_dtype=uses_sum_dtype)

    def scale_by(self, factor: float) -> None:
        """Multiply the following gradients of this backward by `factor`."""
        self._local.scale_by(factor)

    def add_grad(self, position: int) -> bool:
        """Add `.grad` of the parameter in slot `position`. True: the buffer is complete now.

        The buffer must not be in flight.
        """
        if not (self.arrivals.awaits[position] or self._local.is_small[position]):
            self._local.take(position)
        return self.arrivals.add(position)

    def add_by_call(self, position: int, grad: Tensor) -> None:
        """Add a gradient of slot `position` after its backward. The buffer must not be in flight."""
        self._local.put(position, grad)

    def collect(self) -> None:
        """Copy gradients that are still in `param.grad`."""
        self._local.collect()

    def _separate_total(self) -> None:
        """`local` is about to be written: a total in its memory needs memory of its own."""
        self.home.order()
        if self._has_total and self._total_is_in_local():
            assert self._total is not None
            self._total = self._total.clone()

    def _bring_back(self) -> None:
        """A slot gets a second gradient in this backward: sums on one rank are taken in the order of arrival.

        (earlier + first) + second differs in the last bit from earlier + (first + second).
        """
        if self.is_single_rank and self.home.is_on_host and self._has_total:
            self._before_change()
            earlier = self.home.total()
            assert earlier is not None
            self._local.add_to(earlier)
            self.home.reset()
            self._has_total, self._squares = False, None

    @property
    def leaves_alone(self) -> bool:
        """One rank: its gradients leave after every backward, also where several ranks hold them back."""
        return self.is_single_rank and self.home.is_on_host

    def _total_is_in_local(self) -> bool:
        local = self._local.tensor
        if self._total is None or local is None:
            return False
        return bool(self._total.untyped_storage()._cdata == local.untyped_storage()._cdata)

    # -- the reduction over ranks -----------------------------------------------------------------------

    @property
    def has_kept(self) -> bool:
        """The reducer has gradients of micro-batches that no message had yet."""
        return self._is_kept

    @property
    def has_local(self) -> bool:
        """This rank has gradients that are not reduced yet."""
        return self._is_kept or self._local.has_any

    def hold(self) -> None:
        """The running backward has ended, and its gradients are not reduced yet.

        Where what is sent is lossy, they join what this rank owes.
        """
        if self.reducer.is_lossy and self._local.has_any:
            self.reducer.keep(self._local.settle())
            self._is_kept = True
            self._local.give_back() if self._policy.shards_grads else self._local.clear()

    def start_reduce(self) -> None:
        """Start to add this rank's sums to the totals of all ranks. Sends (world_size - 1) * n elements."""
        local = self._local.settle()
        self.is_sent, self._is_kept = True, False
        if self.is_single_rank:
            if self.home.is_on_host:
                self._leave(local, local)
                self._local.release()
            return
        adds = self._has_total and self._total is not None
        assert self._handle is None
        fits = local.dtype == self._sum_dtype and not self._policy.shards_grads
        if fits and not adds:
            self._total = self._collectives.shard_of(local)
        elif self._total is None:
            self._total = self._new_total()
        if self._gathers_sums and local.dtype == self._sent_dtype and not adds:
            whole = self.reducer.reduce_whole(local, self._total)
            if whole is not None:
                self._handle, self._gathers = whole
                self._local.clear()
                return
        payload = local
        if local.dtype != self._sent_dtype and not self.reducer.is_lossy:
            payload = self._pool.take(local.numel(), self._sent_dtype, local.device)
            payload.copy_(local)
            self._payload = payload
        self._handle = self.reducer.reduce(payload, self._total, add=adds)
        self._local.clear()

    def _new_total(self) -> Tensor:
        numel, device = self.layout.shard_numel, self.params[0].device
        if self.home.is_on_host and not self._gathers_sums:
            return self._pool.take(numel, self._sum_dtype, device)
        total = self._pool.empty(numel, self._sum_dtype, device)
        self._total_bytes = 0 if self._is_on_cpu else total.nbytes
        return total

    def _leave(self, source: Tensor, buffer: Tensor) -> None:
        """Start to copy `source` to its home; then its `buffer` returns to the pool."""
        # the norm is that of what is stored: a sum of fewer bits is rounded on the host
        is_exact = not self._has_total and source.dtype.itemsize <= self._sum_dtype.itemsize
        self._squares = self._squares_of(source, exact=False) if is_exact else None
        self._has_total = True
        self._before_change()
        self.home.add(source, partial(self._pool.give, buffer))
        self._on_left()

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight; afterwards `local` may be written again."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        handle.wait()
        self._local.protect()
        if self._payload is not None:
            self._pool.give(self._payload)
            self._payload = None
        if self.home.is_on_host and not self._gathers_sums:
            self._leave_total()
        elif self._policy.shards_grads:
            self._local.give_back()
        self._has_total = True

    def _leave_total(self) -> None:
        """This rank's part of the sum leaves; `local` is free, unless it contains that part."""
        total, local = self._total, self._local.tensor
        assert total is not None and local is not None
        rest = self.reducer.complete(total)  # what leaves is not summed again on the device
        if rest is not None:
            rest.wait()
        if self._total_is_in_local():
            self._leave(total, local)
            self._local.release()
        else:
            self._local.give_back()
            self._leave(total, total)
        self._total = None

    def complete(self) -> Handle | None:
        """Start to add what the reductions of a step left out; see `GradientReducer.complete`."""
        if self._total is None or not self._has_total:
            return None
        return self.reducer.complete(self._total)

    def start_gather(self) -> None:
        """Stage 0: start to gather all totals into `local`. Sends (world_size - 1) shards per rank."""
        if self.is_single_rank:
            return
        if self._gathers is not None:
            self._handle, self._gathers = self._gathers, None
            return
        local = self._local.gathered()
        assert self._total is not None
        self._handle = self.reducer.gather(self._total, local)
        if self.reducer.is_lossy:  # every rank has the same sums, which are not quite the totals
            self._total = self._collectives.shard_of(local)

    def finish_gather(self) -> None:
        if self._gathers is not None:  # a late gradient comes before `start_gather`
            self._gathers.wait()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
            if self.home.is_on_host and not self.is_late:  # else they are gathered again
                local = self._local.tensor
                assert local is not None
                self._squares = self._squares_of(local, exact=False)
                self.home.replace(local)

    # -- the optimizer's view ---------------------------------------------------------------------------

    def square_sums(self, *, exact: bool) -> Tensor:
        """The squared norm of each shard of the sums that this rank has, [world_size] fp64; 0 for the others.

        It is where the sums are. This rank has all shards at stage 0, none before any backward, else its own.
        exact: see `exact_square_sum`.
        """
        if self._keeps_local and self.has_local:
            self._local.settle()  # nothing is sent, so no gradient is late
        if self._squares is not None and not exact:
            return self._squares
        if self.home.is_on_host:
            held = self.home.total()
        else:
            held = self._local.tensor if self._sees_all else self._total
        return self._squares_of(held, exact=exact)

    def _squares_of(self, held: Tensor | None, *, exact: bool) -> Tensor:
        device = self.params[0].device if held is None else held.device
        return Squares(self._collectives, self._param_dtype, self._sees_all, exact).of(held, device)

    def own_square(self, *, exact: bool) -> Tensor:
        """[] fp64: that of this rank's shard. Others may still be gathered. Where `gathers_exactly`."""
        local, ranks = self._local.tensor, self._collectives
        own = None if local is None else ranks.shard_of(local)
        squares = Squares(ranks, self._param_dtype, False, exact)
        return squares.of(own, self.params[0].device)[ranks.rank]

    @property
    def is_late(self) -> bool:
        """Gradients have arrived since the reduction, so the ranks must reduce again."""
        return not self._keeps_local and self.has_local

    @property
    def gathers_exactly(self) -> bool:
        """Ranks of CPUs gather the totals as they are. A device waits for them, which are in its queue."""
        is_away = self.home.is_on_host or self._collectives.device.type != "cpu"
        return self._gathers_sums and not (self.reducer.is_lossy or is_away)

    def shard(self) -> Tensor:
        """This rank's reduced total [n], of which the norm is computed."""
        shard = self._local.tensor if self.is_single_rank else self._total
        assert shard is not None
        return shard

    def reduced(self) -> Tensor | None:
        """The sums over ranks that an update would read now; None: no backward since the last step.

        The caller may write to them, so their norm is computed again.
        """
        self._squares = None
        self._before_change()
        if self._keeps_local:
            return self._local.settle() if self.has_local else None
        if self.is_single_rank and self.has_local:
            self.start_reduce()
        if self.home.is_on_host and self._has_total:
            return self.home.widened()
        return self.for_update() if self._has_total else None

    def for_update(self) -> Tensor:
        """The sums that the optimizer reads: the shard if its state is sharded, else the whole buffer."""
        if self._policy.shards_optimizer and not self.home.is_on_host:
            return self.shard()
        self.finish_gather()
        whole = self.home.total() if self.home.is_on_host else self._local.tensor
        assert whole is not None
        return whole

    def watch(self, on_left: Callable[[], None], before_change: Callable[[], None]) -> None:
        """Call `on_left` when a sum is on its way to the host, and `before_change` before that sum changes."""
        self._on_left, self._before_change = on_left, before_change

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped. A CPU's buffers keep their memory."""
        self.finish_gather()
        self._before_change()
        self.reducer.end_step()
        self._is_kept = False
        self._local.drop()
        self._has_total = False
        self._was_held = False
        self._squares = None
        self.home.reset()
        local = self._local.tensor
        if not self._is_on_cpu:
            self._total = None
            self._local.give_back()
        elif self._frees:
            if self.home.is_on_host and self._total_is_in_local():
                self._total = None
            self._local.give_back()
        elif local is not None and not self.is_single_rank:
            fits = local.dtype == self._sum_dtype
            if fits or self._total_is_in_local():
                self._total = self._collectives.shard_of(local) if fits else None

    def release(self) -> None:
        """Free all buffers, which are unused between a step and the next backward."""
        self._local.release()
        self._total = None
        self._total_bytes = 0

    def end(self) -> None:
        """The engine has ended: free what is kept between steps as well."""
        self.release()
        self.home.release()
        self.reducer = ExactReducer(self._collectives, self.index)

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients from the first one of a step to the update, without those of the pool."""
        local = None if self._frees else self._local.tensor
        total = None if self._total_is_in_local() else self._total
        total_bytes = self._total_bytes if total is None else total.nbytes
        return self.reducer.held_bytes + total_bytes + (0 if local is None else local.nbytes)

    # -- checkpoints in the middle of an accumulation ---------------------------------------------------

    def sums(self) -> GradSums:
        """The sums as they lie in memory; None if there are none. No reduction may be in flight."""
        self.collect()
        local, filled = self._local.tensor, list(self._local.filled)
        total = self.home.total() if self._total is None else self._total
        return GradSums(local if any(filled) else None, filled, total if self._has_total else None)

    def mark_held(self) -> None:
        """Some rank held back gradients since the last step, possibly another one than this."""
        self._was_held = True

    def mark_kept(self) -> None:
        """What the reducer was given by a load has gradients of micro-batches that no message had yet."""
        self._was_held = self._is_kept = True

    def restore(self, saved: GradSums) -> None:
        """Continue from `saved`, directly after `reset`. Keeps `saved.total` and copies `saved.local`."""
        if saved.local is not None:
            self._local.allocate(saved.local.dtype).copy_(saved.local)
            self._local.filled = list(saved.filled)
        if saved.total is not None and self._keeps_local:  # saved with offload, where sums leave
            self._local.add_to(saved.total.to(self.params[0].device))
        elif saved.total is not None:
            if self.home.is_on_host and not self._gathers_sums:
                self.home.put(saved.total)
            else:
                self._total = saved.total.to(self.params[0].device)
            self._has_total = True


def _nothing() -> None:
    return
