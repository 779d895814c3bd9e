"""Chooses where masters and optimizer states are between updates, and reserves the space that they need."""

from __future__ import annotations

from pathlib import Path

from ...offload.disk.options import DiskOptions
from ...offload.disk.states import StatesOnDisk
from ...offload.states import StateHome, StatesInMemory
from ...zero.core.policy import master_dtype
from ...zero.core.sharded_model import ShardedModel
from ..checkpoint.agreement import together
from ..config.config import Config
from ..optim.optimizers import ClientOptimizer
from ..optim.state_count import count_states


def state_home(config: Config, optimizer: ClientOptimizer | None, rank: int) -> StateHome:
    """Where masters and states on the host are between updates. `optimizer`: the script's, if there is one."""
    section = config.zero_optimization.offload_optimizer
    if section.device != "nvme" or (optimizer is None and config.optimizer is None):
        return StatesInMemory()
    assert section.nvme_path is not None  # checked with the config
    options = DiskOptions(block_bytes=config.aio.block_size, queue_depth=config.aio.queue_depth)
    num_states = count_states(config.optimizer, optimizer)
    return StatesOnDisk(Path(section.nvme_path), options, rank, num_states=num_states)


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
