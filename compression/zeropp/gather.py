"""An all_gather in two levels: each message crosses once to every other host, and is copied there.

rank = host * L + place      across  the same place of all hosts      K messages for each rank
                             inside  the ranks of a host              L times these K
"""

from __future__ import annotations

from torch import Tensor

from ...ops.comm.handles import Handle, Then
from ...ops.comm.mesh_groups import Levels


def gather_in_levels(
    levels: Levels, rows: Tensor, own: Tensor, *, buffer: int, kind: str
) -> Handle:
    """Start to fill `rows` [world_size, bytes] with every rank's `own` [bytes].

    Sends: to other hosts (K - 1) times `own`, inside its host (L - 1) K times, with K hosts of L ranks.
    """
    across, inside = levels.across, levels.inside
    if across.world_size == 1 or inside.world_size == 1:
        handle = levels.whole.all_gather(rows.view(-1), own, buffer=buffer, kind=kind)
        return Then(handle, _nothing, kept=own)
    column = rows.new_empty((across.world_size, own.numel()))
    first = across.all_gather(column.view(-1), own, buffer=buffer, kind=kind)

    def finish() -> None:
        found = rows.new_empty((inside.world_size, *column.shape))
        inside.all_gather(found.view(-1), column.view(-1), buffer=buffer, kind=kind).wait()
        rows.view(across.world_size, inside.world_size, -1).copy_(found.transpose(0, 1))

    return Then(first, finish, kept=(own, column))


def _nothing() -> None:
    return


__all__ = ["gather_in_levels"]
