"""`deepspeed.comm`: torch.distributed with DeepSpeed's name, for the script's own collectives.

`engine.bytes_sent()` does not count them: it counts the engine's messages only.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.process.foreign_launcher import fill
from ..engine.process.process import join, local_rank, pick_device
from ..utils.errors import UsageError
from .missing import placeholder


def init_distributed(  # noqa: PLR0913 (DeepSpeed's arguments)
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed from the launcher's environment, unless it is already running. A collective.

    Args:
        dist_backend: None is nccl on GPUs, else gloo.
        timeout: None is XDS_TIMEOUT_SECONDS, 600 s by default.
        init_method, rank, world_size: as in torch; they replace the environment.
        dist_init_required: False means that torch.distributed must already be running.
        auto_mpi_discovery, distributed_port, verbose, config: without effect. The ranks and addresses come
            from the launcher's environment, also with srun and mpirun.
    Raises:
        UsageError: the backend cannot work on this machine, or srun's or mpirun's environment is incomplete.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError(
            "dist_init_required = False, but torch.distributed is not running: call "
            "torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    device = pick_device()
    usual = "nccl" if device.type == "cuda" else "gloo"
    is_usual = dist_backend in (None, usual) and timeout is None
    if is_usual and init_method is None and rank < 0:
        join(device)
        return
    backend = dist_backend or usual
    _check_backend(backend, device)
    if init_method is None and rank < 0 and backend != "mpi":
        fill(os.environ)
    dist.init_process_group(
        backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )


def _check_backend(backend: str, device: torch.device) -> None:
    if backend == "nccl" and device.type != "cuda":
        raise UsageError(
            'dist_backend = "nccl" needs a GPU, and this machine has none: leave dist_backend out, or use '
            'get_accelerator().communication_backend_name(), which is "gloo" here'
        )


def get_local_rank() -> int:
    """The local rank of this process on its machine."""
    return local_rank()


def get_world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise UsageError("comm.get_world_group() before init_distributed(): call that first")
    return group


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of the members of `group`, in group order."""
    return dist.get_process_group_ranks(group or get_world_group())


def __getattr__(name: str) -> Any:
    """all_reduce, barrier, get_rank, ReduceOp and others, from torch.distributed."""
    if not name.startswith("_") and hasattr(dist, name):
        return getattr(dist, name)
    return placeholder(__name__, name)

# DeepSpeed has modules inside, which the table of names creates; not needed where this becomes a folder
__path__: list[str] = []
