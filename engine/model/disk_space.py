"""Reserves the space that a model's states need on each rank's disk, before any work starts."""

from __future__ import annotations

from ...offload.config import Aio
from ...offload.disk.options import DiskOptions
from ...offload.states import StateHome
from ...zero.core.policy import master_dtype
from ...zero.core.sharded_model import ShardedModel
from ..checkpoint.agreement import together


def disk_options(aio: Aio) -> DiskOptions:
    """How the files are read and written."""
    return DiskOptions(block_bytes=aio.block_size, queue_depth=aio.queue_depth)


def reserve(model: ShardedModel, states: StateHome) -> None:
    """Give each master on the host its place. A collective.

    Raises:
        UsageError: on every rank, if the disk of one has too little space, or may not be written to.
    """
    for unit in model.units:
        for params, home in zip(unit.params, unit.homes, strict=False):
            if home.is_on_host:
                layout = params.layout
                numel = layout.shard_numel if model.policy.shards_optimizer else layout.numel
                states.plan(params.index, numel, master_dtype(params.dtype).itemsize)
    if states.is_on_disk:
        together(model.collectives, "xds.initialize, offload to NVMe", states.open)


__all__ = ["disk_options", "reserve"]
