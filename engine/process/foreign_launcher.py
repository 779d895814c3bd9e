"""Reads the rank from the variables that srun or mpirun sets, when they start the process instead of xds.

Nothing here imports torch: the launcher reads the same variables.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import final

from ...utils.errors import UsageError

USUAL_PORT = 29500  # the default of torch and DeepSpeed
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the kernel's range of ephemeral ports
_LAST_STEP = 0xFFFF_0000  # higher step ids stand for batch scripts and interactive shells
_MAX_NODES = 1_000_000
_PART = re.compile(r"[^\[\],]*(?:\[[\d,-]+\][^\[\],]*)*")
_KEYS = {  # for each MPI: world size, then rank, local rank, local size
    "OMPI_COMM_WORLD_SIZE": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MV2_COMM_WORLD_SIZE": (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "PMI_SIZE": ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@final
@dataclass(frozen=True)
class ProcessPlace:
    """One of the processes that srun or mpirun started together.

    by: the variable that holds the world size.
    master: the first node's name; "" if the launcher does not provide it.
    port: the port of the rendezvous.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    by: str
    master: str
    port: int


def place(environ: Mapping[str, str]) -> ProcessPlace | None:
    """This process's place; None for a single process, or if xds or torchrun has set RANK.

    WORLD_SIZE alone is what batch scripts export for all of their steps.

    Raises:
        UsageError: the variables contradict one another, or some are missing.
    """
    if "RANK" in environ:
        return None
    found = _found(environ)
    if found is None:
        return None
    exported = _number(environ, "WORLD_SIZE", found.world_size)
    if exported != found.world_size:
        raise UsageError(
            f"WORLD_SIZE = {exported}, but {found.by} = {found.world_size}: these contradict one another; "
            "unset the one that does not count the processes, or both if this process is alone"
        )
    return found


def _found(environ: Mapping[str, str]) -> ProcessPlace | None:
    for size_key, keys in _KEYS.items():
        # srun --mpi=pmi2 sets PMI_SIZE too, without the local rank and size that hydra sets
        is_srun = size_key == "PMI_SIZE" and "MPI_LOCALRANKID" not in environ and in_step(environ)
        if not is_srun and _number(environ, size_key, 1) > 1:
            return _of_mpi(environ, size_key, keys)
    if in_step(environ) and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _of_slurm(environ)
    return None


def fill(environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as xds does; nothing for a single process.

    Variables that are already set keep their values.

    Raises:
        UsageError: the node of rank 0 is not known.
    """
    found = place(environ)
    if found is None:
        return
    master = environ.get("MASTER_ADDR") or found.master
    if not master:
        raise UsageError(
            f"{found.by} = {found.world_size}, on several nodes, but MASTER_ADDR is not set: mpirun does not"
            " provide the node of rank 0; give that node's address, as in"
            " `mpirun -x MASTER_ADDR=10.0.0.1 ... python train.py`, or start with `xds --launcher openmpi`"
        )
    settings = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world_size,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_size,
        "MASTER_ADDR": master,
        "MASTER_PORT": found.port,
    }
    for key, value in settings.items():
        environ.setdefault(key, str(value))


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, and not sbatch or salloc, which set similar variables."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isascii() and step.isdigit() and int(step) < _LAST_STEP


def slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """The nodes of this Slurm step, or else of this job, in Slurm's order; empty outside of a job."""
    for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(key) and (key != "SLURM_STEP_NODELIST" or in_step(environ)):
            return expand_nodes(environ[key])
    return []


def expand_nodes(text: str) -> list[str]:
    """The names in a Slurm node list.

    >>> expand_nodes("n[009-011,7],login,r[1-2]s[0-1]")
    ['n009', 'n010', 'n011', 'n7', 'login', 'r1s0', 'r1s1', 'r2s0', 'r2s1']

    Raises:
        UsageError: it is not a node list.
    """
    names: list[str] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if not match or not match.group():
            raise UsageError(
                f"list of Slurm's nodes = {text!r}: cannot be read at {text[position:]!r}"
            )
        names += _expand(match.group(), text)
        position = match.end() + 1
        if len(names) > _MAX_NODES or text[match.end() : position] not in (",", ""):
            raise UsageError(f"list of Slurm's nodes = {text!r}: cannot be read")
    return names


def job_port(name: str) -> int:
    """A port that all processes of one job compute equally from the job's name."""
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


def slurm_name(environ: Mapping[str, str]) -> str:
    """The ids of this Slurm job and step, as one name."""
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"


def _of_mpi(environ: Mapping[str, str], size_key: str, keys: tuple[str, str, str]) -> ProcessPlace:
    missing = [key for key in keys if key not in environ]
    if missing:
        raise UsageError(
            f"{size_key} = {environ[size_key]}, but {missing[0]} is not set: start the script with mpirun, "
            f"`xds script.py` or torchrun; without mpirun unset {size_key}, and this process trains alone"
        )
    world_size = _number(environ, size_key, 1)
    rank, local_rank, local_size = (_number(environ, key, 0) for key in keys)
    name = environ.get("PMIX_NAMESPACE", "")
    return ProcessPlace(
        rank=_below(rank, world_size, keys[0], size_key),
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        by=size_key,
        master="127.0.0.1" if local_size == world_size else "",
        port=job_port(name) if name else USUAL_PORT,
    )


def _of_slurm(environ: Mapping[str, str]) -> ProcessPlace:
    missing = [key for key in ("SLURM_PROCID", "SLURM_LOCALID") if key not in environ]
    nodes = slurm_nodes(environ)
    if missing or not nodes:
        what = missing[0] if missing else "SLURM_STEP_NODELIST"
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS = {environ['SLURM_STEP_NUM_TASKS']}, but {what} is not set: start the "
            "script with srun or `xds --launcher slurm`, or unset Slurm's variables"
        )
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    per_node = tasks_per_node(counts) if counts else []
    node = _number(environ, "SLURM_NODEID", 0)
    even = max(1, world_size // len(nodes))
    return ProcessPlace(
        rank=_below(
            _number(environ, "SLURM_PROCID", 0), world_size, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
        ),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_size=per_node[node] if node < len(per_node) else even,
        by="SLURM_STEP_NUM_TASKS",
        master=nodes[0] if len(nodes) > 1 else "127.0.0.1",
        port=job_port(slurm_name(environ)),
    )


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's notation.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if not match:
            raise UsageError(f"Slurm's tasks per node = {text!r}: cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(environ: Mapping[str, str], key: str, usual: int) -> int:
    text = environ.get(key, "").strip() or str(usual)
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{key} = {text!r}: must be a number; srun and mpirun set it, so unset it")
    return int(text)


def _below(rank: int, size: int, rank_key: str, size_key: str) -> int:
    if rank >= size:
        raise UsageError(
            f"{rank_key} = {rank}, but {size_key} = {size}: these contradict one another"
        )
    return rank


def _expand(part: str, text: str) -> Iterator[str]:
    begin, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, rest = rest.partition("]")
    for numbers in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", numbers)
        if not match or int(match[2] or match[1]) - int(match[1]) not in range(_MAX_NODES):
            raise UsageError(f"list of Slurm's nodes = {text!r}: cannot be read at {numbers!r}")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            for end in _expand(rest, text):
                yield f"{begin}{number:0{len(match[1])}d}{end}"
