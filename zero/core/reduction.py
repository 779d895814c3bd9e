"""Reduces gradients over the ranks in one fixed order, overlapped with backward.

- The order is the same on every rank. A reduction starts when its buffer and all before it are complete.
- Parameters that a backward did not use contribute zeros at its end. So ranks whose graphs differ send the
  same messages, and no rank waits for ever.
- A gradient that arrives after its buffer was sent waits for `finish`, where the ranks agree on a second
  reduction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ...ops.comm.handles import Handle
from ...ops.device import device_of, wide_place
from ...ops.flat import moved
from ...ops.kernels.decide import decide, is_in_range
from ..layout.groups import FlatGroups
from .grad_bucket import GradBucket

NUM_COUNTS = 1 << 40  # numbers of writes are below it; with four flags they are exact in fp64
LATE, STOP, REGROUP, SAVE = (NUM_COUNTS << bit for bit in range(4))  # beside the number of writes


@final
class StepStatus:
    """The squared norm of the reduced sums, and what each rank says beside its part of it."""

    def __init__(self, table: Tensor, numel: int) -> None:
        """
        Args:
            table: fp64 [world_size, 4], by rank: its part of the squared norm; its writes, plus LATE if
                it has late gradients, plus STOP if its process was asked to stop; the sum of its weights, or
                -1 without weights; its losses.
            numel: elements of all gradients, on the rank that has the most.
        """
        self._table, self._numel = table, numel
        self._arrived: tuple[Tensor, Any] | None = None  # the second is an event
        self._flags: Tensor | None = None

    def attach(self, flags: Tensor | None) -> None:
        """Read `flags` [n] of this rank in the same wait; before anything is read."""
        self._flags = flags

    def decide(self, factor: float, limit: float) -> Tensor:
        """Start to compute what the kernels of a plain step read: see the op `decide`.

        A later read on the host waits only for the work before this call.
        """
        numbers = decide(self._table, self._numel, factor, limit)
        place = device_of(self._table.device)
        host = torch.empty(self._table.shape, dtype=self._table.dtype, pin_memory=place.pins_memory)
        host.copy_(self._table, non_blocking=True)
        self._arrived = host, place.event()
        return numbers

    @cached_property
    def _numbers(self) -> list[float]:
        """The table row by row, then the flags. Waits for the device once, until `decide` if it was called."""
        if self._arrived is not None:
            host, event = self._arrived
            event.synchronize()
        else:
            host = self._table.view(-1)
            if self._flags is not None:
                host = torch.cat([host, self._flags.to(host.device).to(host.dtype)])
        numbers: list[float] = host.view(-1).tolist()
        return numbers

    def _column(self, number: int) -> list[float]:
        return self._numbers[number : self._table.numel() : self._table.shape[1]]

    @property
    def flags(self) -> list[bool]:
        """Those that were attached."""
        return [bool(number) for number in self._numbers[self._table.numel() :]]

    @property
    def square(self) -> float:
        """The squared norm, added in rank order; inf or nan on overflow."""
        total = 0.0
        for square in self._column(0):  # `sum` compensates rounding in some versions of Python
            total += square
        return total

    @property
    def is_late(self) -> bool:
        """Some rank has late gradients."""
        return any(int(number) & LATE for number in self._column(1))

    @property
    def stops(self) -> list[bool]:
        """By rank: its process was asked to stop."""
        return [bool(int(number) & STOP) for number in self._column(1)]

    @property
    def regroups(self) -> bool:
        """Some rank knows of another generation of the group, which begins after this step."""
        return any(int(number) & REGROUP for number in self._column(1))

    @property
    def saves(self) -> bool:
        """Some rank says that it is time for a checkpoint."""
        return any(int(number) & SAVE for number in self._column(1))

    @property
    def num_writes(self) -> list[int]:
        """The writes of user code by rank."""
        return [int(number) % NUM_COUNTS for number in self._column(1)]

    @property
    def means(self) -> list[tuple[float, float]]:
        """By rank: the sum of its weights, or -1; its losses."""
        return list(zip(self._column(2), self._column(3), strict=True))

    @property
    def is_in_range(self) -> bool:
        """The square needs no second, exact computation."""
        return is_in_range(self.square, self._numel)

    @property
    def table(self) -> Tensor:
        """fp64 [world_size, 4]; see `__init__`."""
        return self._table

    @property
    def is_plain(self) -> bool:
        """The condition of the op `decide`."""
        weights = self._column(2)
        is_mixed = min(weights) < 0 < max(weights)
        return self.is_in_range and not is_mixed and not any(self._column(1))


REDUCTIONS_IN_FLIGHT = 2  # one is sent while the one before it is summed; 0 without overlap_comm


@final
@dataclass(frozen=True, eq=False)
class Scope:
    """A backward through a part of the model: the gradients that it computes, and those that it reduces."""

    computes: Set[GradBucket]
    reduces: Set[GradBucket]


@final
class Reduction:
    """Reduces flat gradients in `order`. `start_*`, `end_*`, `reduce_*` and
    `cross_replicas` are for all ranks of each group."""

    def __init__(
        self,
        order: Sequence[GradBucket],
        groups: FlatGroups,
        *,
        in_flight: int,
    ) -> None:
        """
        Args:
            in_flight: the maximum number of reductions in flight when another one starts.
        """
        # what several pipeline stages share comes last, in an order that they share as well
        self.order = sorted(order, key=lambda g: g.group.number if g.group.is_shared else 0)
        self._groups = groups
        self._world = groups.world
        # some buffers are on some ranks only, as those of stages and of slices
        self._has_parts = any(
            ranks.world_size < groups.world.world_size for ranks in groups.holders
        )
        everywhere = [
            g for g in self.order if g.group.collectives.world_size == self._world.world_size
        ]
        known = [g for g in everywhere if not g.group.policy.shards_optimizer]
        # norms are added in one order, whichever of them are sent
        self._norm_is_exchanged = [g for g in self.order if g not in everywhere]
        self._norm_is_exchanged += [g for g in everywhere if g not in known]
        self._whole_on_each_rank = known
        self._numel = self._count_numel()
        self._depth = in_flight
        self._running = self.order  # those of the current backward
        self._scope: Scope | None = None
        self._next = 0
        self._in_flight: list[GradBucket] = []
        self._with_replicas = [g for g in self.order if g.group.levels is not None]
        self._crossing: list[tuple[GradBucket, Handle]] = []  # on their way over the replicas
        self._crosses_now = False  # the running backward is expected to be the last of its step
        self._reduces = True
        # buckets with gradients of whole backward passes that are not reduced yet
        self._held: set[GradBucket] = set()
        # since the last step: took part in some backward, and were left out of some; the same on all ranks
        self._used: set[GradBucket] = set()
        self._left_out: set[GradBucket] = set()
        self.has_sums = False  # a backward has computed gradients since the last step
        self.sums_first = (
            False  # the sums are complete on a rank before it sends its part of the norm
        )
        self.status: StepStatus | None = None  # of the last message

    def _count_numel(self) -> int:
        """The elements of all buffers, on the rank that has the most."""
        numel = sum(bucket.layout.numel for bucket in self.order)
        if not self._has_parts:
            return numel
        own_numel = torch.tensor([numel], dtype=torch.int64, device=self._world.device)
        return int(self._world.gather_small(own_numel).max())

    def begin_backward(
        self,
        *,
        reduces: bool,
        ends_step: bool = False,
        scope: Scope | None = None,
        without: Set[GradBucket] = frozenset(),
    ) -> None:
        """Gradients are about to arrive. With `reduces`, `end_backward` returns after their reduction began.

        Args:
            ends_step: the backward is likely to be the last of its step, the same on all ranks: sums cross to
                replicas during it. If it is wrong they cross later or more often, and are the same.
            scope: what the backward computes and reduces; None: everything.
            without: buffers that get no gradients, the same on all ranks: nothing is sent for them. A gradient
                that arrives all the same is late.
        """
        if scope is None:
            self.settle()  # buffers may be written again only when they are not being sent
            self._running = [bucket for bucket in self.order if bucket not in without]
            self._left_out.update(without)
            for bucket in without:
                bucket.scale_by(1.0)
        else:
            self._running = [bucket for bucket in self.order if bucket in scope.computes]
            for bucket in self._running:
                self.settle(bucket)
        self._used.update(self._running)
        self._reduces = reduces
        self._scope = scope
        self._crosses_now = scope is None and ends_step
        self._next = 0
        for bucket in self._running:
            bucket.begin_backward(hold=not self._reduces_now(bucket))

    def open(self) -> None:
        """From now on gradients of the backward that has begun are counted."""
        for bucket in self._running:
            bucket.arrivals.open()

    def expect_no_more(self) -> None:
        """The backward is over. A gradient that arrives later is late."""
        for bucket in self._running:
            bucket.arrivals.expect_no_more()

    def _reduces_now(self, bucket: GradBucket) -> bool:
        """`bucket` is reduced at the end of the running backward."""
        return self._reduces and (self._scope is None or bucket in self._scope.reduces)

    def start_complete(self) -> None:
        """Start the reductions of complete buffers, up to the first that is not complete.

        Where gradients are held back they are collected at the same moment, so that sums have the same bits.
        """
        while self._next < len(self._running):
            bucket = self._running[self._next]
            if not bucket.arrivals.is_complete:
                return
            if self._reduces_now(bucket):
                self._start(bucket)
            else:
                bucket.collect()
            self._next += 1

    def end_backward(self) -> None:
        """No more gradients will arrive: reduce the rest, with zeros for unused parameters."""
        if self._reduces:
            for bucket in self._running[self._next :]:
                if self._reduces_now(bucket):
                    self._start(bucket)
            self._next = len(self._running)
        for bucket in self._running:  # also if all were sent: late gradients may be in `.grad`
            bucket.collect()
            if not self._reduces_now(bucket):
                bucket.hold_back()
                self._held.add(bucket)
            else:
                self._held.discard(bucket)
        self.has_sums = True

    def end_without_reducing(self) -> None:
        """End a backward whose gradients are not taken; gradients held back earlier are kept."""
        held, self._reduces = set(self._held), False
        self.end_backward()
        self._held = held

    def scale_by(self, factor: float) -> None:
        """Multiply the following gradients of this backward by `factor`."""
        for bucket in self.order:
            bucket.scale_by(factor)

    def start_finish(self, *, num_writes: int, flags: int, means: Tensor) -> StepStatus:
        """Sum every gradient over the ranks, also those that were held back. The host waits for no device.

        Args:
            num_writes: of this rank's user code to parameters, below NUM_COUNTS; the message tells all ranks.
            flags: STOP, if this rank's process was asked to stop, plus REGROUP and SAVE; the message tells all.
            means: fp64 [2]: the sum of this rank's weights, or -1; its losses. The message tells all ranks.

        Sends 32 bytes to each rank beside the gradients, 24 at stage 0 on devices. `end_finish` must follow.
        """
        self.reduce_held()
        self.fill_left_out()
        self.cross_replicas()
        if self.sums_first:
            self.settle()
        return self._agree(means, exact=False, flags=num_writes + flags)

    def end_finish(self, status: StepStatus) -> float:
        """Reduce late gradients.

        Returns:
            the squared 2-norm of the sums over all parameters, fp64, the same on every rank; inf or nan on
            overflow. Partial sums of the ranks' shards are added in rank order.
        """
        if status.is_late:
            self.reduce_late()
            self.cross_replicas()
            status = self._agree(self._no_means(), exact=False)
        if status.is_in_range:
            return status.square
        return self._agree(self._no_means(), exact=True).square

    @property
    def holds(self) -> bool:
        """The gradients of the last backward are not reduced yet."""
        return bool(self._held)

    def reduce_held(self) -> None:
        """Reduce the gradients that earlier backward passes held back."""
        if self._held:
            self.start_held(self._held)
            self.settle()

    def fill_left_out(self) -> None:
        """After the last backward of a step: zeros, without a message, for what every backward left out."""
        for bucket in self.order:
            if bucket in self._left_out and bucket not in self._used:
                bucket.fill_with_zeros()
        self._left_out = set()

    def start_held(self, only: Collection[GradBucket]) -> None:
        """Start to reduce what was held back of `only`, the same on all ranks of each group."""
        for bucket in self.order:
            if bucket in only and bucket in self._held:
                self.settle(bucket)
                self._start(bucket)
        self._held = self._held.difference(only)

    def _no_means(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=wide_place(self._world.device))

    def status_of(self, numbers: Sequence[float]) -> StepStatus:
        """What another rank has heard, in the place of a message that did not arrive. numbers: of its table."""
        place = wide_place(self._world.device)
        table = torch.tensor(numbers, dtype=torch.float64, device=place).view(-1, 4)
        self.status = StepStatus(table, self._numel)
        return self.status

    def _agree(self, means: Tensor, *, exact: bool, flags: int = 0) -> StepStatus:
        """The squared norm of the sums, and each rank's `flags`, with that of late gradients, and `means`."""
        self.status = self._exchange(means, exact=exact, flags=flags)
        return self.status

    def _exchange(self, means: Tensor, *, exact: bool, flags: int) -> StepStatus:
        flags += LATE * any(bucket.is_late for bucket in self.order)
        # made on the device: there is no copy to wait for
        status = torch.cat((means.new_full((1,), flags), means))
        if self._has_parts or self._groups.data.policy.shards_optimizer:
            return StepStatus(self._by_norms(status, exact=exact), self._numel)
        if not self._norm_is_exchanged and all(
            bucket.total.norm_before_gather for bucket in self.order
        ):
            return StepStatus(self._by_own_shards(status, exact=exact), self._numel)
        # every rank gets all sums, so no exchange of norms follows: send the rest first
        world = self._world
        table, handle = world.start_gather_small(status)
        self._drain()
        place = wide_place(world.device)
        none = torch.zeros(world.world_size, dtype=torch.float64, device=place)
        squares = _added(none, self._squares(self.order, exact=exact))
        handle.wait()
        return StepStatus(torch.cat([squares.view(-1, 1), table], dim=1), self._numel)

    def _by_own_shards(self, status: Tensor, *, exact: bool) -> Tensor:
        """The table of a `StepStatus` at stage 0, while sums are still gathered: updates wait for them.

        Each rank computes the norm of its own shards only.
        """
        self._drain()
        world = self._world
        square = _added(
            self._zero(), [bucket.total.own_square(exact=exact) for bucket in self.order]
        )
        return world.gather_small(torch.cat((square.view(1), status)))

    def _by_norms(self, status: Tensor, *, exact: bool) -> Tensor:
        """The table of a `StepStatus`, with a message of this rank's part of the norm.

        Sums that every rank has are no part of it. They may arrive while it is sent.
        """
        world = self._world
        sent, known = self._norm_is_exchanged, self._whole_on_each_rank
        if any(not bucket.is_single_rank for bucket in sent):
            self._drain()
        squares = self._squares(sent, exact=exact)
        parts = [  # each element on one rank only
            square[bucket.group.collectives.rank]
            for bucket, square in zip(sent, squares, strict=True)
            if bucket.group.is_first_replica
        ]
        own_square = _added(self._zero(), parts)
        table, handle = world.start_gather_small(torch.cat((own_square.view(1), status)))
        self._drain()
        squares = self._squares(known, exact=exact)
        handle.wait()
        table[:, 0] = _added(table[:, 0], squares)
        return table

    def _zero(self) -> Tensor:
        """The first term of a norm: this rank may have no others."""
        return torch.zeros((), dtype=torch.float64, device=wide_place(self._world.device))

    def _squares(self, order: Sequence[GradBucket], *, exact: bool) -> list[Tensor]:
        squares = []
        for bucket in order:  # the norm of one buffer is computed while the next is in flight
            bucket.total.finish_gather()
            squares.append(bucket.squares(exact=exact))
        return _on_device(squares, wide_place(self._world.device))

    def reduce_late(self) -> None:
        """Reduce buffers again that got late gradients on any rank. Sends one byte per buffer to each rank."""
        self.settle()
        for collectives in self._groups.holders:
            inside = [bucket for bucket in self.order if bucket.group.everyone is collectives]
            flags = [bucket.is_late for bucket in inside]
            own_flags = torch.tensor(flags, dtype=torch.uint8, device=collectives.device)
            late = collectives.gather_small(own_flags).amax(0).tolist() if inside else []
            for bucket, flag in zip(inside, late, strict=True):
                if flag:
                    self._start(bucket)
        self.settle()

    def settle(self, only: GradBucket | None = None) -> None:
        """Wait for all reductions and gathers in flight, or for those of `only`."""
        if only is None:
            self._drain()
        while only in self._in_flight:
            self._end(self._in_flight.pop(0))
        for bucket in self.order if only is None else [only]:
            bucket.total.finish_gather()
        self._end_crossing(self.order if only is None else [only])

    def settle_late(self, bucket: GradBucket) -> None:
        """Let `bucket` take a late gradient. Only this rank may have one, so no message starts here."""
        bucket.finish_reduce()
        bucket.total.finish_gather()
        self._end_crossing([bucket])

    def cross_replicas(self) -> None:
        """Wait until all totals are summed over all replicas. For all ranks."""
        if self._with_replicas:
            self._drain()
            for bucket in self._with_replicas:
                self._cross(bucket)
            self._end_crossing(self._with_replicas)

    def _cross(self, bucket: GradBucket) -> None:
        """Start to sum over the replicas, and end the sums before the last one."""
        rest = bucket.total.cross_replicas()
        if rest is not None:
            self._crossing.append((bucket, rest))
        while len(self._crossing) > min(self._depth, 2):
            self._crossing.pop(0)[1].wait()

    def _end_crossing(self, only: Sequence[GradBucket]) -> None:
        while any(bucket in only for bucket, _ in self._crossing):
            self._crossing.pop(0)[1].wait()

    @property
    def is_lossy(self) -> bool:
        """What is sent now is not exact."""
        return any(bucket.is_lossy for bucket in self.order)

    def undo(self) -> None:
        """The step is skipped: a lossy reducer adds what was sent to its pending error. Before `reset`."""
        self.settle()
        for bucket in self.order:
            bucket.reducer.undo()

    def reset(self) -> None:
        """Drop all gradients: the step is done, or skipped."""
        for bucket in self.order:
            bucket.reset()
        self._held, self._used, self._left_out = set(), set(), set()
        self.has_sums = False

    def abandon(self) -> None:
        """Drop all gradients and what is in flight, without a wait: the group has failed."""
        self._in_flight, self._crossing = [], []
        for bucket in self.order:
            bucket.abandon()
        self.reset()

    def _start(self, bucket: GradBucket) -> None:
        bucket.start_reduce()
        if bucket.is_single_rank:  # nothing is in flight
            return
        self._in_flight.append(bucket)
        if len(self._in_flight) > self._depth:
            self._end(self._in_flight.pop(0))

    def _end(self, bucket: GradBucket) -> None:
        bucket.finish_reduce()
        if not bucket.group.policy.shards_optimizer:  # stage 0: every rank gets the whole total
            bucket.total.start_gather()
        elif self._crosses_now:
            self._cross(bucket)

    def _drain(self) -> None:
        while self._in_flight:
            self._end(self._in_flight.pop(0))


def _added(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, fp64, in few launches. A CPU adds one after the other."""
    return torch.stack((first, *others)).cumsum(0)[-1] if others else first


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same rows in their order; those on the host are copied together, without a wait for the device."""
    numbers = [number for number, tensor in enumerate(tensors) if tensor.device != device]
    if not numbers:
        return list(tensors)
    there = [tensors[number] for number in numbers]  # as many elements as their groups have ranks
    together = torch.split(moved(torch.cat(there), device), [tensor.numel() for tensor in there])
    copies = dict(zip(numbers, together, strict=True))
    return [copies.get(number, tensor) for number, tensor in enumerate(tensors)]


__all__ = [
    "REGROUP",
    "SAVE",
    "STOP",
    "StepStatus",
    "LATE",
    "REDUCTIONS_IN_FLIGHT",
    "Reduction",
    "Scope",
]
