"""A parameter gather in two levels: across hosts first, then inside each host. Exact.

    ranks 0 1 | 2 3    across  0 sends shard 0 to 2, 1 sends shard 1 to 3, and back
                       inside  0 and 1 exchange shards 0 1 2 3, 2 and 3 as well

A shard crosses once for each pair of hosts. Gathers between all pairs of ranks send it to each of the L ranks
of the other host, so this sends 1 / L of their bytes across. The bytes of both levels together are equal.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from ..ops.comm.handles import Handle, Then
from ..ops.comm.mesh_groups import Levels
from .scheme import Buffer, CommScheme, ExactSender, GradientReducer, ParamSender

KIND = "all_gather"


@final
class TwoLevelSender(ParamSender):
    """Gathers the values themselves in two levels. Sends (world_size - 1) shards per rank."""

    keeps_master = False
    sends_differences = False
    rounds = False
    held_bytes = 0

    def __init__(self, levels: Levels, buffer: int) -> None:
        """levels: blocks are the ranks of one host. buffer: the number of the flat buffer."""
        self._levels = levels
        self._buffer = buffer
        self._pairwise = ExactSender(levels.whole, buffer)

    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        across, inside = self._levels.across, self._levels.inside
        blocks = flat.chunk(across.world_size)  # the shards of one host each
        own = [inside.shard_of(block) for block in blocks]  # of this place on every host
        parts = [shard] * across.world_size
        name = "shards of other hosts"
        crossing = across.all_to_all(own, parts, what=name, kind=KIND, buffer=self._buffer)

        def spread() -> None:
            handles = [
                inside.all_gather(block, mine, buffer=self._buffer, kind=KIND)
                for block, mine in zip(blocks, own, strict=True)
            ]
            for handle in handles:
                handle.wait()

        return Then(crossing, spread, kept=shard)

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        return self._pairwise.publish(flat, values)

    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        self._pairwise.take_written(flat, shard, start, stop)

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        return


@final
class TwoLevelScheme(CommScheme):
    """Parameters in two levels; gradients as `inner` sends them."""

    def __init__(self, inner: CommScheme, levels: Levels) -> None:
        self._inner = inner
        self._levels = levels

    def reducer(self, buffer: Buffer) -> GradientReducer:
        return self._inner.reducer(buffer)

    def sender(self, buffer: Buffer) -> ParamSender:
        return TwoLevelSender(self._levels, buffer.index)


__all__ = ["TwoLevelScheme", "TwoLevelSender"]
