"""Chooses from the config where states and parameters are stored: device, host or disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...offload.host import HostShardStore, HostStore
from ...offload.interfaces import ShardStore, StateStore
from ...offload.stores import Stores
from ...zero.model.sharded_model import ShardedModel
from ..checkpoint.agreement import together
from ..config.config import Config
from ..optim.optimizers import ClientOptimizer, count_states
from ..process.process import rank_in_job
from .precision import host_ratio

if TYPE_CHECKING:
    from ...offload.disk.options import DiskOptions


def build_host(
    config: Config, device: torch.device, optimizer: ClientOptimizer | None
) -> HostStore | None:
    """Host memory for what is not on the device, and its threads; None: everything is on the device.

    optimizer: the script's, if there is one.
    """
    zero = config.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param)
    if all(section.device == "none" for section in sections):
        return None
    from ...offload.cores import place_updates

    host = HostStore(
        device,
        pin=all(section.pin_memory for section in sections if section.device != "none"),
        accumulates=config.gradient_accumulation_steps > 1,
        speculates=zero.offload_optimizer.super_offload,
        states=_state_store(config, optimizer),
    )
    place_updates(host.queues.updates, zero.offload_optimizer.cpuadam_cores_perc)
    return host


def build_stores(config: Config, host: HostStore | None, total_numel: int) -> Stores:
    """The stores of all flat buffers. total_numel: elements of all trainable parameters."""
    return Stores(
        host,
        ratio=host_ratio(config),
        total_numel=total_numel,
        shards=_shard_store(config, host, trains=total_numel > 0),
        defers=config.zero_optimization.offload_optimizer.overlap_step,
    )


def fake_stores(config: Config, total_numel: int) -> Stores:
    """The stores of all flat buffers of a rank that does not run: see `offload/fake.py`."""
    from ...offload.fake import FakeHostStore, FakeShardStore

    zero = config.zero_optimization
    states, shards = zero.offload_optimizer.device, zero.offload_param.device
    is_used = {states, shards} != {"none"}
    return Stores(
        FakeHostStore(on_disk=states == "nvme") if is_used else None,
        ratio=host_ratio(config),
        total_numel=total_numel,
        shards=None if shards == "none" else FakeShardStore(on_disk=shards == "nvme"),
    )


def _state_store(config: Config, optimizer: ClientOptimizer | None) -> StateStore:
    """Where masters and states on the host are between updates."""
    section = config.zero_optimization.offload_optimizer
    if section.device != "nvme" or (optimizer is None and config.optimizer is None):
        return StateStore()
    from ...offload.disk.states import DiskStateStore

    assert section.nvme_path is not None  # checked with the config
    options = _disk_options(config)
    num_states = count_states(config.optimizer, optimizer)
    return DiskStateStore(Path(section.nvme_path), options, rank_in_job(), num_states=num_states)


def _shard_store(config: Config, host: HostStore | None, *, trains: bool) -> ShardStore | None:
    """Where shards of parameters are stored; None: on the device."""
    section = config.zero_optimization.offload_param
    if host is None or section.device == "none":
        return None
    if section.device == "cpu":
        return HostShardStore(host.queues, pin=host.pin)
    from ...offload.disk.shards import DiskShardStore

    assert section.nvme_path is not None  # checked with the config
    return DiskShardStore(
        host.queues,
        Path(section.nvme_path),
        replace(_disk_options(config), num_slots=3 if trains else 2),  # nothing is written
        rank_in_job(),
        max_in_memory=section.max_in_cpu,
        pin=host.pin,
    )


def _disk_options(config: Config) -> DiskOptions:
    """How the files are read and written."""
    from ...offload.disk.options import DiskOptions

    return DiskOptions(block_bytes=config.aio.block_size, queue_depth=config.aio.queue_depth)


def reserve(model: ShardedModel) -> None:
    """Give each master on the host its place, before the first one is stored. A collective.

    Raises:
        UsageError: on every rank, if the disk of one has too little space, or may not be written to.
    """
    states = model.stores.states
    for unit in model.units:
        for params, grads, store in zip(unit.params, unit.grads, unit.master_stores, strict=False):
            if store.is_on_host:
                layout = params.layout
                numel = layout.shard_numel if model.policy.shards_optimizer else layout.numel
                policy, dtype = grads.group.policy, params.dtype
                widest = max(
                    policy.master_dtype(dtype).itemsize, policy.state_dtype(dtype).itemsize
                )
                states.plan(params.index, numel, widest)
    if states.is_on_disk:
        together(model.collectives, "offload to NVMe", states.open)


__all__ = ["build_stores", "build_host", "fake_stores", "reserve"]
