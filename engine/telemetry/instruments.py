"""What one engine measures and reports with: timers, counters of messages, monitors, the report of steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...ops.comm.collectives import Collectives
from ...zero.core.sharded_model import ShardedModel
from ..config.config import Config
from ..profiling.steps import build_profiler
from .memory import build_memory_points
from .monitor import Monitor, build_monitor
from .report import StepReport
from .timers import build_throughput, build_timers
from .traffic import build_traffic

log = logging.getLogger("xds")


@dataclass(frozen=True)
class Instruments:
    """The measuring objects of one engine, each chosen by its section of the config."""

    monitor: Monitor
    report: StepReport


def build_instruments(
    config: Config, device: torch.device, opened: Sequence[Collectives], sharded: ShardedModel
) -> Instruments:
    """Choose each instrument as `config` says. For all ranks: each says which host it is on.

    Args:
        opened: the collectives of all groups of the engine; the list may grow.
    Raises:
        UsageError: a package that a monitor needs is missing, or its folder cannot be written.
    """
    monitor = build_monitor(config, dist.get_rank())
    timers, throughput = build_timers(config, device), build_throughput(config, device)
    traffic = build_traffic(opened, sharded, enabled=config.comms_logger.enabled)
    profiler = build_profiler(config, sharded.collectives)
    memory = build_memory_points(device, enabled=config.memory_breakdown)
    report = StepReport(config, monitor, timers, throughput, traffic, profiler, memory)
    return Instruments(monitor, report)


def log_notes(config: Config, rank: int) -> None:
    """Log, on rank 0, what a reader of `config` should know."""
    if rank == 0:
        for note in config.notes:
            log.debug("%s: %s", config.source, note)


__all__ = ["Instruments", "build_instruments", "log_notes"]
