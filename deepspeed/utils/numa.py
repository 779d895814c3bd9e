"""`deepspeed.utils.numa`: lists of cores, and the numactl command that binds a rank to its share of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder

_DENIED = "not permitted"  # in a container without the capability to set a memory policy


def get_numa_cores() -> list[list[int]]:
    """The cores of each NUMA node, as numactl lists them; empty where it is not installed."""
    try:
        text = subprocess.check_output(["numactl", "--hardware"]).decode()
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["node"] and words[2:3] == ["cpus:"]:
            found.append([int(core) for core in words[3:]])
    return found


@raises_theirs
def parse_range(rng: str) -> range:
    """The numbers of "3" or "2-4".

    Raises:
        UsageError: it is neither.
    """
    first, _, last = rng.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise UsageError(f"cores: {rng!r}: needs a number, or two such as 2-4, the smaller first")
    return range(int(first), int(last) + 1)


@raises_theirs
def parse_range_list(range_str: str) -> list[int]:
    """The numbers of "0,2-4,6".

    Raises:
        UsageError: they are not in ascending order.
    """
    found: list[int] = []
    for text in range_str.split(","):
        numbers = parse_range(text)
        if found and numbers[0] <= found[-1]:
            raise UsageError(
                f"cores: {range_str!r}: ranges must be in ascending order and must not overlap"
            )
        found += numbers
    return found


def bound_cores(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> list[int]:
    """The cores of one rank of a host: its share of the list, or of all cores without one.

    Raises:
        UsageError: there are fewer cores than ranks.
    """
    every = parse_range_list(bind_core_list) if bind_core_list else sorted(os.sched_getaffinity(0))
    each = len(every) // num_local_procs
    if each < 1:
        raise UsageError(
            f"{len(every)} cores for {num_local_procs} ranks: each rank needs one; start fewer"
        )
    return every[each * local_rank : each * (local_rank + 1)]


def numactl_options(cores: Sequence[int], memory: Sequence[str]) -> list[str]:
    """`memory`, and -C with the cores as text, such as "0-3,8"."""
    texts = []
    for _, group in groupby(enumerate(cores), lambda pair: pair[1] - pair[0]):
        run = [core for _, core in group]
        texts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return [*memory, "-C", ",".join(texts)]


@raises_theirs
def get_numactl_cmd(
    bind_core_list: str | None, num_local_procs: int, local_rank: int
) -> tuple[int, list[str]]:
    """(cores of each rank, the words that go before the command of local rank `local_rank`).

    A memory policy, and then the binding itself, is left out where this machine does not permit it.

    Raises:
        UsageError: numactl is not installed, KMP_AFFINITY is set, or there are fewer cores than ranks.
        RuntimeError: numactl refuses the cores for another reason.
    """
    if "KMP_AFFINITY" in os.environ:
        raise UsageError("KMP_AFFINITY is set, and it contradicts a binding by numactl: unset it")
    if shutil.which("numactl") is None:
        raise UsageError("ranks are bound to cores by numactl, which is not installed: install it")
    cores = bound_cores(bind_core_list, num_local_procs, local_rank)
    memory = _memory_of(cores)
    for options in [numactl_options(cores, memory)] + (
        [numactl_options(cores, [])] if memory else []
    ):
        if _is_permitted(options):
            return len(cores), ["numactl", *options]
    return len(cores), []


def _memory_of(cores: Sequence[int]) -> list[str]:
    """-m and the NUMA nodes that have all of these cores; -p and its own memory where that has no cores."""
    nodes = get_numa_cores()
    owners = [node for node, own in enumerate(nodes) if own and set(cores) <= set(own)]
    if not owners:
        return []
    bare = [node for node, own in enumerate(nodes) if not own]
    if bare and 2 * len(bare) == len(nodes):  # each node with cores has one of fast memory
        with_cores = [node for node, own in enumerate(nodes) if own]
        return ["-p", str(bare[with_cores.index(owners[0])])]
    return ["-m", ",".join(map(str, owners))]


def _is_permitted(options: Sequence[str]) -> bool:
    done = subprocess.run(["numactl", *options, "true"], capture_output=True, text=True)
    if done.returncode and _DENIED not in done.stderr:
        raise RuntimeError(f"numactl {' '.join(options)}: {done.stderr.strip()}")
    return not done.returncode


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]
