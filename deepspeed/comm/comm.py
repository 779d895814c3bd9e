"""`deepspeed.comm.comm`: process groups, and the log of the script's and the engine's collectives.

The collectives themselves are in collectives.py. `engine.bytes_sent()` counts the engine's messages only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...engine.process.foreign_launcher import fill
from ...engine.process.process import join, local_rank, pick_device, start_group
from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder
from ..utils.comms_logging import CommsLogger
from .accelerate_state import tell_accelerate
from .collectives import COLLECTIVES, make_collective
from .collectives import P2POp as P2POp

if TYPE_CHECKING:
    from ...engine.engine import Engine

comms_logger = CommsLogger()  # of the process: the script's collectives, and those of its engines
cdb: Any = None  # has the collectives that are called instead of torch's; None: torch.distributed


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
    if backend == "nccl" and device.type != "cuda":
        raise UsageError(
            'dist_backend = "nccl" needs a GPU, and this machine has none: leave dist_backend out, or use '
            'get_accelerator().communication_backend_name(), which is "gloo" here'
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


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of the members of `group`, in group order."""
    return dist.get_process_group_ranks(group or get_world_group())


@raises_theirs
def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A mesh of all ranks: `get_group(mesh_dim=name)` is the group of one dimension. A collective."""
    if not dist.is_initialized():
        raise UsageError("comm.initialize_mesh_device() before init_distributed(): call that first")
    device = pick_device().type
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Choose which collectives are logged, the script's and those of all engines. None leaves an option.

    deepspeed_config: a `DeepSpeedConfig` or a dict, whose section comms_logger counts if it is there.
    """
    if deepspeed_config is not None:
        from .config import (
            comms_config_of,  # not above: it reads configs, which takes longer to import
        )

        comms_logger.configure(comms_config_of(deepspeed_config))
    options = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": None if prof_ops is None else list(prof_ops),
        "verbose": verbose,
        "debug": debug,
    }
    comms_logger.change({name: value for name, value in options.items() if value is not None})


def log_collectives_of(engine: Engine) -> None:
    """Count the engine's collectives in the log too, as its config says where it has a section comms_logger."""
    configure(engine.config)
    comms_logger.follow(engine._parts.sharded.collectives.message_log)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the log of collectives on rank 0; with `return_dict` also return it. A collective.

    The engine's collectives are in it, under the names of `comms_logger.prof_ops`. Sizes are those of a rank's
    part for all_gather and reduce_scatter, else of the tensor. Latencies end when a rank has waited.
    """
    dist.barrier()
    result = comms_logger.log_all(
        print_log=dist.get_rank() == 0, show_straggler=show_straggler, return_dict=return_dict
    )
    dist.barrier()
    return result


def reset_log() -> None:
    """Forget what was logged."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Something was logged."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many collectives were logged."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names of the operations that were logged."""
    return comms_logger.get_operation_names()


def _yes() -> bool:
    """torch has it."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor = _yes
has_all_reduce_coalesced = has_coalescing_manager = _yes


@cache
def _collective(name: str) -> Callable[..., Any]:
    return make_collective(name, lambda: comms_logger, lambda: cdb)


def __getattr__(name: str) -> Any:
    """The collectives; get_rank, ReduceOp and others from torch.distributed."""
    if name in COLLECTIVES:
        return _collective(name)
    if not name.startswith("_") and hasattr(dist, name):
        return getattr(dist, name)
    return placeholder(__name__, name)
