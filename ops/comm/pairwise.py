"""Collectives made of messages between pairs of ranks, whatever carries the messages.

Sums run in rank order on the receiver, so a result does not depend on the position of an element.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import sum_in_order
from ..watch import Mark
from .collectives import (
    ACCESS_BUFFER,
    ACTIVATION_BUFFER,
    CONTROL_BUFFER,
    MESSAGE_BUFFER,
    SMALL_TAGS,
    TAG_BASE,
    TAGS_PER_BUFFER,
    TAGS_PER_INSTANCE,
    Bounds,
    Collectives,
    PartOf,
)
from .handles import Done, Handle
from .memory.operations import Messages
from .pool import BufferPool

MESSAGE_TAG, MESSAGE_TAGS = 1 << 14, 1 << 15  # the first tag of messages, and how many there are

WHOLE_BYTES = 1 << 18  # up to it, one round of whole buffers is faster than two rounds of halves


class Pairwise(Collectives):
    """Collectives made of messages between all pairs of ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        part_of: PartOf | None = None,
        successor_of: Collectives | None = None,
    ) -> None:
        super().__init__(group, device, group.rank(), group.size(), part_of, successor_of)
        self._scratch = BufferPool()
        self._tag_base = TAG_BASE + TAGS_PER_INSTANCE * self.instance
        # every rank starts with the next rank, so that no rank is the first target of all others
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.allocated_bytes

    def free_scratch(self) -> None:
        self._scratch.clear()

    def _tag(self, buffer: int) -> int:
        return self._tag_base + TAGS_PER_BUFFER * buffer

    def _small_tag(self, buffer: int, values: Tensor) -> int:
        """The tag for messages of this size: gloo aborts the process when the received size differs."""
        distinct = 4 * values.numel() * values.element_size() - buffer
        return self._tag_base + TAGS_PER_INSTANCE - SMALL_TAGS + distinct % SMALL_TAGS

    @abstractmethod
    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        """Start to receive and send. A received message must fit its tensor exactly.

        finish: called once in the handle's wait, with all that is received.
        """

    def _exchange(self, mark: Mark, tag: int, receives: Messages, sends: Messages) -> None:
        """As `_transfer` and a wait."""
        self._transfer(mark, tag, receives, sends).wait()

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        mark = self._record("all_gather", kind, buffer, tensor=shard)
        return self._all_gather(mark, flat, shard, self._tag(buffer), kind)

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, tag: int, kind: str) -> Handle:
        own = self.shard_of(flat)
        handle = self._transfer(
            mark,
            tag,
            [(peer, self.shard_of(flat, peer)) for peer in self._peers],
            [(peer, shard) for peer in self._peers],
        )
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        self._count(kind, shard)
        return handle

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        mark = self._record("reduce_scatter", kind, buffer, tensor=flat)
        return self._reduce_scatter(mark, flat, out, add, self._tag(buffer) + 1, kind)

    def _reduce_scatter(
        self, mark: Mark, flat: Tensor, out: Tensor, add: bool, tag: int, kind: str
    ) -> Handle:
        self._count(kind, self.shard_of(flat))
        parts = {self.rank: self.shard_of(flat)}
        for peer in self._peers:
            parts[peer] = self._scratch.take(out.numel(), flat.dtype, flat.device)

        def finish() -> None:
            sum_in_order(out, [parts[rank] for rank in range(self.world_size)], add=add)
            for peer in self._peers:
                self._scratch.give(parts[peer])

        return self._transfer(
            mark,
            tag,
            [(peer, parts[peer]) for peer in self._peers],
            [(peer, self.shard_of(flat, peer)) for peer in self._peers],
            finish,
        )

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        name = "all_gather" if target is None else "gather"
        mark = self._record(name, "access", ACCESS_BUFFER, tensor=mine)
        self._of_size(mark, bounds[-1][1])
        receives = []
        for peer in self._peers if target in (None, self.rank) else []:
            start, stop = bounds[peer]
            if stop > start:
                assert out is not None
                receives.append((peer, out[start:stop]))
        receivers = self._peers if target is None else [target]
        sends = [(peer, mine) for peer in receivers if peer != self.rank and mine.numel()]
        handle = self._transfer(mark, self._tag(ACCESS_BUFFER), receives, sends)
        for peer, part in sends:
            self._count_parts("access", part, peer)
        if out is not None:
            out[slice(*bounds[self.rank])] = mine
        handle.wait()

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        mark = self._record("all_gather", "all_gather", buffer, tensor=shard)
        receives = []
        if flat is not None:
            receives = [(peer, self.shard_of(flat, peer)) for peer in self._peers]
            self.shard_of(flat).copy_(shard)
        sends = [(peer, shard) for peer in receivers if peer != self.rank]
        handle = self._transfer(mark, self._tag(buffer), receives, sends)
        for peer, part in sends:
            self._count_parts("all_gather", part, peer)
        handle.wait()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        mark = self._record("scatter", "access", ACCESS_BUFFER, tensor=out)
        self._of_size(mark, bounds[-1][1])
        receives, sends = [], []
        if self.rank == source:
            assert full is not None
            parts = [(peer, full[slice(*bounds[peer])]) for peer in self._peers]
            sends = [(peer, part) for peer, part in parts if part.numel()]
            out.copy_(full[slice(*bounds[self.rank])])
        elif out.numel():
            receives = [(source, out)]
        handle = self._transfer(mark, self._tag(ACCESS_BUFFER) + 1, receives, sends)
        for peer, part in sends:
            self._count_parts("access", part, peer)
        handle.wait()

    def all_reduce(
        self, tensor: Tensor, *, what: str, kind: str, buffer: int = ACTIVATION_BUFFER
    ) -> Handle:
        mark = self._record("all_reduce", kind, buffer, what, tensor)
        self._count_all_reduce(kind, tensor)
        flat = tensor.view(-1)
        tag = self._small_tag(buffer, flat) if buffer < 0 else self._tag(buffer) + 1
        if self._adds_whole(flat):
            return self._sum_whole(mark, flat, tag)
        return self._reduce_parts(mark, flat, tag)

    def _adds_whole(self, flat: Tensor) -> bool:
        """In `all_reduce` each rank adds all elements: one round instead of two."""
        return self.world_size == 2  # one exchange of everything sends as much as two of halves

    def sums_whole(self, flat: Tensor, out: Tensor) -> bool:
        # each rank adds all elements instead of half of them: less than a message costs, up to this size
        return flat.dtype == out.dtype and self._is_small(flat)

    def _is_small(self, flat: Tensor) -> bool:
        return self.world_size == 2 and flat.nbytes <= WHOLE_BYTES

    def sum_whole(
        self, flat: Tensor, out: Tensor, *, buffer: int, kinds: tuple[str, str]
    ) -> tuple[Handle, Handle]:
        mark = self._record("all_reduce", kinds[0], buffer, tensor=flat)
        for kind in kinds:
            self._count(kind, self.shard_of(flat))
        return self._sum_whole(mark, flat, self._tag(buffer) + 1), Done()

    def sum(self, tensor: Tensor, *, what: str, kind: str) -> None:
        if self.world_size > 2:
            self.all_reduce(tensor, what=what, kind=kind).wait()
            return
        mark = self._record("all_reduce", kind, ACTIVATION_BUFFER, what, tensor)
        self._count_all_reduce(kind, tensor)
        flat = tensor.view(-1)
        other = self._scratch.take(flat.numel(), flat.dtype, flat.device)
        tag = self._small_tag(ACTIVATION_BUFFER, flat)
        peer = self._peers[0]
        self._exchange(mark, tag, [(peer, other)], [(peer, flat)])
        self._add_of_peer(flat, other)

    def _add_of_peer(self, flat: Tensor, other: Tensor) -> None:
        parts = [flat, other] if self.rank == 0 else [other, flat]
        sum_in_order(flat, parts, add=False)
        self._scratch.give(other)

    def _sum_whole(self, mark: Mark, flat: Tensor, tag: int) -> Handle:
        other = self._scratch.take(flat.numel(), flat.dtype, flat.device)
        peer = self._peers[0]
        finish = partial(self._add_of_peer, flat, other)
        return self._transfer(mark, tag, [(peer, other)], [(peer, flat)], finish)

    def _reduce_parts(self, mark: Mark, flat: Tensor, tag: int) -> Handle:
        """Every rank sums its part, then sends the sum to all."""
        of = self._parts_of(flat)
        own = of[self.rank]
        parts = {self.rank: own}
        for peer in self._peers:
            parts[peer] = self._scratch.take(own.numel(), flat.dtype, flat.device)
        receives = [(peer, parts[peer]) for peer in self._peers if own.numel()]
        sends = [(peer, of[peer]) for peer in self._peers if of[peer].numel()]

        def finish() -> None:
            sum_in_order(own, [parts[rank] for rank in range(self.world_size)], add=False)
            for peer in self._peers:
                self._scratch.give(parts[peer])
            self._send_sums(mark, tag, of)

        return self._transfer(mark, tag, receives, sends, finish)

    def _send_sums(self, mark: Mark, tag: int, of: Sequence[Tensor]) -> None:
        """Send this rank's part to all, and receive theirs."""
        own = of[self.rank]
        receives = [(peer, of[peer]) for peer in self._peers if of[peer].numel()]
        sends = [(peer, own) for peer in self._peers if own.numel()]
        self._transfer(mark, tag, receives, sends).wait()

    def _parts_of(self, flat: Tensor) -> list[Tensor]:
        ends = [flat.numel() * rank // self.world_size for rank in range(self.world_size + 1)]
        return [flat[start:stop] for start, stop in pairwise(ends)]

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        what: str,
        kind: str,
        buffer: int = ACTIVATION_BUFFER,
    ) -> Handle:
        mark = self._record("all_to_all", kind, buffer, what, parts[self.rank])
        self._of_parts(mark, parts)
        outs[self.rank].copy_(parts[self.rank])
        receives = [(peer, outs[peer]) for peer in self._peers if outs[peer].numel()]
        sends = [(peer, parts[peer]) for peer in self._peers if parts[peer].numel()]
        for peer, part in sends:
            self._count_parts(kind, part, peer)
        tag = self._tag(buffer) + (buffer >= 0)
        return self._transfer(mark, tag, receives, sends)

    def send(self, tensor: Tensor, peer: int, *, number: int, what: str, kind: str) -> Handle:
        mark = self._record("send", "send", MESSAGE_BUFFER, what, tensor, peer=peer)
        self._count_parts(kind, tensor, peer)
        return self._transfer(mark, self._message_tag(number), [], [(peer, tensor)])

    def receive(self, tensor: Tensor, peer: int, *, number: int, what: str) -> Handle:
        mark = self._record("receive", "receive", MESSAGE_BUFFER, what, tensor, peer=peer)
        return self._transfer(mark, self._message_tag(number), [(peer, tensor)], [])

    def _message_tag(self, number: int) -> int:
        """A tag apart from those of flat buffers; messages whose numbers share one arrive in order."""
        return self._tag_base + MESSAGE_TAG + number % MESSAGE_TAGS

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        mark, table, tag = self._table_of(values, buffer, what)
        own = table[self.rank]
        self._exchange(
            mark, tag, [(p, table[p]) for p in self._peers], [(p, own) for p in self._peers]
        )
        self._count("control", own)
        return table

    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        mark, table, tag = self._table_of(values, buffer, what)
        flat = table.view(-1)
        return table, self._all_gather(mark, flat, self.shard_of(flat), tag, "control")

    def _table_of(self, values: Tensor, buffer: int, what: str) -> tuple[Mark, Tensor, int]:
        """Of a small gather: its mark, the table with own `values`, its tag."""
        kind = "access" if buffer == ACCESS_BUFFER else "exchange"
        mark = self._record("all_gather", kind, buffer, what, values)
        table = values.new_empty(self.world_size, values.numel())
        table[self.rank] = values
        return mark, table, self._small_tag(buffer, values)
