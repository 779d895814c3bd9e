"""Which cores of a machine the update thread of each rank uses, and with how many threads.

Ranks of one machine divide its cores, unless something has bound them before. Only the thread of updates and
the threads that it starts are bound: the threads of user code and its data loaders stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from .job_queues import JobQueue

# variables by which a user, a launcher or OpenMP itself places threads
PLACING = ("XDS_RANK_CORES", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# an update with every core is slower than with all but two: memory is the limit, and other threads wait
DEFAULT_SHARE, NUM_FREE_CORES = 0.8, 2
THREADS, DEFAULT_THREADS = "OMP_NUM_THREADS", "XDS_DEFAULT_THREADS"


@final
@dataclass(frozen=True, order=True)
class Core:
    """A logical core. first_sibling: the first logical core of the same physical core."""

    node: int
    first_sibling: int
    number: int


@final
@dataclass(frozen=True)
class Machine:
    """The cores that a process may use. quota: cores that its control group grants in total; None: no limit."""

    cores: tuple[Core, ...]
    num_cores: int  # of the machine
    quota: float | None = None


@final
@dataclass(frozen=True)
class Choice:
    """The threads of the updates of one rank. cores: their numbers; None leaves the threads unbound."""

    num_threads: int
    cores: frozenset[int] | None = None


def choose(
    machine: Machine, environment: Mapping[str, str], share: float | None, num_threads: int
) -> Choice:
    """The threads of this rank's updates.

    Args:
        environment: LOCAL_RANK and LOCAL_WORLD_SIZE say which of the machine's ranks this is.
        share: of this rank's cores, above 0 and at most 1; None leaves two to other threads.
        num_threads: of the process; counted as its cores where they are not divided here.
    """
    num_ranks = _number(environment, "LOCAL_WORLD_SIZE", 1)
    rank = _number(environment, "LOCAL_RANK", 0)
    cores = None
    if num_ranks > 1 and rank < num_ranks and not _is_placed(machine, environment):
        cores = cores_of_rank(machine.cores, rank, num_ranks) or None
    available = float(num_threads if cores is None else len(cores))
    if machine.quota is not None:
        available = min(available, machine.quota / num_ranks)
    num_used = int((DEFAULT_SHARE if share is None else share) * available)
    if share is None:
        num_used = max(num_used, int(available) - NUM_FREE_CORES)
    return Choice(max(1, num_used), cores)


def cores_of_rank(cores: Iterable[Core], rank: int, num_ranks: int) -> frozenset[int]:
    """The cores of one of `num_ranks` ranks, in the order of memory nodes; empty if there are too few.

    Logical cores of one physical core go to the same rank, if there are as many physical cores as ranks.
    """
    physical: dict[tuple[int, int], list[int]] = {}
    for core in sorted(cores):
        physical.setdefault((core.node, core.first_sibling), []).append(core.number)
    groups = list(physical.values())
    if len(groups) < num_ranks:
        groups = [[number] for group in groups for number in group]
    if len(groups) < num_ranks:
        return frozenset()
    start, stop = rank * len(groups) // num_ranks, (rank + 1) * len(groups) // num_ranks
    return frozenset(number for group in groups[start:stop] for number in group)


def _is_placed(machine: Machine, environment: Mapping[str, str]) -> bool:
    """Something has decided already where threads run, or how many there are."""
    is_counted = THREADS in environment and DEFAULT_THREADS not in environment
    is_narrow = len(machine.cores) < machine.num_cores
    return is_counted or is_narrow or any(name in environment for name in PLACING)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


# -- this machine -------------------------------------------------------------------------------------------


def this_machine(root: Path = Path("/")) -> Machine:
    """What the kernel says; without its files each core is a physical core of node 0."""
    if not hasattr(os, "sched_getaffinity"):
        number = os.cpu_count() or 1
        return Machine(tuple(Core(0, core, core) for core in range(number)), number)
    usable = os.sched_getaffinity(0)
    nodes = _nodes(root / "sys/devices/system/node")
    cores = (
        Core(nodes.get(number, 0), _first_sibling(root, number, usable), number)
        for number in usable
    )
    return Machine(tuple(sorted(cores)), os.cpu_count() or len(usable), read_quota(root))


def _nodes(folder: Path) -> dict[int, int]:
    """The memory node of each core."""
    nodes = {}
    for path in folder.glob("node[0-9]*"):
        for number in read_list(_text(path / "cpulist")):
            nodes[number] = int(path.name.removeprefix("node"))
    return nodes


def _first_sibling(root: Path, number: int, usable: Collection[int]) -> int:
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    siblings = read_list(_text(topology / "thread_siblings_list"))
    return min((sibling for sibling in siblings if sibling in usable), default=number)


def read_quota(root: Path = Path("/")) -> float | None:
    """The cores that the control groups of this process grant; None: all."""
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        folders = (root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controllers)
        for inner in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
            for folder in folders:
                limit = _text(folder / inner / "cpu.max").split()  # control groups v2; below: v1
                limit = limit or [
                    _text(folder / inner / f"cpu.cfs_{kind}_us").strip()
                    for kind in ("quota", "period")
                ]
                if len(limit) == 2 and all(number.isdecimal() and int(number) for number in limit):
                    quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def read_list(text: str) -> list[int]:
    """The numbers in the kernel's "0-3,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


# -- taking effect ------------------------------------------------------------------------------------------


def place_updates(updates: JobQueue, share: float | None) -> None:
    """Bind the thread of `updates` to this rank's cores, and set how many threads it uses.

    Args:
        share: see `choose`.
    """
    num_threads = torch.get_num_threads()
    choice = choose(this_machine(), os.environ, share, num_threads)

    def work() -> None:
        torch.get_num_threads()  # a thread's first call sets the number that all threads have
        torch.set_num_threads(choice.num_threads)
        if choice.cores is not None and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # without the right to bind: the number of threads still counts
                os.sched_setaffinity(0, choice.cores)  # 0: the calling thread

    updates.run(work).wait()
    # threads that start later get the number that was set last in any thread
    torch.set_num_threads(num_threads)


__all__ = ["Choice", "Core", "Machine", "choose", "cores_of_rank", "place_updates", "this_machine"]
