"""Chooses where states and parameters on the host are stored, and reserves the space that they need."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ...offload.disk.options import DiskOptions
from ...offload.disk.shards import ShardsOnDisk
from ...offload.disk.states import StatesOnDisk
from ...offload.homes import HostHome
from ...offload.shards import ShardHome, ShardsOnHost
from ...offload.states import StateHome, StatesInMemory
from ...zero.core.policy import master_dtype
from ...zero.core.sharded_model import ShardedModel
from ..checkpoint.agreement import together
from ..config.config import Config
from ..optim.optimizers import ClientOptimizer
from ..optim.state_count import count_states


def state_home(config: Config, optimizer: ClientOptimizer | None) -> StateHome:
    """Where masters and states on the host are between updates. `optimizer`: the script's, if there is one."""
    section = config.zero_optimization.offload_optimizer
    if section.device != "nvme" or (optimizer is None and config.optimizer is None):
        return StatesInMemory()
    assert section.nvme_path is not None  # checked with the config
    options = disk_options(config)
    num_states = count_states(config.optimizer, optimizer)
    return StatesOnDisk(Path(section.nvme_path), options, dist.get_rank(), num_states=num_states)


def shard_home(config: Config, host: HostHome | None) -> ShardHome | None:
    """Where shards of parameters are stored; None: on the device."""
    section = config.zero_optimization.offload_param
    if host is None or section.device == "none":
        return None
    if section.device == "cpu":
        return ShardsOnHost(host.lanes, pin=host.pin)
    assert section.nvme_path is not None  # checked with the config
    return ShardsOnDisk(
        host.lanes,
        Path(section.nvme_path),
        disk_options(config),
        dist.get_rank(),
        max_in_memory=section.max_in_cpu,
        pin=host.pin,
    )


def disk_options(config: Config) -> DiskOptions:
    """How the files are read and written."""
    return DiskOptions(block_bytes=config.aio.block_size, queue_depth=config.aio.queue_depth)


def reserve(model: ShardedModel) -> None:
    """Give each master on the host its place, before the first one is stored. A collective.

    Raises:
        UsageError: on every rank, if the disk of one has too little space, or may not be written to.
    """
    states = model.homes.states
    for unit in model.units:
        for params, home in zip(unit.params, unit.homes, strict=False):
            if home.is_on_host:
                layout = params.layout
                numel = layout.shard_numel if model.policy.shards_optimizer else layout.numel
                states.plan(params.index, numel, master_dtype(params.dtype).itemsize)
    if states.is_on_disk:
        together(model.collectives, "offload to NVMe", states.open)


__all__ = ["reserve", "state_home"]
