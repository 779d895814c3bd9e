"""Hands a job to torch's elastic launcher: the one file of the launcher that imports torch.

torch does the rendezvous (c10d, on 127.0.0.1, a free port), the ranks' environment, and the watch.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..ops.errors import UsageError
from .run_folder import RunFolder

if TYPE_CHECKING:
    from .local import LocalJob

_WORKER = str(Path(__file__).with_name("worker.py"))


def launch(job: LocalJob, num_ranks: int, folder: RunFolder) -> dict[int, ProcessFailure]:
    """Run every rank to its end; the ranks that failed, with torch's account of each."""
    logging.disable(logging.CRITICAL)  # the agent's own tables about a failure: ours comes once
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # the machine's own name may resolve slowly, wrongly, or not at all
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=_RankFiles(folder, _environment(job, num_ranks)),
    )
    # torch fills in templates in arguments: "$$" is a dollar that stays one
    words = [word.replace("$", "$$") for word in (_WORKER, job.kind, job.target, *job.args)]
    try:
        elastic_launch(config, sys.executable)("-u", *words)
    except ChildFailedError as failed:
        return dict(failed.failures)
    return {}


def count_ranks(job: LocalJob) -> int:
    """How many ranks `job` gets here, once it is known that its backend can serve them.

    Raises:
        UsageError: GPUs or a backend asked for that are not here.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if job.num_ranks == "gpu" and not num_gpus:
        raise UsageError("--nproc-per-node = gpu: no GPU is visible here; give a number, or cpu")
    by_name = {"auto": num_gpus or 2, "gpu": num_gpus, "cpu": num_cores()}
    num_ranks = by_name[job.num_ranks] if isinstance(job.num_ranks, str) else job.num_ranks
    if job.backend == "nccl" and not (dist.is_nccl_available() and num_gpus >= num_ranks):
        raise UsageError(
            f"--backend = nccl: needs a GPU for each of the {num_ranks} ranks, {num_gpus} visible"
            " here; take --backend gloo, or fewer ranks with --nproc-per-node"
        )
    if job.backend == "mpi" and not dist.is_mpi_available():
        raise UsageError("--backend = mpi: this torch is built without MPI; take --backend gloo")
    if job.backend == "mpi":  # its ranks come from MPI, not from the environment
        command = f"XDS_BACKEND=mpi mpirun -n {num_ranks} python {job.target}"
        raise UsageError(f"--backend = mpi: MPI starts its processes itself; run `{command}`")
    return num_ranks


def num_cores() -> int:
    """CPU cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(job: LocalJob, num_ranks: int) -> dict[str, str]:
    """What every rank finds in its environment beside torch's own variables."""
    found = {"XDS_LAUNCHER_PID": str(os.getpid())}
    if job.threads_per_rank is not None:
        found["OMP_NUM_THREADS"] = str(job.threads_per_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
    if job.backend is not None:
        found["XDS_BACKEND"] = job.backend
    if "GLOO_SOCKET_IFNAME" not in os.environ and os.path.isdir("/sys/class/net/lo"):
        found["GLOO_SOCKET_IFNAME"] = "lo"  # every rank is here: no look-up of the machine's name
    return found


@final
class _RankFiles(LogsSpecs):
    """Tells the agent and each rank which files of the run's folder are whose.

    Nothing is redirected here: rank 0 inherits the terminal, and worker.py opens the log of any
    other rank itself, so that both of its streams share one file in the right order.
    """

    def __init__(self, folder: RunFolder, environment: dict[str, str]) -> None:
        super().__init__(log_dir=str(folder.path))
        self._folder, self._environment = folder, environment

    @property
    def root_log_dir(self) -> str:
        return str(self._folder.path)

    def reify(self, envs: dict[int, dict[str, Any]]) -> LogsDest:
        errors = {rank: str(self._folder.error(rank)) for rank in envs}
        for rank, env in envs.items():
            env.update(self._environment)
            env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
            env["XDS_RANK_FILES"] = str(self._folder.path / f"rank{rank}")
        terminal = dict.fromkeys(envs, "")
        return LogsDest(stdouts=terminal, stderrs=dict(terminal), error_files=errors)
