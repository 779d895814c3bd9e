"""What a group of ranks sends in a step, chosen once: gradients, then their sums or parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle
from ..ops.comm.mesh_groups import Split

# -- how the parameters of a flat buffer are sent, as an object that is chosen once; exact by default ----
# gather     a shard of each rank, dropped between uses (stage 3)      -> the full buffer
# publish    the new values of each rank's shard after an update       -> the full buffer (stages 1, 2); only
#            senders of compression have it: exact values are gathered


class ParamSender(ABC):
    """Sends the values of one flat buffer to the ranks of its group.

    num_maxima: the numbers that the next `gather` needs the maximum of over all ranks; 0: none. One exchange
    may have those of several buffers (`exchange_maxima`); a gather without it makes its own.
    """

    @property
    def num_maxima(self) -> int:
        return 0

    def maxima(self, shard: Tensor) -> Tensor:
        """This rank's numbers, fp32 [num_maxima], from its `shard` [n]."""
        raise AssertionError("gathers need none")

    def take_maxima(self, maxima: Tensor) -> None:
        """The next gathers use `maxima` [num_maxima], the largest numbers of all ranks."""
        raise AssertionError("gathers need none")

    @property
    @abstractmethod
    def keeps_master(self) -> bool:
        """The updated values need memory of their own: what the ranks compute with may differ from them."""

    @property
    @abstractmethod
    def sends_differences(self) -> bool:
        """`publish` sends the difference to what all ranks hold, now."""

    @property
    @abstractmethod
    def rounds(self) -> bool:
        """`gather` fills in rounded values; the shards stay exact."""

    @abstractmethod
    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        """Start to fill `flat` [world_size * n] with every rank's `shard` [n], which may be part of it."""

    @abstractmethod
    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        """Start to move `flat` [world_size * n] to every rank's `values` [n], where it `sends_differences`.

        `flat` has equal values on all ranks before and after it.
        """

    @abstractmethod
    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        """Set elements [start, stop) of `shard` [n] to what user code wrote to this rank's part of `flat`."""

    @abstractmethod
    def keep(self, flat: Tensor) -> None:
        """The gathered `flat` is about to be dropped."""

    @abstractmethod
    def forget(self) -> None:
        """The shards have changed, or a gather was not for all ranks: for all ranks between two gathers."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that are kept between gathers."""


@torch.no_grad()
def exchange_maxima(
    collectives: Collectives, waiting: Sequence[tuple[ParamSender, Tensor]]
) -> None:
    """Give senders the maxima that they need, in one message. For all ranks.

    waiting: senders that need some, with their shards. Sends: 4 bytes for each number to each rank.
    """
    if not waiting:
        return
    own = torch.cat([sender.maxima(shard) for sender, shard in waiting])
    table = collectives.gather_small(own, what="maxima of weights").view(collectives.world_size, -1)
    found = torch.split(table.amax(0), [sender.num_maxima for sender, _ in waiting])
    for (sender, _), maxima in zip(waiting, found, strict=True):
        sender.take_maxima(maxima)


@final
class ExactSender(ParamSender):
    """Sends the values themselves: (world_size - 1) shards per rank, in the parameters' dtype."""

    keeps_master = False
    sends_differences = False
    rounds = False
    held_bytes = 0

    def __init__(self, collectives: Collectives, buffer: int) -> None:
        """buffer: the number of the flat buffer."""
        self._collectives = collectives
        self._buffer = buffer

    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        return self._collectives.all_gather(flat, shard, buffer=self._buffer, kind="all_gather")

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        raise AssertionError("exact values are gathered")

    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        shard[start:stop].copy_(self._collectives.shard_of(flat)[start:stop])

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        return


# -- how the gradient of a flat buffer is reduced over the ranks, chosen once; exact by default ----------
#     gradients of this rank [world_size * n] --reduce--> total [n] --gather (stage 0)--> sums [world_size * n]
#
# A reducer belongs to one flat buffer: it may keep what it has not sent yet.


@final
class PendingError(NamedTuple):
    """What a rank has not sent of a flat buffer.

    error: [world_size * n] fp32, of its own gradients. server: [n] fp32, of its part of the sums; or None.
    unit: what the values are multiplied with to be mean gradients of the loss. steps: since they were 0, if
    that counts. holds_momentum: `error` also has b / (1 - b) times the momentum.
    """

    error: Tensor
    server: Tensor | None
    unit: float
    steps: int = 0
    holds_momentum: bool = False


