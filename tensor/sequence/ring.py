"""A ring of ranks with the same heads: each has a block of tokens, and keys and values go around.

In step s a rank sends its keys and values to the rank s places on, and attends to those from s places before.
In backward they go around again, and the gradients of a block return to its owner. A block that no query of a
rank sees is not sent to it. The keys and values of the next step travel while a rank attends to those it has.

    a rank keeps         own block, and two others
    sends in forward     own keys and values, to each rank that sees them
    sends in backward    the same again, and the gradients of the blocks that it got

Source: Liu et al., Ring Attention with Blockwise Transformers, 2023. There a block is handed from neighbour to
neighbour; here it comes from its owner, so that nothing is copied on the way. The bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from .blocks import NONE, Visibility, attend, gradients, merge, wide
from .layout import Layout
from .shares import Range

KIND = "sequence ring"
ROWS = 512  # queries whose scores are in memory at a time
Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients
Part = tuple[slice, slice, Tensor | None]  # rows of own tensors, columns of keys, and the mask


@final
@dataclass(frozen=True, eq=False)
class Ring:
    """The attention of one layer over the blocks of all ranks.

    layout: of this rank in `group`. dtype: what is sent; None: the dtype of the tensor.
    scale: the factor of scores.
    """

    group: Collectives
    layout: Layout
    seen: Visibility
    scale: float
    dtype: torch.dtype | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, n, D] queries, [B, K, n, D] keys and values of own tokens -> [B, H, n, D]. For all ranks."""
        output: Tensor = _Ring.apply(query, key, value, self)  # type: ignore[no-untyped-call]
        return output

    @property
    def queries(self) -> Range:
        """The tokens of this rank."""
        return self.layout.blocks[self.layout.own]

    @property
    def distances(self) -> list[int]:
        """How far keys are sent, in the order of the steps. Equal on all ranks."""
        count = len(self.layout.blocks)
        return [s for s in range(1, count) if any(self._sees(b, b - s) for b in range(s, count))]

    def _sees(self, block: int, other: int) -> bool:
        """Whether the owner of `block` needs the keys of block `other`; False: there is no such block."""
        blocks = self.layout.blocks
        if not (0 <= block < len(blocks) and 0 <= other < len(blocks)):
            return False
        first, end = self.seen.keys(blocks[block], blocks[other])
        return first < end

    def visits(self, keys: Pair) -> Iterator[tuple[int, Pair | None]]:
        """Each distance and the keys and values from there, own ones first; None: not seen by this rank."""
        packed, place, distances = pack(*keys, self.dtype), self.layout.own, self.distances
        started = [self._start(packed, keys, distance) for distance in distances[:1]]
        yield 0, keys
        for step, distance in enumerate(distances):
            received, handle = started.pop()
            handle.wait()
            for following in distances[step + 1 : step + 2]:
                started.append(self._start(packed, keys, following))
            is_seen = self._sees(place, place - distance)
            yield (
                distance,
                (unpack(received, keys, self._length(place - distance)) if is_seen else None),
            )

    def _length(self, block: int) -> int:
        first, end = self.layout.blocks[block]
        return end - first

    def _start(self, packed: Tensor, like: Pair, distance: int) -> tuple[Tensor, Handle]:
        """Send own keys `distance` places on, and receive those from as far before."""
        place = self.layout.own
        numel = 0
        if self._sees(place, place - distance):
            numel = _numel(like, self._length(place - distance))
        sent = packed if self._sees(place + distance, place) else packed[:0]
        return self._exchange(sent, place + distance, place - distance, numel, "keys of attention")

    def return_gradients(self, grads: Pair | None, sums: Pair, like: Pair, distance: int) -> None:
        """Send gradients of keys back to their owner, and add those of own keys to `sums`.

        grads: None where this rank did not see these keys. like: own keys and values.
        """
        place = self.layout.own
        dtype = self.dtype or like[0].dtype
        sent = like[0].new_empty(0, dtype=dtype) if grads is None else pack(*grads, dtype)
        numel = _numel(like, self._length(place)) if self._sees(place + distance, place) else 0
        to, source = place - distance, place + distance
        received, handle = self._exchange(sent, to, source, numel, "gradients of keys")
        handle.wait()
        if numel:
            for total, part in zip(sums, unpack(received, sums, self._length(place)), strict=True):
                total += part

    def _exchange(
        self, sent: Tensor, to: int, source: int, numel: int, what: str
    ) -> tuple[Tensor, Handle]:
        """One message to a block and one from another, of `numel` elements. Empty ones are not sent."""
        parts = [sent.new_empty(0) for _ in range(self.group.world_size)]
        outs = [sent.new_empty(0) for _ in parts]
        received = sent.new_empty(numel)
        if sent.numel():
            parts[self.layout.ring[to]] = sent
        if numel:
            outs[self.layout.ring[source]] = received
        return received, self.group.all_to_all(outs, parts, what=what, kind=KIND)

    def parts(self, distance: int, device: torch.device) -> Iterator[Part]:
        """Own queries, and the keys from `distance` that they see, in parts of at most `ROWS` queries."""
        first, end = self.queries
        block = self.layout.blocks[self.layout.own - distance]
        for start in range(first, end, ROWS):
            queries = (start, min(start + ROWS, end))
            keys = self.seen.keys(queries, block)
            if keys[0] < keys[1]:
                mask = self.seen.mask(queries, keys, device)
                yield _slice(queries, first), _slice(keys, block[0]), mask


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        dtype = wide(query.dtype)
        output = query.new_zeros(*query.shape[:3], value.shape[3], dtype=dtype)
        log_sum = query.new_full((*query.shape[:3], 1), NONE, dtype=dtype)
        for distance, keys in ring.visits((key, value)):
            if keys is None:
                continue
            for rows, columns, mask in ring.parts(distance, query.device):
                tensors = _near(query, keys, rows, columns)
                partial = attend(tensors, mask, ring.scale)
                merged = merge((output[:, :, rows], log_sum[:, :, rows]), partial)
                output[:, :, rows], log_sum[:, :, rows] = merged
        output = output.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        ring: Ring = ctx.ring
        query, key, value, output, log_sum = ctx.saved_tensors
        products = (output.to(log_sum.dtype) * grad).sum(-1, keepdim=True)
        of_query, of_key, of_value = (
            torch.zeros_like(x, dtype=log_sum.dtype) for x in (query, key, value)
        )
        for distance, keys in ring.visits((key, value)):
            sums = (of_key, of_value) if distance == 0 else _zeros_like(keys, log_sum.dtype)
            for rows, columns, mask in ring.parts(distance, query.device) if sums else ():
                assert keys is not None and sums is not None
                tensors = _near(query, keys, rows, columns)
                of_rows = (grad[:, :, rows], log_sum[:, :, rows], products[:, :, rows])
                grads = gradients(tensors, *of_rows, mask, ring.scale)
                of_query[:, :, rows] += grads[0]
                for total, part in zip(sums, grads[1:], strict=True):
                    total[:, :, columns] += part
            if distance:
                ring.return_gradients(sums, (of_key, of_value), (key, value), distance)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _near(query: Tensor, keys: Pair, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
    return query[:, :, rows], keys[0][:, :, columns], keys[1][:, :, columns]


def _slice(part: Range, start: int) -> slice:
    return slice(part[0] - start, part[1] - start)


def _zeros_like(keys: Pair | None, dtype: torch.dtype) -> Pair | None:
    if keys is None:
        return None
    return torch.zeros_like(keys[0], dtype=dtype), torch.zeros_like(keys[1], dtype=dtype)


def pack(key: Tensor, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Keys and values as one flat message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)]).to(dtype or key.dtype)


def unpack(message: Tensor, like: Pair, length: int) -> Pair:
    """Keys and values of `length` tokens, of the shapes and dtypes of `like` in other dimensions."""
    shapes = [(*x.shape[:2], length, x.shape[3]) for x in like]
    sizes = [math.prod(shape) for shape in shapes]
    key, value = message[: sizes[0]], message[sizes[0] :]
    return key.view(shapes[0]).to(like[0].dtype), value.view(shapes[1]).to(like[1].dtype)


def _numel(like: Pair, length: int) -> int:
    return sum(x.shape[0] * x.shape[1] * length * x.shape[3] for x in like)


__all__ = ["Ring", "pack", "unpack"]
