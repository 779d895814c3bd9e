"""Sends parameters in 8 bits (qwZ); every rank computes with the same rounded values, also of its own shard.

Source: Wang et al., ZeRO++, 2023, section 3.1, https://arxiv.org/abs/2306.10209. Differs: any dtype and length;
a message crosses once to every other host.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.comm.handles import Handle, Then
from ...ops.comm.mesh_groups import Levels
from ..scheme import Buffer, ParamSender
from .gather import gather_in_levels
from .packets import QuantizedPackets

KIND = "int8 parameters"
BITS = 8


@final
class QuantizedSender(ParamSender):
    """Gathers values in 8 bits. The shards stay exact."""

    keeps_master = False
    sends_differences = False
    rounds = True
    held_bytes = 0

    def __init__(self, levels: Levels, buffer: Buffer) -> None:
        self._levels = levels
        self._whole = levels.whole
        self._buffer = buffer
        self._packets = QuantizedPackets(buffer.numel // self._whole.world_size, BITS)

    @torch.no_grad()
    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        own = self._packets.empty(device=flat.device)
        self._packets.pack(shard, own)
        rows = self._packets.empty(self._whole.world_size, device=flat.device)
        self._whole.count_exact(KIND, shard)
        handle = gather_in_levels(self._levels, rows, own, buffer=self._buffer.index, kind=KIND)

        def finish() -> None:
            self._packets.unpack_each(rows, flat.view(len(rows), -1))

        return Then(handle, finish)

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        raise AssertionError("the values are gathered")

    @torch.no_grad()
    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        rounded = torch.empty_like(shard)
        packet = self._packets.empty(device=shard.device)
        self._packets.pack(shard, packet)
        self._packets.unpack(packet, rounded)
        now = self._whole.shard_of(flat)[start:stop].to(shard.device)
        kept = shard[start:stop]
        kept.copy_(torch.where(now != rounded[start:stop], now, kept))

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        return


__all__ = ["QuantizedSender"]
