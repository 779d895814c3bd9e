"""The backend's collectives as torch provides them, for `xds bench comm` only: training uses `Collectives`.

Each is complete on return; on a GPU, when its stream is. Shapes as in collectives.py.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two; the old names warn there and the new ones do not exist in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(group: dist.ProcessGroup, flat: Tensor, shard: Tensor) -> None:
    """`flat` [world_size * n] is every rank's `shard` [n]."""
    _all_gather_single(flat, shard, group=group)


def reduce_scatter(group: dist.ProcessGroup, flat: Tensor, out: Tensor) -> None:
    """`out` [n] is the sum of this rank's part of every rank's `flat` [world_size * n]."""
    _reduce_scatter_single(out, flat, group=group)


def all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    """`tensor` becomes the sum over ranks, in place."""
    dist.all_reduce(tensor, group=group)


def all_to_all(group: dist.ProcessGroup, flat: Tensor, out: Tensor) -> None:
    """Part p of `flat` [world_size * n] is sent to rank p; part p of `out` is received from it."""
    dist.all_to_all_single(out, flat, group=group)


def send_right(group: dist.ProcessGroup, tensor: Tensor, out: Tensor) -> None:
    """Send `tensor` to the next rank and receive `out` from the previous rank, both at once."""
    rank, world_size = group.rank(), group.size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=right),
        dist.P2POp(dist.irecv, out, group=group, group_peer=left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def send_to(group: dist.ProcessGroup, tensor: Tensor, source: int, target: int) -> None:
    """Send `tensor` of rank `source` to rank `target`; the other ranks do nothing."""
    if group.rank() == source:
        dist.send(tensor, group=group, group_dst=target)
    elif group.rank() == target:
        dist.recv(tensor, group=group, group_src=source)
