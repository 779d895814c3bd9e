"""Runs a job with torch's elastic launcher.

torch does the rendezvous, sets the ranks' environment, and monitors the ranks. To start ranks, the launcher
imports torch only in this module and in rendezvous_store.py.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...ops.device import num_devices
from ...utils.errors import UsageError
from ...utils.sealing import RUN_KEY
from ..command_line.hosts import numbers
from ..job import Job, Order, Rendezvous
from .network import address_towards, interface_towards, is_loopback, split_endpoint
from .rendezvous_store import serve
from .run_folder import RunFolder

_FLIGHT_RECORDER_ENTRIES = (
    "64"  # torch's flight recorder, so that the watcher can name the script's collectives
)
WORKER = str(Path(__file__).with_name("worker.py"))


def launch(
    order: Order,
    num_ranks: int,
    folder: RunFolder,
    ranks: dict[int, int],
    extra: dict[str, str],
) -> tuple[dict[int, ProcessFailure], object]:
    """Run every rank of this host to its end.

    Args:
        ranks: filled with rank by local rank when the rendezvous is complete.
    Returns:
        torch's ProcessFailure of each failed rank, and an object that keeps torch's store open after a failure
        if this process serves it.
    """
    # the agent's own failure tables; the launcher prints one report
    logging.disable(logging.CRITICAL)
    rendezvous, store = serve(order.rendezvous)
    order = replace(order, rendezvous=rendezvous)
    settings = dict(rendezvous.settings)
    config = LaunchConfig(
        min_nodes=rendezvous.min_nodes,
        max_nodes=rendezvous.max_nodes,
        nproc_per_node=num_ranks,
        run_id=rendezvous.run_id or uuid.uuid4().hex,
        rdzv_backend=rendezvous.kind,
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_configs=settings
        if rendezvous.node_rank is None
        else {"rank": rendezvous.node_rank, **settings},
        local_addr=rendezvous.local_addr or _own_address(rendezvous),
        max_restarts=order.agent_restarts,
        monitor_interval=0.1,
        logs_specs=RankFiles(folder, order, num_ranks, ranks, extra),
    )
    job = order.job
    # torch substitutes templates in arguments: "$$" becomes "$"
    argv = [word.replace("$", "$$") for word in (WORKER, job.kind, job.target, *job.args)]
    try:
        elastic_launch(config, sys.executable)("-u", *argv)
    except ChildFailedError as failed:
        # its traceback frames reference the rendezvous
        return dict(failed.failures), (failed, store)
    return {}, None


def _own_address(rendezvous: Rendezvous) -> str | None:
    """This machine's address for the others. Not its name, which may resolve slowly, wrongly, or not at all."""
    if rendezvous.max_nodes == 1:
        return "127.0.0.1"
    host, _ = split_endpoint(rendezvous.endpoint)
    own = address_towards(host)
    # if the machine's own name is on the loopback, the address that the others use is unknown
    return None if not own or (is_loopback(own) and not is_loopback(host)) else own


def count_ranks(job: Job, requested: int | str) -> int:
    """The number of ranks of `job` on this machine. `requested` is a number, auto, gpu or cpu.

    Raises:
        UsageError: this machine does not have the GPUs or the backend.
    """
    num_gpus = num_devices()
    if requested == "gpu" and not num_gpus:
        raise UsageError("--nproc-per-node = gpu: no GPU is visible here; set a number, or cpu")
    by_name = {"auto": num_gpus or 2, "gpu": num_gpus, "cpu": num_cores()}
    num_ranks = by_name[requested] if isinstance(requested, str) else requested
    if job.backend == "nccl" and not (dist.is_nccl_available() and num_gpus >= num_ranks):
        raise UsageError(
            f"--backend = nccl: needs a GPU for each of the {num_ranks} ranks, {num_gpus} visible"
            " here; set --backend gloo, or fewer ranks with --nproc-per-node"
        )
    if job.backend == "mpi" and not dist.is_mpi_available():
        raise UsageError("--backend = mpi: this torch is built without MPI; set --backend gloo")
    if job.backend == "mpi":  # MPI assigns the ranks, not the environment
        command = f"XDS_BACKEND=mpi mpirun -n {num_ranks} python {job.target}"
        raise UsageError(f"--backend = mpi: MPI starts its processes itself; run `{command}`")
    return num_ranks


