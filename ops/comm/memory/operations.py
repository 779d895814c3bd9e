"""Operations in shared memory: their start, their handle, and what happens when a peer does not take part.

start ──> handle ──wait──> done
                   ├─ a peer's process ended, or it stopped waiting ─┐
                   └─ the timeout is over ───────────────────────────┴─> Lost, and peers fail as well

Threads may start operations at once, and wait for different ones. Two threads may not wait for the same one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int64
from typing import Any, final

import torch
from torch import Tensor

from ....utils.errors import UsageError
from ..handles import Handle, Lost, Messages
from .peers import Neighbours
from .segment import DONE, ENDED, LEFT, NO_MEMORY, PENDING, SIZE_DIFFERS, Segment

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # as in sums.h
SLICE_NS = 200_000_000  # the longest time without a look at signals
SPIN_NS = 100_000  # before a process sleeps
YIELD_NS = 20_000  # the same with fewer cores than threads
MOST_SECONDS = 1.0  # of a wait between two looks at the clock: in the rest this process was stopped


def can_sum(part: torch.dtype, out: torch.dtype) -> bool:
    """Whether there is a native sum of `part` into `out`, as in sums.h."""
    is_wider = out == torch.float32 and part in (torch.bfloat16, torch.float16)
    return is_wider or (part == out and part in KINDS)


@final
class GroupOperations:
    """The operations of one group on this rank."""

    def __init__(
        self, neighbours: Neighbours, ranks: Sequence[int], timeout_seconds: float
    ) -> None:
        """ranks: The numbers in the job of the ranks of the group."""
        self.native = neighbours.segment.native
        self._neighbours = neighbours  # the group is closed with it
        self._group = neighbours.handle
        self._forks = _Forks.count
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._failure = ""
        self._about: int | None = None
        num_threads = len(neighbours.ranks) * torch.get_num_threads()
        self.yields = num_threads > len(os.sched_getaffinity(0))
        self.spin_ns = YIELD_NS if self.yields else SPIN_NS

    def start(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        kept: tuple[Any, ...],
        finish: Callable[[], None] | None = None,
    ) -> InMemory:
        """Start `function` of the library. kept: The memory that it reads and writes. Raises `Lost`."""
        self.check_owner()
        if self._failure:
            raise self.lost(self._failure, self._about)
        segment = self._neighbours.segment
        if segment.dropped:
            _forget_dropped(segment)
        try:
            operation = function(self._group, *arguments)
            if operation is None:
                operation = self._retry(function, arguments)
            return InMemory(self, operation, kept, finish)
        except BaseException:  # of the handler of a signal: the operation may be in flight
            segment.interrupted.append((self, kept))
            raise

    @property
    def is_own(self) -> bool:
        """Whether this process opened it. A forked child has a copy, and must not take part in it."""
        return self._forks == _Forks.count

    @property
    def has_failed(self) -> bool:
        return bool(self._failure)

    def check_owner(self) -> None:
        """Raise UsageError in a forked process."""
        if not self.is_own:
            raise UsageError(
                f"process {os.getpid()} was forked from a rank and is none itself, so it cannot take part in "
                "collectives of that rank: open a process group of its own in it, or start it with spawn"
            )

    def keep(self, operation: int, kept: tuple[Any, ...]) -> None:
        """Keep this object and the memory of an operation for which nobody waits, until it is done."""
        self._neighbours.segment.dropped.append((operation, (self, kept)))

    def transfer(
        self,
        key: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> InMemory:
        """Exchange messages with single ranks, of contiguous tensors."""
        tables = [_table([(peer, _place(t), t.nbytes) for peer, t in m]) for m in (sends, receives)]
        arguments = (key, len(sends), tables[0], len(receives), tables[1])
        return self.start(self.native.transfer, arguments, (receives, sends), finish)

    def all_gather(self, key: int, flat: Tensor, shard: Tensor) -> InMemory:
        """Copy each rank's `shard` to its part of the `flat` of all ranks, as `Collectives.all_gather`."""
        arguments = (key, _place(shard), _place(flat), shard.nbytes)
        return self.start(self.native.all_gather, arguments, (flat, shard))

    def gather_parts(
        self, key: int, posted: Tensor, copies: Sequence[Sequence[int]], kept: Any
    ) -> InMemory:
        """Post a tensor, and copy parts of what each peer posts.

        copies: For each part the peer, the bytes that it posts, where the part begins, the bytes of the part,
            and the address of the copy. They are in the order of peers, and each peer has some.
        """
        arguments = (key, _place(posted), posted.nbytes, len(copies), _table(copies))
        return self.start(self.native.gather_parts, arguments, (posted, kept))

    def sum(
        self,
        key: int,
        flat: Tensor,
        parts: Sequence[tuple[int, Tensor]],
        *,
        add: bool = False,
        copies: bool = False,
        finish: Callable[[], None] | None = None,
    ) -> InMemory:
        """Write sums over the ranks of parts of `flat`, or with `add` add them.

        Args:
            parts: For each part its first element in `flat`, and the tensor [n] for its sum.
            copies: `flat` is copied, so it may be written at once.
        """
        table = _table([(begins, out.numel(), _place(out)) for begins, out in parts])
        kinds = KINDS[flat.dtype], KINDS[parts[0][1].dtype]
        arguments = (key, _place(flat), flat.numel(), *kinds, add, copies, len(parts), table)
        return self.start(self.native.sum, arguments, (flat, parts), finish)

    def _retry(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        """Wait until peers have read some messages, because too many are unread, and start the operation."""
        operation, clock = None, WaitClock()
        while operation is None:
            time.sleep(0.001)
            self.native.progress()
            operation = function(self._group, *arguments)
            if operation is None and clock.seconds() > self._timeout_seconds:
                about = self.native.first_reader(self._group)
                rank = self._ranks[about] if about >= 0 else None
                raise self.lost(f"Timed out: rank {rank} reads no messages", rank)
        return int(operation)

    def explain(self, status: int, operation: int) -> tuple[str, int | None]:
        """Return why an operation failed, and the number in the job of the rank that this is about."""
        about = self.native.about(operation)
        rank = self._ranks[about] if about >= 0 else None
        reason = {
            ENDED: f"Connection closed by rank {rank}: its process ended",
            LEFT: f"Connection closed by rank {rank}, which stopped waiting",
            SIZE_DIFFERS: f"rank {rank} sent another number of bytes than this rank receives",
            NO_MEMORY: f"no memory is left for messages: {self._neighbours.segment.why_full}",
            PENDING: f"Timed out after {self._timeout_seconds:.0f} s of waiting for rank {rank}",
        }[status]
        return reason, None if status == NO_MEMORY else rank

    def is_out_of_time(self, clock: WaitClock) -> bool:
        """Whether a wait has lasted for the timeout, or the group has failed already."""
        return bool(self._failure) or clock.seconds() > self._timeout_seconds

    def lost(self, reason: str, rank: int | None) -> Lost:
        """Leave the group, which does not recover.

        Returns the error; ranks that wait for this one fail as well.
        """
        if not self._failure:
            self._failure, self._about = reason, rank
            self.native.leave_group(self._group)  # now: they have a report to write as well
            _forget_dropped(self._neighbours.segment)
        return Lost(reason, rank)


@final
class WaitClock:
    """Counts seconds of waiting, without the time in which this process was stopped."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, MOST_SECONDS)
        self._last = now
        return self._seconds


def _forget_dropped(of: Segment) -> None:
    """End the dropped operations that are done now."""
    if not of.forgetting.acquire(blocking=False):  # another thread does it
        return
    try:
        for at in range(len(of.dropped) - 1, -1, -1):  # others are only added at the end
            operation, _ = of.dropped[at]
            if of.native.status(operation) != PENDING:
                del of.dropped[at]
                of.native.quick.end(operation)
    finally:
        of.forgetting.release()


class _Forks:
    """Counts the forks between this process and the one that loaded the module."""

    count = 0


def _after_fork() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_after_fork)


@final
class InMemory(Handle):
    """An operation in flight."""

    _operation = 0

    def __init__(
        self,
        of: GroupOperations,
        operation: int,
        kept: tuple[Any, ...],
        finish: Callable[[], None] | None,
    ) -> None:
        self._of = of
        self._operation = operation
        self._kept = kept
        self._finish = finish

    def __del__(self) -> None:
        if not self._operation or _Forks is None or not self._of.is_own:
            return
        if self._of.has_failed:
            self._of.native.quick.end(self._operation)
        else:
            self._of.keep(self._operation, self._kept)

    def wait(self) -> None:
        failure = self.settle()
        if failure is not None:
            raise self._of.lost(*failure)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def settle(self) -> tuple[str, int | None] | None:
        """Wait, in any thread. Returns why it failed and the rank that this is about, or None."""
        of, operation = self._of, self._operation
        if not operation:
            return None
        of.check_owner()
        status = of.native.wait(operation, SLICE_NS, of.spin_ns, of.yields)
        if status == PENDING:
            clock = WaitClock()
            while status == PENDING and not of.is_out_of_time(clock):
                status = of.native.wait(operation, SLICE_NS, of.spin_ns, of.yields)
        failure = None if status == DONE else of.explain(status, operation)
        self._operation = 0
        of.native.quick.end(operation)
        self._kept = ()
        return failure


def _place(tensor: Tensor) -> int:
    """Its address. Raises ValueError: its elements are not one range of memory."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be sent: "
            "call contiguous() first"
        )
    return tensor.data_ptr()


def _table(rows: Sequence[Sequence[int]]) -> Any:
    flat = [value for row in rows for value in row]
    return (c_int64 * len(flat))(*flat)


__all__ = ["KINDS", "WaitClock", "GroupOperations", "InMemory", "can_sum"]
