"""Detects from the environment what started this xds: the rendezvous with others, or the allocated hosts.

Three cases are detected, all by their variables: a cluster or a user that starts one xds on each machine and
sets the first machine's address (such as Kubernetes); an srun or mpirun that starts one xds on each machine;
and a Slurm allocation in which one xds starts the others. torchrun's own variables, PET_*, are options (see
options.py).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from ...engine.process.foreign_launcher import (
    USUAL_PORT,
    ProcessPlace,
    place,
    slurm_name,
    slurm_nodes,
)
from ...utils.errors import UsageError
from ...utils.quoting import printable, quoted
from ..job import Host, Rendezvous
from ..ranks.network import join_endpoint

_USUAL_RANKS = 2  # on a machine without GPUs, as without a cluster
_LAST_PORT = 65535


def find_rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """The rendezvous with the xds processes on other machines; None if this is the only one.

    Raises:
        UsageError: the variables contradict each other, or some are missing.
    """
    # inside a rank: the variables belong to the launcher of that rank
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    step = place(
        {key: value for key, value in environ.items() if key not in ("RANK", "WORLD_SIZE")}
    )
    if step is not None:
        return _from_step(step, environ)
    if _number(environ, "NNODES") > 1:
        return _from_variables(environ, "NNODES")
    # a job of Kubeflow's PyTorch operator, whose WORLD_SIZE counts nodes
    is_pod = "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ
    if is_pod and "MASTER_ADDR" in environ and _number(environ, "WORLD_SIZE") > 1:
        return _from_variables(environ, "WORLD_SIZE")
    return None


def in_slurm_allocation(environ: Mapping[str, str]) -> list[Host]:
    """The machines of this Slurm allocation, in Slurm's order; empty outside of an allocation.

    The slots of a machine are its GPUs if Slurm reports them, else the 2 of a machine without GPUs.

    Raises:
        UsageError: the list of machines cannot be parsed.
    """
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_JOB_ID" not in environ:
        return []
    slots = tuple(range(_slots(environ)))
    # in a shell of `srun --pty` the step's list has only one machine
    job = {key: value for key, value in environ.items() if key != "SLURM_STEP_NODELIST"}
    return [Host(name, slots) for name in slurm_nodes(job)]


def _from_variables(environ: Mapping[str, str], size_key: str) -> Rendezvous:
    """The rendezvous from MASTER_ADDR, the number of nodes and the node rank (Kubernetes, or set by a user)."""
    num_nodes = _number(environ, size_key)
    master = environ.get("MASTER_ADDR", "")
    rank_key, node_rank = _node_rank(environ, size_key)
    missing = [
        name for name, is_there in (("MASTER_ADDR", master), (rank_key, rank_key)) if not is_there
    ]
    if missing or node_rank is None:
        names = [name or "NODE_RANK" for name in missing]
        what = " and ".join(names) + (" are" if len(names) > 1 else " is")
        raise UsageError(
            f"{size_key} = {num_nodes}, but {what} not set: on each machine set MASTER_ADDR (the address of"
            f" the first) and NODE_RANK (0 to {num_nodes - 1}); or unset {size_key} to run only on this machine"
        )
    if node_rank >= num_nodes:
        raise UsageError(
            f"{rank_key} = {node_rank}, but {size_key} = {num_nodes}: must be from 0 to {num_nodes - 1};"
            " set a different number on every machine"
        )
    port = _number(environ, "MASTER_PORT") or USUAL_PORT
    if port > _LAST_PORT:
        raise UsageError(f"MASTER_PORT = {printable(port)}: must be a port, at most {_LAST_PORT}")
    return _static_rendezvous(master, port, num_nodes, node_rank, "xds")


def _node_rank(environ: Mapping[str, str], size_key: str) -> tuple[str, int | None]:
    """(the name of the variable, the node rank in it); ("", None) if no variable is set."""
    keys = ("NODE_RANK", "GROUP_RANK", "JOB_COMPLETION_INDEX")
    for key in ("RANK", *keys) if size_key == "WORLD_SIZE" else keys:
        if environ.get(key):
            return key, _number(environ, key)
    if "KUBERNETES_SERVICE_HOST" in environ:  # the pod names of a StatefulSet end with a number
        name = environ.get("HOSTNAME") or socket.gethostname()
        ordinal = re.search(r"-(\d{1,9})$", name.partition(".")[0])
        if ordinal:
            return "HOSTNAME", int(ordinal[1])
    return "", None


def _from_step(step: ProcessPlace, environ: Mapping[str, str]) -> Rendezvous | None:
    """The rendezvous if srun or mpirun started one xds on each machine."""
    nodes = slurm_nodes(environ)
    is_slurm = step.by == "SLURM_STEP_NUM_TASKS"
    num_nodes = len(nodes) if is_slurm else step.world_size
    if step.local_size > 1 or num_nodes != step.world_size:
        once = "srun --ntasks-per-node=1" if is_slurm else "mpirun --map-by ppr:1:node"
        raise UsageError(
            f"{step.by} = {step.world_size}: xds was started several times on one machine; start it once on"
            f" each (`{once} xds ...`), because xds starts the ranks; or start the script itself for each rank"
        )
    master = environ.get("MASTER_ADDR") or step.master
    if not master:
        raise UsageError(
            f"{step.by} = {step.world_size}, but MASTER_ADDR is not set: mpirun does not set the address of the"
            " first machine; set it (mpirun -x MASTER_ADDR=10.0.0.1 ...), or let xds start mpirun:"
            " `xds --launcher openmpi --hostfile hosts script.py`"
        )
    port = _number(environ, "MASTER_PORT") or step.port
    name = slurm_name(environ) if is_slurm else environ.get("PMIX_NAMESPACE", "") or "xds"
    return _static_rendezvous(
        master, port, step.world_size, step.rank, re.sub(r"[^\w.]", "_", name)
    )


def _static_rendezvous(
    master: str, port: int, num_nodes: int, node_rank: int, run_id: str
) -> Rendezvous:
    return Rendezvous(
        kind="static",
        endpoint=join_endpoint(master, port),
        run_id=run_id,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        node_rank=node_rank,
    )


def _slots(environ: Mapping[str, str]) -> int:
    for key in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        count = environ.get(key, "").rpartition(":")[2]  # "8", or "a100:8"
        if count.isascii() and count.isdigit() and int(count):
            return int(count)
    # set by the user: one task for each rank
    if environ.get("SLURM_NTASKS_PER_NODE", "").isdigit():
        return max(1, int(environ["SLURM_NTASKS_PER_NODE"]))
    return _USUAL_RANKS


def _number(environ: Mapping[str, str], key: str) -> int:
    text = environ.get(key, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(
            f"{key} = {quoted(text)}: must be a number from 0; correct it, or unset it"
        )
    return int(text or 0)
