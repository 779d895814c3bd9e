"""The mean of the outer gradients over the groups, by messages of 32, 8, 4 or 2 bits.

    32 bits    one sum over the groups                                2 (G - 1) / G x 4 bytes an element
    fewer      hop 1   to group g its part of my values, packed       (G - 1) / G packets
               sums in fp32
               hop 2   my part of the sums, packed, to all groups     (G - 1) / G packets

What a message loses is added to the next one: of hop 1 by the rank that lost it, of hop 2 by the group that
made the sum. All groups unpack the same packets, so they have the same bits.

Source: Thérien et al., MuLoCo, 2025, section 3, https://arxiv.org/abs/2505.23725 (error feedback for outer
gradients, two hops); Douillard et al., Streaming DiLoCo, 2025, section 2.4. Differs: blocks of 256 elements
have a magnitude of their own; in 2 bits two signs of 1024 elements: see `TwoSigns`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, final

import torch
from torch import Tensor

from ..compression.one_bit.packets import Packets
from ..compression.zeropp.packets import QuantizedPackets
from ..ops.comm.collectives import Collectives

KIND = "outer"  # of the bytes between groups
PART_NUMEL = 16  # a part of a fragment has a multiple of so many elements
EXACT_BITS = 32


class Packing(Protocol):
    """Packs ranges of one length."""

    @property
    def packet_bytes(self) -> int: ...
    def pack(self, values: Tensor, packet: Tensor, error: Tensor) -> None: ...
    def unpack_sum(self, packets: Tensor, out: Tensor) -> None: ...


@final
class TwoSigns:
    """2 bits an element: its sign times a magnitude, then the sign of what is left times another one.

    The four values of a block of 1024 elements are a + b, a - b and their negatives, where a is the mean of
    the magnitudes, and b that of what is left.
    """

    def __init__(self, numel: int) -> None:
        self._signs = Packets(numel)
        self._half = self._signs.packet_bytes
        self.packet_bytes = 2 * self._half

    def pack(self, values: Tensor, packet: Tensor, error: Tensor) -> None:
        """Write `values` + `error`, fp32 [n], to `packet`, and what is lost to `error`."""
        self._signs.pack(values, error, packet[: self._half])
        self._signs.pack(torch.zeros_like(values), error, packet[self._half :])

    def unpack_sum(self, packets: Tensor, out: Tensor) -> None:
        """Write the sum of `packets` [count, packet_bytes], in their order, to `out` [n]."""
        self._signs.unpack(packets[:, : self._half], out)
        rest = torch.empty_like(out)
        self._signs.unpack(packets[:, self._half :], rest)
        out.add_(rest)


def packing_of(numel: int, bits: int) -> Packing:
    """Of ranges of `numel` elements in 8, 4 or 2 bits."""
    return TwoSigns(numel) if bits == 2 else QuantizedPackets(numel, bits)


def padded_numel(numel: int, groups: int) -> int:
    """The elements of a fragment with the padding that gives each group a part of the same length."""
    each = groups * PART_NUMEL
    return -(-numel // each) * each


def bytes_of_mean(numel: int, groups: int, bits: int) -> int:
    """Bytes that a rank sends for one mean of a fragment of `numel` elements, padding included."""
    if bits == EXACT_BITS:
        return 2 * (groups - 1) * numel * 4 // groups
    return 2 * (groups - 1) * packing_of(numel // groups, bits).packet_bytes if numel else 0


class Mean(ABC):
    """The mean over the groups of flat values fp32 [n], n a multiple of the groups. For all groups."""

    @abstractmethod
    def of(self, values: Tensor, error: Tensor | None, share: float) -> None:
        """Overwrite `values` with the sum over the groups of `share` times them.

        error: fp32 [n], what earlier messages have lost; None where nothing is lost.
        """


@final
class ExactMean(Mean):
    """In 32 bits."""

    def __init__(self, groups: Collectives) -> None:
        self._groups = groups

    @torch.no_grad()
    def of(self, values: Tensor, error: Tensor | None, share: float) -> None:
        values.mul_(share)
        self._groups.all_reduce(values, what="the outer gradients", kind=KIND).wait()


@final
class PackedMean(Mean):
    """In 8, 4 or 2 bits."""

    def __init__(self, groups: Collectives, bits: int) -> None:
        self._groups, self._bits = groups, bits

    @torch.no_grad()
    def of(self, values: Tensor, error: Tensor | None, share: float) -> None:
        assert error is not None
        groups, count = self._groups, self._groups.world_size
        if not values.numel():
            return
        numel = values.numel() // count
        packing = packing_of(numel, self._bits)
        parts, errors = values.mul_(share).view(count, numel), error.view(count, numel)
        mine = torch.empty((count, packing.packet_bytes), dtype=torch.uint8)
        for part, lost, packet in zip(parts, errors, mine, strict=True):
            packing.pack(part, packet, lost)
        theirs = torch.empty_like(mine)
        groups.all_to_all(list(theirs), list(mine), what="the outer gradients", kind=KIND).wait()
        groups.count_exact(KIND, parts[0])
        total, lost = torch.empty(numel), torch.zeros(numel)
        packing.unpack_sum(theirs, total)
        packing.pack(total, mine[groups.rank], lost)
        errors[groups.rank].add_(lost)
        flat = theirs.view(-1)
        groups.all_gather(flat, mine[groups.rank], buffer=0, kind=KIND).wait()
        groups.count_exact(KIND, parts[0])
        for part, packet in zip(parts, theirs, strict=True):
            packing.unpack_sum(packet[None], part)


def mean_of(groups: Collectives, bits: int) -> Mean:
    """The mean over `groups`, in this many bits."""
    return ExactMean(groups) if bits == EXACT_BITS else PackedMean(groups, bits)


__all__ = ["EXACT_BITS", "Mean", "bytes_of_mean", "mean_of", "padded_numel"]
