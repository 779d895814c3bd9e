"""Devices, memory, limits, disks and the clock of this machine."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ....utils.available_memory import container_limit_bytes
from .line import GIB, Line, first_output, gib, output

# a container's default of 64 MiB is too small for one batch of a data loader
MIN_SHM_BYTES = 1 * GIB
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
MIN_DISK_BYTES = 1 * GIB


def name() -> Iterator[Line]:
    """The machine's own host name."""
    yield Line("hostname", platform.node() or "unknown", varies=True)


def devices() -> Iterator[Line]:
    """The GPUs that torch sees, and their connections as reported by nvidia-smi."""
    driver = first_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        yield Line("driver", driver)
    try:
        import torch
    except Exception:  # already reported by torch_and_backends
        return
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_unused = bool(driver) and num_gpus == 0
    remedy = "a driver, but no GPU for torch: check CUDA_VISIBLE_DEVICES, or install a CUDA build"
    yield Line("gpus", str(num_gpus), remedy * is_unused)
    for index in range(num_gpus):
        card = torch.cuda.get_device_properties(index)
        capability = f"sm_{card.major}{card.minor}"
        yield Line(f"gpu {index}", f"{card.name}, {gib(card.total_memory)}, {capability}")
        free, _ = torch.cuda.mem_get_info(index)
        yield Line(f"gpu {index} free", gib(free), _used(free, card.total_memory), varies=True)
    if driver:
        yield from topology(output("nvidia-smi", "topo", "-m"))


def _used(free: int, total: int) -> str:
    is_used = free < total * 0.9
    return "another process uses it; see `nvidia-smi`" * is_used


def topology(text: str) -> Iterator[Line]:
    """A line for each GPU of nvidia-smi's matrix: NV18 is 18 NVLinks, PIX one switch, SYS between sockets."""
    # nvidia-smi underlines its heading with escape sequences, also when it writes to a pipe
    rows = [row.split() for row in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if row.strip()]
    if not rows:
        return
    columns = [word for word in rows[0] if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+", word)]
    for row in rows[1:]:
        if not re.fullmatch(r"GPU\d+", row[0]):
            continue
        links = [
            f"{other} {link}"
            for other, link in zip(columns, row[1:], strict=False)
            if other != row[0]
        ]
        if links:
            yield Line(f"links of gpu {row[0][3:]}", ", ".join(links))


def memory() -> Iterator[Line]:
    """The memory of the machine and of this container."""
    text = Path("/proc/meminfo").read_text()
    kib = {key: int(value) for key, value in re.findall(r"(?m)^(\w+):\s+(\d+) kB", text)}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    yield Line("memory", gib(total))
    yield Line("memory available", gib(free), varies=True)
    limit = container_limit_bytes()
    is_limited = bool(limit) and limit < total
    yield Line("memory limit of this container", gib(limit) if is_limited else "none")


def limits() -> Iterator[Line]:
    """Shared memory and the limits of `ulimit`."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Line("/dev/shm", "missing", "data loaders and NCCL need it; mount a tmpfs there")
    else:
        remedy = "small; start the container with --shm-size=8g, or --ipc=host"
        is_small = usage.total < MIN_SHM_BYTES
        yield Line("/dev/shm", gib(usage.total), remedy * is_small)
        is_full = usage.free < min(MIN_SHM_BYTES, usage.total) / 2
        yield Line(
            "/dev/shm free",
            gib(usage.free),
            "full; remove files that are left there" * is_full,
            True,
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = _limit(hard) if hard != resource.RLIM_INFINITY else "65536"
    remedy = f"low for data loaders; `ulimit -n {more}`" * _is_low(soft, MIN_OPEN_FILES)
    yield Line("open files", f"{_limit(soft)} (ulimit -n)", remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    remedy = "low; raise `nproc` in limits.conf, or the container's --pids-limit"
    yield Line("processes", f"{_limit(soft)} (ulimit -u)", remedy * _is_low(soft, MIN_PROCESSES))
    yield _locked_memory()


def _locked_memory() -> Line:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    # InfiniBand locks the memory that it sends from; nothing else here needs locked memory
    is_low = soft != resource.RLIM_INFINITY and os.path.isdir("/sys/class/infiniband")
    remedy = "InfiniBand needs more; `ulimit -l unlimited`, or the container's --ulimit memlock=-1"
    return Line("locked memory", f"{text} (ulimit -l)", remedy * is_low)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _is_low(value: int, least: int) -> bool:
    return value != resource.RLIM_INFINITY and value < least


def disks() -> Iterator[Line]:
    """Free space for temporary files and compiled ops."""
    from ....ops.build import build_cache

    temporary = tempfile.gettempdir()
    yield Line("temporary files", temporary)
    yield _disk("temporary files free", temporary, "set TMPDIR to a larger disk")
    cache = str(build_cache.default_folder())
    yield Line("ops cache", cache)
    yield _disk("ops cache free", cache, "set XDS_CACHE_DIR to a larger disk")


def _disk(key: str, folder: str, remedy: str) -> Line:
    there = Path(folder)
    # not created yet: use the disk that it will be on
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Line(key, f"unknown, {error}", remedy, varies=True)
    if not os.access(there, os.W_OK):
        return Line(key, f"{gib(free)}, but {there} cannot be written", remedy, varies=True)
    return Line(key, gib(free), f"little; {remedy}" * (free < MIN_DISK_BYTES), varies=True)


def clock() -> Iterator[Line]:
    """Seconds since 1970. Printed last, to be compared with the clock of the machine that runs the query."""
    yield Line("clock", f"{time.time():.3f}", varies=True)
