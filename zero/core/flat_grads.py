"""The gradients of one flat buffer, from the moment autograd makes them to this rank's reduced sum.

    autograd -> param.grad --copy--> local [world_size * n] --reduce--> total [n] --(stage 0) gather--> local

`local` holds this rank's own sum, since the last reduction; `total` the sum over ranks, since the last
optimizer step. Nothing accumulated is ever dropped: a reduction adds to what earlier ones left.

The first gradient of a slot is copied (autograd made it anyway: letting it keep its fresh tensor and
copying is cheaper than zeroing and adding into a preset view); later ones are added. Gradients of small
parameters wait in `param.grad` until the buffer is complete and are copied by one call.

A gradient may come more than once in a backward: a reentrant checkpoint runs a graph of its own for every
call of a block. How often each came in the backward before says when the buffer is complete. One that comes
after the buffer was sent is late: it stays in `local`, and the ranks agree on a second reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...compression.reducer import GradientReducer
from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from ...ops.comm.pool import BufferPool
from .layout import FlatLayout
from .policy import Policy

SMALL_NUMEL = 1 << 14  # below it, a call for each gradient costs more than its copy


class GradSums(NamedTuple):
    """What came in since the last step: own sums [world_size * n], for which slots; the total [n]."""

    local: Tensor | None
    filled: list[bool]
    total: Tensor | None


@final
class FlatGrads:
    """Owns one flat buffer of gradients. `is_sent`: its reduction has begun in this backward."""

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        policy: Policy,
        collectives: Collectives,
        reducer: GradientReducer,
        pool: BufferPool,
        index: int,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.index = index
        self.is_sent = False
        self._expected = [1] * len(self.params)  # arrivals of each slot that make it complete
        self._arrivals = [0] * len(self.params)
        self._begun = 0  # slots with an arrival
        self._remaining = 0  # slots that are not complete
        self.factor = 1.0  # on every gradient of this backward
        self._policy = policy
        self._collectives = collectives
        self._reducer = reducer
        self._pool = pool
        self.is_alone = collectives.world_size == 1
        self._is_small = [slot.numel < SMALL_NUMEL for slot in layout.slots]
        self._small = [at for at, is_small in enumerate(self._is_small) if is_small]
        self._param_dtype = params[0].dtype
        self._sum_dtype = policy.sum_dtype(self._param_dtype)
        self._sent_dtype = policy.sent_dtype(self._param_dtype)
        self._local: Tensor | None = None
        self._views: list[Tensor] = []
        self._filled = [False] * len(layout.slots)
        self._wants_wide = self.is_alone or policy.holds_grads
        self._was_held = False  # some backward since the last step was, on whichever ranks
        self._is_writable = False
        self._total: Tensor | None = None
        self._has_total = False
        self._payload: Tensor | None = None
        self._handle: Handle | None = None

    # -- what autograd brings ---------------------------------------------------------------------------

    def begin_backward(self, *, hold: bool) -> None:
        """A backward starts; with `hold` its gradients will not be reduced at its end."""
        self._expected = [
            (seen or 1) if param.requires_grad else 0
            for param, seen in zip(self.params, self._arrivals, strict=True)
        ]
        self._arrivals = [0] * len(self.params)
        self._begun = 0
        self._remaining = sum(expected > 0 for expected in self._expected)
        self.is_sent = False
        self.factor = 1.0
        self._is_writable = False
        self._was_held |= hold  # ranks must agree on the dtype that they send
        self._wants_wide = self._was_held or self.is_alone or self._policy.holds_grads

    @property
    def is_complete(self) -> bool:
        """Every gradient that is expected has come in this backward."""
        return self._remaining <= 0

    @property
    def has_frozen(self) -> bool:
        """Some of its parameters were frozen after `initialize`, and get no gradient in this backward."""
        return 0 in self._expected

    def take(self, position: int) -> bool:
        """A gradient lies in `.grad` of the parameter in slot `position`. True: the buffer is complete now.

        Nothing of the buffer may be under way.
        """
        if not self._is_small[position]:
            param = self.params[position]
            grad, param.grad = param.grad, None
            if grad is not None:
                with torch.no_grad():
                    self._put(position, grad)
        arrivals = self._arrivals[position] + 1
        self._arrivals[position] = arrivals
        self._begun += arrivals == 1
        if arrivals != self._expected[position]:
            return False
        self._remaining -= 1
        return self._remaining == 0

    def expect_no_more(self) -> None:
        """What has not come will not come."""
        self._remaining = 0

    def expects_more(self) -> bool:
        """Some gradient is still to come; asked inside of a backward, of the graph that it runs."""
        coming = sum(
            torch._C._will_engine_execute_node(get_gradient_edge(param).node)
            for param in self.params
            if param.requires_grad
        )
        return self._begun < coming

    def _put(self, position: int, grad: Tensor) -> None:
        view = self._local_views()[position]
        if self._filled[position]:
            view.add_(grad, alpha=self.factor)
        elif grad.layout == torch.strided:
            view.copy_(grad)
            if self.factor != 1.0:
                view.mul_(self.factor)
        else:
            view.zero_().add_(grad, alpha=self.factor)
        self._filled[position] = True

    @torch.no_grad()
    def collect(self) -> None:
        """Copy what waits in the small parameters' `.grad` in one call."""
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        for position in self._small:
            grad = self.params[position].grad
            if grad is None:
                continue
            self.params[position].grad = None
            view = self._local_views()[position]
            if self._filled[position] or grad.layout != torch.strided:
                self._put(position, grad)
            else:
                fresh[0].append(view)
                fresh[1].append(grad)
                self._filled[position] = True
        if fresh[0]:
            torch._foreach_copy_(*fresh)
            if self.factor != 1.0:
                torch._foreach_mul_(fresh[0], self.factor)

    def _local_views(self) -> list[Tensor]:
        """The slots of `local`, made writable: allocated, and no longer shared with a reduced total."""
        if self._is_writable:
            return self._views
        dtype = self._sum_dtype if self._wants_wide else self._param_dtype
        if self._local is None or (self._local.dtype != dtype and not any(self._filled)):
            self._allocate_local(dtype)
        self._is_writable = True
        if self._has_total and self._total_is_in_local():
            assert self._total is not None
            self._total = self._total.clone()
        return self._views

    def _allocate_local(self, dtype: torch.dtype) -> None:
        device = self.params[0].device
        numel = self.layout.numel
        if self._policy.shards_grads:
            local = self._pool.take(numel, dtype, device)
        else:
            local = torch.empty(numel, dtype=dtype, device=device)
        for start, stop in self.layout.gaps():
            local[start:stop].zero_()
        self._local = local
        self._views = [
            local.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in self.layout.slots
        ]

    def _total_is_in_local(self) -> bool:
        if self._total is None or self._local is None:
            return False
        mine, whole = self._total.untyped_storage(), self._local.untyped_storage()
        return mine.data_ptr() == whole.data_ptr()

    def settle(self) -> Tensor:
        """`local` with everything that arrived in it, and zeros where nothing did."""
        self.collect()
        with torch.no_grad():
            views = self._local_views()
            for view, filled in zip(views, self._filled, strict=True):
                if not filled:
                    view.zero_()
            self._filled = [True] * len(views)
        assert self._local is not None
        return self._local

    # -- what the ranks make of it ----------------------------------------------------------------------

    @property
    def has_local(self) -> bool:
        """Gradients are here that no reduction has taken yet."""
        return any(self._filled) or any(self.params[i].grad is not None for i in self._small)

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Begin to add this rank's sums to everybody's totals.

        Sends (world_size - 1) * n elements.
        """
        local = self.settle()
        self.is_sent = True
        if self.is_alone:
            return
        if self._total is None:
            fits = local.dtype == self._sum_dtype and not self._policy.shards_grads
            self._total = (
                self._collectives.shard_of(local)
                if fits
                else local.new_empty(self.layout.shard_numel, dtype=self._sum_dtype)
            )
        payload = local
        if local.dtype != self._sent_dtype:
            payload = self._pool.take(local.numel(), self._sent_dtype, local.device)
            payload.copy_(local)
            self._payload = payload
        self._handle = self._reducer.reduce(
            payload, self._total, add=self._has_total, buffer=self.index
        )
        self._filled = [False] * len(self._filled)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """End the reduction that is under way; `local` is free again."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        handle.wait()
        self._has_total = True
        self._is_writable = False
        if self._payload is not None:
            self._pool.give(self._payload)
            self._payload = None
        if self._policy.shards_grads and self._local is not None:
            self._pool.give(self._local)
            self._local = None
            self._views = []

    @torch.no_grad()
    def start_gather(self) -> None:
        """Stage 0: begin to fill `local` with every rank's total. Sends (world_size - 1) shards a rank."""
        if self.is_alone:
            return
        assert self._local is not None and self._total is not None
        own = self._collectives.shard_of(self._local)
        if not self._total_is_in_local():
            own.copy_(self._total)
        self._handle = self._collectives.all_gather(
            self._local, own, buffer=self.index, kind="all_gather"
        )

    def finish_gather(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()

    # -- what the optimizer reads -----------------------------------------------------------------------

    @torch.no_grad()
    def square_sums(self, square_sum: Callable[[Tensor], Tensor]) -> Tensor:
        """`square_sum` of the shards of the sums that this rank sees, [world_size] fp64; 0 for the others.

        It sees all of them at stage 0, none where no backward has made any, else its own.
        """
        if self.is_alone and self.has_local:
            self.settle()  # nobody else was sent anything, so nothing is late
        sees_all = self.is_alone or not self._policy.shards_optimizer
        sums = torch.zeros(
            self._collectives.world_size, dtype=torch.float64, device=self.params[0].device
        )
        held = self._local if sees_all else self._total
        if held is None:
            return sums
        for rank in range(len(sums)) if sees_all else ():
            sums[rank] = square_sum(self._collectives.shard_of(held, rank))
        if not sees_all:
            sums[self._collectives.rank] = square_sum(held)
        return sums

    @property
    def is_late(self) -> bool:
        """Gradients have come since the reduction, so the ranks have to reduce once more."""
        return not self.is_alone and self.has_local

    def shard(self) -> Tensor:
        """This rank's reduced total [n]: what the norm is taken of."""
        if self.is_alone:
            assert self._local is not None
            return self._local
        assert self._total is not None
        return self._total

    def reduced(self) -> Tensor | None:
        """The sums over ranks as the update would read them now; None: no backward since the last step."""
        if self.is_alone:
            return self.settle() if self.has_local else None
        return self.for_update() if self._has_total else None

    def for_update(self) -> Tensor:
        """What the optimizer reads: the whole of it where its states are whole, else the shard."""
        if not self._policy.shards_optimizer:
            assert self._local is not None
            return self._local
        return self.shard()

    def reset(self) -> None:
        """The step is done, or skipped: start from nothing. Buffers that persist are kept."""
        self._filled = [False] * len(self._filled)
        self._is_writable = False
        self._has_total = False
        self._was_held = False
        for position in self._small:
            self.params[position].grad = None
        if not self._policy.shards_grads and self._local is not None:
            fits = self._local.dtype == self._sum_dtype
            if fits and not self.is_alone:
                self._total = self._collectives.shard_of(self._local)
        elif self._local is not None:
            self._pool.give(self._local)
            self._local = None
            self._views = []

    def release(self) -> None:
        """Let go of the buffers that persist, which hold nothing between a step and the next backward."""
        self._local, self._total, self._views = None, None, []
        self._is_writable = False

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients that stay between steps; pooled buffers are counted by the pool."""
        kept = [] if self._policy.shards_grads or self._local is None else [self._local]
        if self._total is not None and not self._total_is_in_local():
            kept.append(self._total)
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    # -- what a checkpoint in the middle of an accumulation keeps ---------------------------------------

    def sums(self) -> GradSums:
        """The sums as they lie in memory; None where there is nothing. Nothing may be under way."""
        self.collect()
        local = self._local if any(self._filled) else None
        return GradSums(local, list(self._filled), self._total if self._has_total else None)

    @torch.no_grad()
    def hold(self) -> None:
        """Some rank held a backward back since the last step, whether this one has gradients of it or not."""
        self._was_held = True

    def restore(self, saved: GradSums) -> None:
        """Go on from `saved`, right after a `reset`; `saved.total` is taken over, `local` is copied."""
        if saved.local is not None:
            self._allocate_local(saved.local.dtype)
            assert self._local is not None
            self._local.copy_(saved.local)
            self._filled = list(saved.filled)
        if saved.total is not None:
            self._total = saved.total
            self._has_total = True
