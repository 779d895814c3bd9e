"""`xds env`: versions, devices and limits of this machine, a line each, and remedies for bad ones.

It has to work where things are broken: a part that is missing or fails gives a line that says so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..ops.errors import UsageError

_GIB = 2**30
_MIN_SHM_BYTES = 1 * _GIB  # a container's usual 64 MiB do not hold one batch of a data loader
_MIN_OPEN_FILES = 4096
_MIN_TORCH = (2, 11)
_PYTHONS = ((3, 10), (3, 13))
_COMPILER_SECONDS = 10.0


@dataclass(frozen=True)
class Line:
    """One line of the answer; `remedy` says what to do where the value is bad."""

    key: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.value}" + (f"  -> {self.remedy}" if self.remedy else "")


def main(argv: Sequence[str]) -> int:
    """Print the lines; always 0: a bad value is for the reader to weigh."""
    if argv:
        raise UsageError(f"xds env = {' '.join(argv)}: takes no argument; leave it out")
    for line in lines():
        print(line, flush=True)
    return 0


def lines() -> Iterator[Line]:
    """Every line, in the order in which it is printed."""
    probes: tuple[Callable[[], Iterator[Line]], ...] = (
        _python,
        _torch,
        _devices,
        _cpu,
        _memory,
        _limits,
        _compilers,
    )
    yield Line("xds", f"{__version__} in {Path(__file__).resolve().parents[1]}")
    for probe in probes:
        try:
            yield from probe()
        except Exception as error:  # a probe that fails is an answer, too
            name = probe.__name__.lstrip("_")
            yield Line(name, f"unknown, {type(error).__name__}: {error}")


def _python() -> Iterator[Line]:
    first, last = _PYTHONS
    is_tested = first <= sys.version_info[:2] <= last
    tested = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    remedy = "" if is_tested else f"not tested; take Python {tested}"
    yield Line("python", f"{platform.python_version()} ({sys.executable})", remedy)
    yield Line("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for package in ("pydantic", "numpy", "tqdm"):
        yield Line(package, _package_version(package) or "missing")


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch() -> Iterator[Line]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken install raises OSError and others
        yield Line("torch", f"cannot be imported, {type(error).__name__}: {error}", "install torch")
        return
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    remedy = "" if version >= _MIN_TORCH else "too old; xds needs 2.11 or later"
    yield Line("torch", torch.__version__, remedy)
    yield Line("torch built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU")
    if not dist.is_available():
        yield Line("backends", "none", "this torch has no torch.distributed; install a usual build")
        return
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    needs_nccl = torch.cuda.is_available() and not backends["nccl"]
    found = ", ".join(
        f"{name} {'yes' if is_there else 'no'}" for name, is_there in backends.items()
    )
    yield Line("backends", found, "GPUs without nccl: install a CUDA build of torch" * needs_nccl)
    if backends["nccl"]:
        nccl: Any = torch.cuda.nccl  # not annotated
        yield Line("nccl", ".".join(map(str, nccl.version())))


def _devices() -> Iterator[Line]:
    driver = _first_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        yield Line("driver", driver)
    try:
        import torch
    except Exception:  # said already
        return
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_unused = bool(driver) and num_gpus == 0
    remedy = "a driver, but no GPU for torch: see CUDA_VISIBLE_DEVICES, or take a CUDA build"
    yield Line("gpus", str(num_gpus), remedy * is_unused)
    for index in range(num_gpus):
        card = torch.cuda.get_device_properties(index)
        capability = f"sm_{card.major}{card.minor}"
        yield Line(f"gpu {index}", f"{card.name}, {_gib(card.total_memory)}, {capability}")


def _cpu() -> Iterator[Line]:
    info = cpu_info()
    flags = set(info.get("flags", ()))
    simd = [flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    yield Line("cpu", str(info.get("brand_raw") or platform.processor() or "unknown"))
    yield Line("cpu vectors", ", ".join(simd) or "none known")
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Line("cores", f"{usable} usable of {os.cpu_count()}")


def cpu_info() -> dict[str, Any]:
    """What py-cpuinfo says about this machine's CPU; empty when it cannot say.

    It takes a second, so the answer is kept in the user's cache folder, by machine and CPU.
    """
    kept = _cache_folder() / f"cpu-{_cpu_key()}.json"
    try:
        answer: dict[str, Any] = json.loads(kept.read_text())
        return answer
    except (OSError, ValueError):  # not there yet, or not whole
        pass
    try:
        import cpuinfo

        answer = dict(cpuinfo.get_cpu_info())
    except Exception:  # not installed, or an unknown architecture
        return {}
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            json.dump(answer, file)
        os.replace(file.name, kept)
    except OSError:  # no home, or read-only: ask again next time
        pass
    return answer


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "xds"


def _cpu_key() -> str:
    """A name for this machine's CPU: one home folder may serve many machines."""
    seen = [platform.node(), platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    seen += re.findall(r"(?m)^(?:model name|model|stepping|flags|Features)\s*:.*", text)[:5]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def _memory() -> Iterator[Line]:
    text = Path("/proc/meminfo").read_text()
    kib = {name: int(value) for name, value in re.findall(r"(?m)^(\w+):\s+(\d+) kB", text)}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    limit = _container_limit_bytes()
    of_container = f", limit of this container {_gib(limit)}" if limit and limit < total else ""
    yield Line("memory", f"{_gib(total)}, {_gib(free)} available{of_container}")


def _container_limit_bytes() -> int:
    """The memory limit of the control group, 0 for none."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else 0
    return 0


def _limits() -> Iterator[Line]:
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Line("/dev/shm", "missing", "data loaders and NCCL need it; mount a tmpfs there")
    else:
        remedy = "small; start the container with --shm-size=8g, or --ipc=host"
        is_small = room.total < _MIN_SHM_BYTES
        yield Line("/dev/shm", f"{_gib(room.total)}, {_gib(room.free)} free", remedy * is_small)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES
    more = hard if hard != resource.RLIM_INFINITY else 65536
    remedy = f"low for data loaders; `ulimit -n {more}`"
    yield Line("open files", f"{soft} (ulimit -n)", remedy * is_low)


def _compilers() -> Iterator[Line]:
    slow = "native ops fall back to torch, which is slower"
    for name in ("gcc", "g++"):
        version = _first_output(name, "--version")
        yield Line(
            name, version or "missing", "" if version else f"install {name}; without it {slow}"
        )
    ninja = _first_output("ninja", "--version") or _package_version("ninja")
    remedy = "" if ninja else f"`pip install ninja`; without it {slow}"
    yield Line("ninja", ninja or "missing", remedy)
    nvcc = _nvcc_version()
    needs_nvcc = not nvcc and shutil.which("nvidia-smi") is not None
    remedy = "install the CUDA toolkit or set CUDA_HOME; without it " + slow
    yield Line("nvcc", nvcc or "missing", remedy * needs_nvcc)


def _nvcc_version() -> str:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    for program in ("nvcc", os.path.join(home, "bin", "nvcc")):
        release = re.search(r"release ([\d.]+)", _output(program, "--version"))
        if release:
            return release.group(1)
    return ""


def _first_output(*command: str) -> str:
    return _output(*command).partition("\n")[0].strip()


def _output(*command: str) -> str:
    """What a program prints, empty when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMPILER_SECONDS,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