class GradientReducer(ABC):
    """Reduces the gradients of all ranks to this rank's shard of their sum, and gathers the sums."""

    @property
    @abstractmethod
    def is_lossy(self) -> bool:
        """What is sent now is not exact; the rest is kept, and sent later."""

    @abstractmethod
    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        """Start to set `out` to this rank's shard of the sum of `flat` over ranks, or to add it (`add`).

        Shapes:  flat [world_size * n], out [n]. `flat` must not be written before the handle's wait.
        """

    @abstractmethod
    def cross_replicas(self, total: Tensor) -> Handle | None:
        """Start to add to `total` [n] what `reduce` has left out: once, after the last `reduce` of a step.

        None: nothing has started; `total` is the sum over all ranks. More gradients may still be reduced, and
        are completed by another call.
        """

    @abstractmethod
    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        """Start `reduce` to `out`, and `gather` of `out` to `flat`, which begins when that is done.

        Shapes:  flat [world_size * n], out [n]: this rank's part of `flat`, or wider.
        None: nothing has started; a gather that is started later is as fast.
        """

    @abstractmethod
    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        """Start to fill `flat` [world_size * n] with the `total` [n] of every rank.

        `total` may be this rank's part of `flat`. Neither may be written before the handle's wait.
        """

    @abstractmethod
    def keep(self, flat: Tensor) -> None:
        """Keep the gradients `flat` of a micro-batch for the next `reduce`. Only where `is_lossy`."""

    @abstractmethod
    def undo(self) -> None:
        """The step is skipped: what this rank has sent in it is added to the pending error."""

    @abstractmethod
    def end_step(self) -> None:
        """The step is done, or skipped."""

    @property
    @abstractmethod
    def has_pending_error(self) -> bool:
        """Messages are lossy, now or later."""

    @property
    @abstractmethod
    def pending_error(self) -> PendingError | None:
        """What was not sent; None: nothing."""

    @abstractmethod
    def restore(self, pending: PendingError | None) -> None:
        """Replace what was not sent. For all ranks, which have all something or nothing."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that are kept between steps."""


@final
class ExactReducer(GradientReducer):
    """The exact sum in rank order. Sends (world_size - 1) / world_size of `flat`'s bytes per rank."""

    is_lossy = False
    has_pending_error = False
    pending_error = None
    held_bytes = 0

    def __init__(self, collectives: Collectives, buffer: int, num_copies: int = 1) -> None:
        """
        Args:
            buffer: the number of the flat buffer.
            num_copies: so many ranks compute the same gradient, which counts once.
        """
        self._collectives = collectives
        self._buffer = buffer
        self._num_copies = num_copies

    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        self._divide(flat)
        return self._collectives.reduce_scatter(
            flat, out, add=add, buffer=self._buffer, kind="reduce_scatter"
        )

    def cross_replicas(self, total: Tensor) -> Handle | None:
        return None

    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        if not self._collectives.sums_whole(flat, out):
            return None
        self._divide(flat)
        kinds = ("reduce_scatter", "all_gather")
        return self._collectives.sum_whole(flat, out, buffer=self._buffer, kinds=kinds)

    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        own = self._collectives.shard_of(flat)
        if own.data_ptr() != total.data_ptr():
            own.copy_(total)
        return self._collectives.all_gather(flat, own, buffer=self._buffer, kind="all_gather")

    def keep(self, flat: Tensor) -> None:
        raise AssertionError("exact sums keep nothing")

    def undo(self) -> None:
        return

    def restore(self, pending: PendingError | None) -> None:
        return

    def end_step(self) -> None:
        return

    def _divide(self, flat: Tensor) -> None:
        if self._num_copies > 1:
            flat.div_(self._num_copies)


@final
@dataclass(frozen=True)
class Buffer:
    """One flat buffer: its number, its elements on all ranks together, and [start, stop) of its gaps.

    dtype: of the parameters. is_sharded: each rank updates a shard of it; else all of it.
    is_gathered: its parameters are dropped and gathered (stage 3). trains: they are not frozen.
    cast: the dtype in which their only readers compute; None: their own. slots: [start, stop) of each.
    """

    index: int
    numel: int
    gaps: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    is_sharded: bool
    is_gathered: bool = False
    trains: bool = True
    cast: torch.dtype | None = None
    slots: tuple[tuple[int, int], ...] = ()


class CommScheme(ABC):
    """Builds what sends the gradients and the parameters of each flat buffer of a group."""

    @abstractmethod
    def reducer(self, buffer: Buffer) -> GradientReducer:
        """What reduces the gradients of `buffer`."""

    @abstractmethod
    def sender(self, buffer: Buffer) -> ParamSender:
        """What sends the parameters of `buffer`."""


class BuildScheme(Protocol):
    """Makes the scheme of a group.

    num_copies: so many of its ranks compute the same gradient. split: opens blocks of its ranks; None: the
    group has no blocks. For all ranks.
    """

    def __call__(
        self, collectives: Collectives, num_copies: int = 1, split: Split | None = None
    ) -> CommScheme: ...


@final
class ExactScheme(CommScheme):
    """Exact sums and values."""

    def __init__(
        self, collectives: Collectives, num_copies: int = 1, split: Split | None = None
    ) -> None:
        """num_copies: so many ranks compute the same gradient, which counts once. split: not needed."""
        self._collectives = collectives
        self._num_copies = num_copies

    def reducer(self, buffer: Buffer) -> GradientReducer:
        return ExactReducer(self._collectives, buffer.index, self._num_copies)

    def sender(self, buffer: Buffer) -> ParamSender:
        return ExactSender(self._collectives, buffer.index)


__all__ = [
    "Buffer",
    "BuildScheme",
    "CommScheme",
    "ExactReducer",
    "ExactScheme",
    "ExactSender",
    "GradientReducer",
    "ParamSender",
    "exchange_maxima",
]
