"""Keeps a second shard of the parameters inside the host from one gather to the next update (hpZ).

    first gather   from the shards of all ranks                      across hosts
    drop           this rank keeps 1 / P of the buffer
    later gathers  from the second shards of P ranks of one host     inside the host
    update         the second shards are freed

Source: Wang et al., ZeRO++, 2023, section 3.2, https://arxiv.org/abs/2306.10209. Differs: the second shard is
taken when the buffer is dropped, so it has what a forward wrote to the parameters.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from ..scheme import ParamSender

KIND = "parameters inside a host"


@final
class SecondarySender(ParamSender):
    """Sends as `first` until a buffer was dropped, then from second shards until `forget`."""

    keeps_master = False
    sends_differences = False

    def __init__(self, first: ParamSender, inside: Collectives, buffer: int) -> None:
        """inside: P ranks of one host, neighbours in the buffer's group."""
        self._first = first
        self._inside = inside
        self._buffer = buffer
        self._second: Tensor | None = None  # [world_size * n / P]
        self._may_keep = False  # all ranks have gathered the buffer

    @property
    def rounds(self) -> bool:
        return self._first.rounds

    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        self._may_keep = True
        if self._second is None:
            return self._first.gather(flat, shard)
        return self._inside.all_gather(flat, self._second, buffer=self._buffer, kind=KIND)

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        raise AssertionError("the values are gathered")

    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        self._first.take_written(flat, shard, start, stop)

    @torch.no_grad()
    def keep(self, flat: Tensor) -> None:
        if self._may_keep:
            own = self._inside.shard_of(flat)
            self._second = own.clone() if self._second is None else self._second.copy_(own)

    def forget(self) -> None:
        self._second, self._may_keep = None, False

    @property
    def held_bytes(self) -> int:
        return 0 if self._second is None else self._second.nbytes


__all__ = ["SecondarySender"]