def share_cores(core_list: str, num_ranks: int) -> list[list[int]]:
    """Equal slices of the cores for `num_ranks` ranks, in order. `core_list` is such as "0-3,8"; "" means all.

    Raises:
        UsageError: it is no such list, a core may not be used, or there are fewer cores than ranks.
    """
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    try:
        cores = sorted(set(numbers(core_list))) if core_list else usable
    except ValueError:
        raise UsageError(f"--bind_core_list = {core_list}: must be cores as in 0-3,8") from None
    wrong = sorted(set(cores) - set(usable))
    if wrong:
        raise UsageError(
            f"--bind_core_list = {core_list}: this process may not use core {wrong[0]}; usable: "
            f"{','.join(map(str, usable))}"
        )
    each = len(cores) // num_ranks
    if not each:
        raise UsageError(
            f"--bind_cores_to_rank: {num_ranks} ranks need at least as many cores, there are {len(cores)}; "
            "start fewer ranks, or remove the option"
        )
    return [cores[rank * each : (rank + 1) * each] for rank in range(num_ranks)]


def num_cores() -> int:
    """The number of CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def common_environment(order: Order, num_ranks: int) -> dict[str, str]:
    """The environment variables of every rank of this host, in addition to those of torch."""
    job = order.job
    found = {"XDS_LAUNCHER_PID": str(os.getpid())}
    if order.key:
        found[RUN_KEY] = order.key
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
        found["XDS_DEFAULT_THREADS"] = "1"  # nobody has chosen the number
    if job.backend is not None:
        found["XDS_BACKEND"] = job.backend
    if job.num_sites > 1:
        found["XDS_SITES"] = str(job.num_sites)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo's own default depends on a lookup of the machine's name
        interface = interface_towards(order.rendezvous.endpoint)
        found |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        found["TORCH_FR_BUFFER_SIZE"] = _FLIGHT_RECORDER_ENTRIES
    if not order.agent_restarts:  # each restart is a new launch
        found["TORCHELASTIC_RESTART_COUNT"] = str(order.generation)
        found["TORCHELASTIC_MAX_RESTARTS"] = str(order.max_restarts)
    return found


@final
class RankFiles(LogsSpecs):
    """Sets the paths of each rank's files in the run folder, for the agent and for the rank.

    Nothing is redirected here. rank_zero.py handles rank 0's streams. worker.py opens the log of any other rank
    itself, so that both streams go to one file in the order of the writes.
    """

    def __init__(
        self,
        folder: RunFolder,
        order: Order,
        num_ranks: int,
        ranks: dict[int, int],
        extra: dict[str, str],
        *,
        is_first: bool | None = None,
    ) -> None:
        """is_first: old logs are removed. None: at the first start of all ranks."""
        super().__init__(log_dir=str(folder.path))
        self._folder, self._ranks, self._extra = folder, ranks, extra
        self._environment = common_environment(order, num_ranks)
        cores = share_cores(order.job.core_list, num_ranks) if order.job.bind_cores else []
        self._cores = [",".join(map(str, each)) for each in cores]
        self._is_first = order.generation == 0 if is_first is None else is_first

    @property
    def root_log_dir(self) -> str:
        return str(self._folder.path)

    def reify(self, envs: dict[int, dict[str, Any]]) -> LogsDest:
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self._folder.prepare(list(ranks.values()), is_first=self._is_first)
        self._is_first = False
        # after `prepare`: the main thread looks for failure records of these ranks, and would find old ones
        self._ranks.clear()
        self._ranks.update(ranks)
        errors = {}
        for local_rank, env in envs.items():
            rank = self._ranks[local_rank]
            errors[local_rank] = str(self._folder.error(rank))
            env.update(self._environment)
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
            env["XDS_RANK_FILES"] = str(self._folder.path / f"rank{rank}")
            env["XDS_RUN_FOLDER"] = str(self._folder.path)
            env["XDS_RUN_BEGAN"] = f"{self._folder.began_seconds:.3f}"
            env["XDS_LOG_FOLDER"] = str(self._folder.shown())
            env["XDS_GRACE_FILE"] = str(self._folder.grace(rank))
            # the names that DeepSpeed uses
            env["LOCAL_SIZE"] = env["LOCAL_WORLD_SIZE"]
            env["CROSS_RANK"], env["CROSS_SIZE"] = env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]
            if rank == 0:
                env.update(self._extra)
            if self._cores:
                env["XDS_RANK_CORES"] = self._cores[local_rank]
                env["OMP_NUM_THREADS"] = str(self._cores[local_rank].count(",") + 1)
        terminal = dict.fromkeys(envs, "")
        return LogsDest(stdouts=terminal, stderrs=dict(terminal), error_files=errors)
