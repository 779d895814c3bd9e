"""Backends made of messages between pairs of ranks: gloo for CPUs, and for several ranks on one GPU.

    reduce_scatter   each rank sends each other rank its part, and adds what it receives, in rank order
    all_gather       each rank sends its shard to each other rank

gloo's own reduce_scatter is an all_reduce of everything, and its all_gather copies twice: both take three to
four times as long. Its sums depend on the position of an element, and these do not. So stages and bucket
sizes have equal bits. A message carries the number of its buffer as tag, so two ranks may start operations in
different orders.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from ..device import device_of
from ..flat import sum_in_order
from ..pool import BufferPool
from .backend import ACCESS_BUFFER, ACTIVATION_BUFFER, Backend, Bounds, Member, state_of
from .handles import Handle, InFlight, Lost, Messages, Works
from .threads import light_thread

TAG_BASE = 0x5D000  # above the small tags that a script's own send and recv are likely to use
TAGS_PER_BUFFER = 2
TAGS_PER_ENGINE = 1 << 16
MESSAGE_TAG = 1 << 14  # of an engine, above those of its flat buffers
SMALL_TAGS = 1 << 14  # the last tags of an engine, for small operations, by their size
WHOLE_BYTES = 1 << 18  # up to it, one round of whole buffers is faster than two rounds of halves


class PointToPointBackend(Backend):
    """Operations made of messages between all pairs of ranks. A subclass carries the messages."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._scratch = BufferPool()
        self._tag_base = TAG_BASE + TAGS_PER_ENGINE * member.engine
        # every rank starts with the next rank, so that no rank is the first target of all others
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @abstractmethod
    def _transfer(
        self,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        """Start to receive and send. A received message must fit its tensor exactly.

        finish: Is called once in the handle's wait, after all that is received.
        """

    def _exchange(self, tag: int, receives: Messages, sends: Messages) -> None:
        """Receive and send, and wait for both."""
        self._transfer(tag, receives, sends).wait()

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.allocated_bytes

    def free_scratch(self) -> None:
        self._scratch.clear()

    # -- tags -----------------------------------------------------------------------------------------------

    def _tag(self, buffer: int) -> int:
        return self._tag_base + TAGS_PER_BUFFER * buffer

    def _small_tag(self, buffer: int, values: Tensor) -> int:
        """A tag for messages of this size, because gloo aborts the process when the received size differs."""
        distinct = 4 * values.numel() * values.element_size() - buffer
        return self._tag_base + TAGS_PER_ENGINE - SMALL_TAGS + distinct % SMALL_TAGS

    @property
    def _message_tag(self) -> int:
        """The tag of all messages of `send`, which arrive in order."""
        return self._tag_base + MESSAGE_TAG

    # -- flat buffers ---------------------------------------------------------------------------------------

    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle:
        return self._all_gather(flat, shard, self._tag(buffer))

    def _all_gather(self, flat: Tensor, shard: Tensor, tag: int) -> Handle:
        receives = [(peer, self.shard_of(flat, peer)) for peer in self._peers]
        handle = self._transfer(tag, receives, [(peer, shard) for peer in self._peers])
        if flat.data_ptr() + self.rank * shard.nbytes != shard.data_ptr():
            self.shard_of(flat).copy_(shard)
        return handle

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        parts = {self.rank: self.shard_of(flat)}
        for peer in self._peers:
            parts[peer] = self._scratch.take(out.numel(), flat.dtype, flat.device)

        def finish() -> None:
            sum_in_order(out, [parts[rank] for rank in range(self.world_size)], add=add)
            for peer in self._peers:
                self._scratch.give(parts[peer])

        receives = [(peer, parts[peer]) for peer in self._peers]
        sends = [(peer, self.shard_of(flat, peer)) for peer in self._peers]
        return self._transfer(self._tag(buffer) + 1, receives, sends, finish)

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], buffer: int
    ) -> None:
        receives = []
        if flat is not None:
            receives = [(peer, self.shard_of(flat, peer)) for peer in self._peers]
            self.shard_of(flat).copy_(shard)
        sends = [(peer, shard) for peer in receivers if peer != self.rank]
        self._transfer(self._tag(buffer), receives, sends).wait()

    # -- sums of all elements on all ranks ------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle:
        flat = tensor.view(-1)
        tag = self._small_tag(buffer, flat) if buffer < 0 else self._tag(buffer) + 1
        if self._adds_whole(flat):
            return self._sum_whole(flat, tag)
        return self._reduce_parts(flat, tag)

    def _adds_whole(self, flat: Tensor) -> bool:
        """Whether each rank adds all elements in `all_reduce`, in one round instead of two."""
        return self.world_size == 2  # one exchange of everything sends as much as two of halves

    def sums_whole(self, flat: Tensor, out: Tensor) -> bool:
        # to add all elements instead of half of them takes less than a message, up to this size
        return flat.dtype == out.dtype and self._is_small(flat)

    def _is_small(self, flat: Tensor) -> bool:
        return self.world_size == 2 and flat.nbytes <= WHOLE_BYTES

    def sum_whole(self, flat: Tensor, out: Tensor, buffer: int) -> Sequence[Handle]:
        return (self._sum_whole(flat, self._tag(buffer) + 1),)

    def _sum_whole(self, flat: Tensor, tag: int) -> Handle:
        """Exchange whole tensors with the other one of two ranks."""
        other = self._scratch.take(flat.numel(), flat.dtype, flat.device)
        peer = self._peers[0]
        finish = partial(self._add_of_peer, flat, other)
        return self._transfer(tag, [(peer, other)], [(peer, flat)], finish)

    def _add_of_peer(self, flat: Tensor, other: Tensor) -> None:
        parts = [flat, other] if self.rank == 0 else [other, flat]
        sum_in_order(flat, parts, add=False)
        self._scratch.give(other)

    def sum(self, tensor: Tensor) -> None:
        if self.world_size > 2:
            super().sum(tensor)
            return
        flat, peer = tensor.view(-1), self._peers[0]
        other = self._scratch.take(flat.numel(), flat.dtype, flat.device)
        tag = self._small_tag(ACTIVATION_BUFFER, flat)
        self._exchange(tag, [(peer, other)], [(peer, flat)])
        self._add_of_peer(flat, other)

    def _reduce_parts(self, flat: Tensor, tag: int) -> Handle:
        """Add this rank's part, then send the sum to all ranks."""
        flat_parts = self._parts_of(flat)
        own_part = flat_parts[self.rank]
        parts = {self.rank: own_part}
        for peer in self._peers:
            parts[peer] = self._scratch.take(own_part.numel(), flat.dtype, flat.device)
        receives = [(peer, parts[peer]) for peer in self._peers if own_part.numel()]
        sends = [(peer, flat_parts[peer]) for peer in self._peers if flat_parts[peer].numel()]

        def finish() -> None:
            sum_in_order(own_part, [parts[rank] for rank in range(self.world_size)], add=False)
            for peer in self._peers:
                self._scratch.give(parts[peer])
            self._send_sums(flat_parts, tag)

        return self._transfer(tag, receives, sends, finish)

    def _send_sums(self, flat_parts: Sequence[Tensor], tag: int) -> None:
        """Send this rank's part to all ranks, and receive theirs."""
        own_part = flat_parts[self.rank]
        receives = [(peer, flat_parts[peer]) for peer in self._peers if flat_parts[peer].numel()]
        sends = [(peer, own_part) for peer in self._peers if own_part.numel()]
        self._transfer(tag, receives, sends).wait()

    def _parts_of(self, flat: Tensor) -> list[Tensor]:
        ends = [flat.numel() * rank // self.world_size for rank in range(self.world_size + 1)]
        return [flat[start:stop] for start, stop in pairwise(ends)]

    # -- tensors of ranks -----------------------------------------------------------------------------------

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int) -> Handle:
        outs[self.rank].copy_(parts[self.rank])
        receives = [(peer, outs[peer]) for peer in self._peers if outs[peer].numel()]
        sends = [(peer, parts[peer]) for peer in self._peers if parts[peer].numel()]
        return self._transfer(self._tag(buffer) + (buffer >= 0), receives, sends)

    def collect(self, out: Tensor | None, mine: Tensor, bounds: Bounds, target: int | None) -> None:
        receives = []
        for peer in self._peers if target in (None, self.rank) else []:
            start, stop = bounds[peer]
            if stop > start:
                assert out is not None
                receives.append((peer, out[start:stop]))
        receivers = self._peers if target is None else [target]
        sends = [(peer, mine) for peer in receivers if peer != self.rank and mine.numel()]
        handle = self._transfer(self._tag(ACCESS_BUFFER), receives, sends)
        if out is not None:
            out[slice(*bounds[self.rank])] = mine
        handle.wait()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, source: int) -> None:
        receives, sends = [], []
        if self.rank == source:
            assert full is not None
            parts = [(peer, full[slice(*bounds[peer])]) for peer in self._peers]
            sends = [(peer, part) for peer, part in parts if part.numel()]
            out.copy_(full[slice(*bounds[self.rank])])
        elif out.numel():
            receives = [(source, out)]
        self._transfer(self._tag(ACCESS_BUFFER) + 1, receives, sends).wait()

    def gather_small(self, values: Tensor, buffer: int) -> Tensor:
        table, tag = self._table_of(values, buffer)
        own_row = table[self.rank]
        receives = [(peer, table[peer]) for peer in self._peers]
        self._exchange(tag, receives, [(peer, own_row) for peer in self._peers])
        return table

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        table, tag = self._table_of(values, buffer)
        flat = table.view(-1)
        return table, self._all_gather(flat, self.shard_of(flat), tag)

    def _table_of(self, values: Tensor, buffer: int) -> tuple[Tensor, int]:
        """The table of a small gather with this rank's `values`, and its tag."""
        table = values.new_empty(self.world_size, values.numel())
        table[self.rank] = values
        return table, self._small_tag(buffer, values)

    def send(self, tensor: Tensor, peer: int) -> Handle:
        return self._transfer(self._message_tag, [], [(peer, tensor)])

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        return self._transfer(self._message_tag, [(peer, tensor)], [])


