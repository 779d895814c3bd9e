"""`deepspeed.comm`: torch.distributed with DeepSpeed's names, for the script's own collectives.

`engine.bytes_sent()` and the log of `comms_logger` count the engine's messages only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....ops.device import device_of
from ....utils.errors import UsageError
from ...process.foreign_launcher import fill
from ...process.process import join, local_rank, pick_device, start_group
from ..accelerate import tell_accelerate
from ..errors import raises_theirs


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
    usual = device_of(device).backend
    is_usual = dist_backend in (None, usual) and timeout is None
    if is_usual and init_method is None and rank < 0:
        join(device)
        tell_accelerate()
        return
    backend = dist_backend or usual
    _check_backend(backend, device)
    if init_method is None and rank < 0 and backend != "mpi":
        fill(os.environ)
    num_ranks = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    where = {"init_method": init_method, "rank": rank, "world_size": world_size}
    start_group(backend, device, num_ranks, timeout=timeout, **where)
    tell_accelerate()


def _check_backend(backend: str, device: torch.device) -> None:
    own = device_of(device).backend
    if backend == "nccl" and own != "nccl":
        raise UsageError(
            'dist_backend = "nccl" needs a GPU, and this machine has none: leave dist_backend out, or use '
            f'get_accelerator().communication_backend_name(), which is "{own}" here'
        )


def is_initialized() -> bool:
    """Whether torch.distributed is running. accelerate asks where it would start it."""
    is_running = dist.is_initialized()
    if is_running:
        tell_accelerate()
    return is_running


def get_local_rank() -> int:
    """The local rank of this process on its machine."""
    return local_rank()


def get_world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise UsageError("comm.get_world_group() before init_distributed(): call that first")
    return group


# -- collectives whose arguments or names differ from torch's ----------------------------------------------

# torch 2.13 renamed two; the old names warn there and the new ones do not exist in 2.11
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """torch's."""
    return _gather(output_tensor, tensor, group, async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """torch's all_gather_into_tensor."""
    return _gather(output_tensor, input_tensor, group, async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch's."""
    return _scatter(output_tensor, tensor, op, group, async_op)


def all_to_all_single(  # noqa: PLR0913 (DeepSpeed's arguments)
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch's."""
    outputs: Any = output_split_sizes
    inputs: Any = input_split_sizes
    return dist.all_to_all_single(output, tensor, outputs, inputs, group, async_op)


@raises_theirs
def configure(deepspeed_config: Any = None, enabled: bool | None = None, **options: Any) -> None:
    """Does nothing: an engine reads the section comms_logger of its config.

    Raises:
        UsageError: `enabled` is True.
    """
    if enabled:
        raise UsageError(
            "deepspeed.comm.configure(enabled=True): set comms_logger.enabled to true in the config, with "
            "the options prof_all, prof_ops, verbose and debug"
        )


def wait_for_all(group: dist.ProcessGroup | None = None) -> None:
    """Return when all ranks have called it; at once without a process group."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier(group)
