"""Publishes updated parameters with one bit per element: the difference to the copy that all ranks hold.

    master [n] - own part of the copy --pack--> a message to all --> every rank adds it to its copy

What a message loses stays in the difference, so there is no error to keep. The copy are the parameters
that forward computes with. It is equal on all ranks, and follows the masters.

Elements that never had a gradient do not move: at the first message each rank says which ones of its part.
After a load they say it again if that has changed on some rank.

Source of the scheme: Tang et al., 1-bit Adam, 2021, algorithm 1, https://arxiv.org/abs/2102.02888, whose server
sends the momentum. Differs: the server has the variance here, and sends what it computes with both.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle, Then
from ..gaps import zero_ranges
from ..scheme import Buffer, ExactSender, ParamSender
from .packets import Packets
from .phase import Phase

KIND = "one-bit parameters"
STILL_KIND = "elements that do not move"


@final
class OneBitSender(ParamSender):
    """Exact, or one bit per element, as the optimizer says."""

    rounds = False
    held_bytes = 0

    def __init__(self, collectives: Collectives, buffer: Buffer, phase: Phase) -> None:
        self._collectives = collectives
        self._buffer = buffer
        self._phase = phase
        self._exact = ExactSender(collectives, buffer.index)
        self._packets = Packets(buffer.numel // collectives.world_size)
        self._still: Tensor | None = None  # bits, uint8 [world_size * n / 8]; None: all move
        self._own_still: Tensor | None = None  # this rank's; None: nothing was sent yet
        self._still_at = 0  # the steps that the variance had seen

    @property
    def keeps_master(self) -> bool:
        return self._buffer.is_sharded

    @property
    def sends_differences(self) -> bool:
        return self._buffer.is_sharded and self._phase.is_compressed

    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        return self._exact.gather(flat, shard)

    @torch.no_grad()
    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        self._agree_on_still(flat.device)
        world_size, rank = self._collectives.world_size, self._collectives.rank
        packets = self._packets.empty(world_size, flat.device)
        own_packet = packets[rank].clone()
        difference = self._collectives.shard_of(flat).neg().float()
        self._packets.pack(values, difference, own_packet)
        self._collectives.count_exact(KIND, self._collectives.shard_of(flat))
        handle = self._collectives.all_gather(
            packets.view(-1), own_packet, buffer=self._buffer.index, kind=KIND
        )
        return Then(handle, lambda: self._apply(packets, flat), kept=own_packet)

    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        self._exact.take_written(flat, shard, start, stop)

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        return

    @torch.no_grad()
    def _apply(self, packets: Tensor, flat: Tensor) -> None:
        numel = self._buffer.numel // self._collectives.world_size
        change = torch.empty(numel, dtype=torch.float32, device=flat.device)
        for rank, packet in enumerate(packets):
            self._packets.unpack(packet[None], change)
            if self._still is not None:
                change.masked_fill_(_bools(self._collectives.shard_of(self._still, rank)), 0.0)
            self._collectives.shard_of(flat, rank).add_(change)
        zero_ranges(flat, self._buffer.gaps)

    def _agree_on_still(self, device: torch.device) -> None:
        """Learn which elements do not move, if that may have changed."""
        state, before = self._phase.state, self._own_still
        if before is not None and self._still_at == state.variance_steps:
            return
        numel = self._buffer.numel // self._collectives.world_size
        own_bits = _bits(state.still(self._buffer.index, numel))
        self._own_still, self._still_at = own_bits, state.variance_steps
        if before is not None:
            flag = torch.tensor([not own_bits.equal(before)], dtype=torch.uint8, device=device)
            if not bool(self._collectives.gather_small(flag, what=STILL_KIND).any()):
                return
        self._still = self._gather_still(own_bits, device)

    def _gather_still(self, own_bits: Tensor, device: torch.device) -> Tensor | None:
        """The elements of all parts that do not move; None where that is none but gaps.

        own_bits: uint8 [n / 8].
        """
        bits = torch.empty(self._buffer.numel // 8, dtype=torch.uint8, device=device)
        index = self._buffer.index
        self._collectives.all_gather(bits, own_bits, buffer=index, kind=STILL_KIND).wait()
        is_still = _bools(bits)
        for start, stop in self._buffer.gaps:
            is_still[start:stop] = False
        return bits if bool(is_still.any()) else None


def _bits(flags: Tensor) -> Tensor:
    """bool [n], n a multiple of 8 -> uint8 [n / 8]."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (flags.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _bools(bits: Tensor) -> Tensor:
    """The opposite of `_bits`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> shifts).bitwise_and_(1).view(-1).bool()


__all__ = ["KIND", "STILL_KIND", "OneBitSender"]