# -- messages of gloo ---------------------------------------------------------------------------------------


def post(of: Backend, works: Works, tag: int, receives: Messages, sends: Messages) -> None:
    """Start messages of gloo in the group of `of`, and add their works to `works`. Raises `Lost`."""
    assert of.group is not None
    for start, messages in ((of.group.recv, receives), (of.group.send, sends)):
        for peer, tensor in messages:
            try:
                works.append((of.ranks[peer], start([tensor], peer, tag)))
            except RuntimeError as error:
                raise Lost(str(error), of.ranks[peer]) from error


def transfer(
    of: Backend,
    tag: int,
    receives: Messages,
    sends: Messages,
    finish: Callable[[], None] | None,
) -> Handle:
    """Start messages of gloo, as `PointToPointBackend._transfer`. Raises `Lost`."""
    assert of.group is not None
    works: Works = []
    post(of, works, tag, receives, sends)
    state = state_of(of.group)
    return InFlight(works, finish, state.dropped, state.timeout)


def close_connections(of: Backend, peers: Sequence[int]) -> None:
    """Close those of gloo to `peers`, which fails their waits. A receive that is out of time closes one."""
    assert of.group is not None
    for peer in peers:
        with suppress(RuntimeError):
            work = of.group.recv([torch.empty(1, dtype=torch.uint8)], peer, TAG_BASE - 1)
            work.wait(timedelta(milliseconds=1))


@final
class GlooBackend(PointToPointBackend):
    """Messages that gloo sends between CPU ranks."""

    def leave(self) -> None:
        close_connections(self, self._peers)

    def _transfer(
        self,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        return transfer(self, tag, receives, sends, finish)

    def _exchange(self, tag: int, receives: Messages, sends: Messages) -> None:
        """The light thread sends and receives, so that the caller sleeps once."""
        light_thread.run(lambda: self._transfer(tag, receives, sends).wait())


@final
class StagedGlooBackend(PointToPointBackend):
    """Messages that gloo sends between ranks on other devices. gloo reads and writes host memory only.

    sender      device ── copy ──> host   the call returns when the copy is complete
    receiver    host ── copy ──> device   `wait` starts the copy on its current stream

    The host memory is page-locked, where the device reads that faster. torch keeps it for later messages once
    the copies out of it are complete.
    """

    def leave(self) -> None:
        close_connections(self, self._peers)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source: int) -> None:
        host = tensor.cpu()
        super().broadcast(host, source)
        if self.rank != source:
            tensor.copy_(host)

    @torch.no_grad()
    def _transfer(
        self,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        arriving = [(peer, _on_host(target)) for peer, target in receives]
        sources = {id(tensor): tensor for _, tensor in sends}  # one copy for all receivers
        copies = {
            key: _on_host(tensor).copy_(tensor, non_blocking=True)
            for key, tensor in sources.items()
        }
        started = device_of(self.device).event()
        if copies:
            started.synchronize()  # gloo's thread reads the copies at once

        @torch.no_grad()
        def arrive() -> None:
            # the stream of the start may still use the targets
            started.wait()
            for (_, target), (_, host) in zip(receives, arriving, strict=True):
                target.copy_(host, non_blocking=True)
            if finish is not None:
                finish()

        leaving = [(peer, copies[id(tensor)]) for peer, tensor in sends]
        return transfer(self, tag, arriving, leaving, arrive)


def _on_host(tensor: Tensor) -> Tensor:
    """Host memory of the same shape and dtype, undefined; page-locked where the device reads that faster."""
    pins = device_of(tensor.device).pins_memory
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)


__all__ = [
    "TAG_BASE",
    "GlooBackend",
    "PointToPointBackend",
    "StagedGlooBackend",
    "post",
    "transfer",
]
