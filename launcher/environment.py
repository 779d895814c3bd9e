"""`xds env`: versions and devices of this machine, and settings that cost speed, each with its remedy.

It must work on a broken installation: a part that is missing or fails yields a line with the error. Versions of
the system come from torch.utils.collect_env.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ..ops.device import (
    KINDS,
    PREFIXES,
    SLOW,
    VISIBLE,
    cards_of_nvidia,
    has_backend,
    name_here,
    nccl_version,
    num_devices,
    num_devices_of_driver,
    present,
    versions,
)
from ..utils.errors import BuildError, UsageError
from ..utils.quoting import escaped, printable
from ..utils.version import __version__
from .command_line.options import Parser

_MIN_TORCH = (2, 11)
VECTOR_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
# a container's default of 64 MiB is too small for one batch of a data loader
_MIN_SHM_BYTES = 1 << 30
_MIN_OPEN_FILES = 4096
_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "XDS_",
    "OMP_",
    "TORCH_",
    "TORCHDYNAMO_",
    "PYTORCH_",
    *PREFIXES,
)
# variables that the launcher sets for its own ranks, and those that may hold a secret
_NOT_SHOWN = re.compile(
    r"XDS_(RUN|LOG)_FOLDER|XDS_GRACE_FILE|.*(TOKEN|SECRET|PASSW|KEY|CREDENTIAL).*"
)
_ON = r"1|true|yes|on|y"
# variables, set for debugging and left, whose value costs speed: a pattern of the values, and what they do
_SLOW_VARIABLES = {
    **SLOW,
    "TORCH_COMPILE_DISABLE": (_ON, "nothing is compiled, whatever the config says; unset it"),
    "TORCH_DISTRIBUTED_DEBUG": (
        "detail",
        "each collective is compared over all ranks first; unset it",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "the host waits for each collective; unset it"),
    "NCCL_P2P_DISABLE": (r"[1-9]\d*", "no NVLink or PCIe between GPUs, but host memory; unset it"),
    "NCCL_IB_DISABLE": (r"[1-9]\d*", "sockets instead of InfiniBand or RoCE; unset it"),
    "NCCL_DEBUG": ("trace", "writes a line for each call; use WARN or INFO"),
}


@final
@dataclass(frozen=True)
class Line:
    """A value of this machine; `remedy` describes what to do if it is bad."""

    key: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: {self.value}" + (f"  -> {self.remedy}" if self.remedy else "")
        return escaped(text)


def main(argv: Sequence[str]) -> int:
    """Print the lines. Always returns 0: a bad value is not an error."""
    parser = Parser(
        prog="xds env", description="Print versions, devices and slow settings of this machine."
    )
    more = parser.parse_known_args(list(argv))[1]
    if more:
        raise UsageError(
            f"xds env {printable(' '.join(more))}: takes no options; it prints this machine. Compare with"
            " another one by `diff <(xds env) <(ssh HOST xds env)`"
        )
    for line in lines():
        print(line, flush=True)
    return 0


def lines() -> Iterator[Line]:
    """Every line, in the order in which it is printed."""
    for probe in PROBES:
        try:
            yield from probe()
        except Exception as error:  # report the error as the value
            key = probe.__name__.replace("_", " ")
            yield Line(key, f"unknown, {type(error).__name__}: {error}")


# -- versions and devices ---------------------------------------------------------------------------------


def xds_and_python() -> Iterator[Line]:
    """The versions of xds and Python, and where they are."""
    yield Line("xds", __version__)
    yield Line("hostname", platform.node() or "unknown")
    yield Line("xds folder", str(Path(__file__).resolve().parents[1]))
    yield Line("python", platform.python_version())
    yield Line("interpreter", sys.executable)


def torch_and_backends() -> Iterator[Line]:
    """torch, what it is built for, and its communication backends."""
    try:
        import torch
    except Exception as error:  # a broken install raises OSError and others
        yield Line("torch", f"cannot be imported, {type(error).__name__}: {error}", "install torch")
        return
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    yield Line(
        "torch", torch.__version__, "too old; xds needs 2.11 or later" * (version < _MIN_TORCH)
    )
    built = [f"{name} {release}" for name, release in versions().items()]
    yield Line("torch built for", ", ".join(built) or "CPU")
    own = present().backend
    backends = {name: has_backend(name) for name in dict.fromkeys(("gloo", "nccl", "mpi", own))}
    found = ", ".join(
        f"{name} {'yes' if is_there else 'no'}" for name, is_there in backends.items()
    )
    remedy = f"devices without {own}: install a build of torch that has it"
    yield Line("backends", found, remedy * (not backends[own]))
    if backends["nccl"]:
        yield Line("nccl", nccl_version())


def system() -> Iterator[Line]:
    """The system, compiler, driver and CPU, as torch.utils.collect_env finds them."""
    from torch.utils import collect_env as torchs

    collect_env: Any = torchs  # not annotated
    yield Line("system", f"{collect_env.get_os(collect_env.run)}, Linux {platform.release()}")
    gcc = collect_env.get_gcc_version(collect_env.run)
    remedy = "install g++; without it native ops fall back to torch, which is slower"
    yield Line("gcc", gcc or "missing", "" if gcc else remedy)
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if driver:
        yield Line("driver", driver)
    yield from cpu()
    yield Line("cores", f"{_cores()} usable of {os.cpu_count()}")
    yield Line("memory", _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def cpu() -> Iterator[Line]:
    """The CPU's name, and the vector extensions that the kernels use."""
    try:
        import cpuinfo

        info = dict(cpuinfo.get_cpu_info())
    except Exception:  # not installed, or an architecture that it does not know
        info = {}
    flags = info.get("flags", ())
    vectors = [name for name in VECTOR_FLAGS if name in flags]
    yield Line("cpu", str(info.get("brand_raw") or platform.machine()))
    yield Line("cpu vectors", ", ".join(vectors) or "none known")


def devices() -> Iterator[Line]:
    """The device that ranks use, what is slow there, and the cards of NVIDIA."""
    import torch

    from ..ops.libraries import optimizer_library

    here, count = present(), num_devices()
    is_unused = count == 0 and num_devices_of_driver() > 0
    remedy = (
        f"a driver, but no GPU for torch: check {KINDS[name_here()].visible}, or install its build"
    )
    yield Line("gpus", str(count), remedy * is_unused)
    missing = ", ".join(here.missing)
    yield Line("device", f"{here.device.type} ({here.name}), {here.backend}", missing)
    if not optimizer_library(here.device):
        yield Line(
            "native ops", "none for this device", "their torch versions run, which are slower"
        )
    cards, built = cards_of_nvidia()
    for index, card in enumerate(cards):
        value = f"{card.name}, {_gib(card.total_memory)}, sm_{card.major}{card.minor}"
        is_foreign = bool(built) and not _has_kernels(card.major, card.minor, built)
        yield Line(f"gpu {index}", value, "install a torch that is built for it" * is_foreign)
    if cards and cards[0].major >= 8:
        precision = torch.get_float32_matmul_precision()
        remedy = (
            'for fp32 training call torch.set_float32_matmul_precision("high"), which uses TF32'
        )
        yield Line("fp32 products", precision, remedy * (precision == "highest"))


def _has_kernels(major: int, minor: int, built: Sequence[str]) -> bool:
    """A card runs kernels of its major version up to its minor version, and compiles PTX of older ones."""
    for name in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if found and (int(found[2]), int(found[3])) <= (major, minor):
            if found[1] == "compute" or int(found[2]) == major:
                return True
    return False


# -- settings ---------------------------------------------------------------------------------------------


def limits() -> Iterator[Line]:
    """Shared memory for data loaders and NCCL, and the number of open files."""
    total = shutil.disk_usage("/dev/shm").total
    remedy = "small; start the container with --shm-size=8g, or --ipc=host"
    yield Line("/dev/shm", _gib(total), remedy * (total < _MIN_SHM_BYTES))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES
    more = hard if hard != resource.RLIM_INFINITY else 65536
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    yield Line(
        "open files", f"{shown} (ulimit -n)", f"low for data loaders; `ulimit -n {more}`" * is_low
    )


def shared_memory() -> Iterator[Line]:
    """Whether CPU ranks of this machine can read each other's memory. Nothing is built for it."""
    from ..ops.build import build
    from ..ops.comm.memory.segment import NoSegment, segment
    from ..ops.libraries import LIBRARIES

    why_not, remedy = "", ""
    try:
        if build.find(LIBRARIES["memory"]) is None:
            yield Line("shared memory", "the native library is not built yet, but on first use")
            return
        segment()
    except BuildError as error:
        why_not, remedy = (
            f"the native library is missing: {error.what}",
            "see `xds ops build memory`",
        )
    except NoSegment as error:
        why_not, remedy = str(error), "see docs/troubleshooting.md, A slow network"
    value = (
        f"CPU ranks send messages through gloo: {why_not}"
        if why_not
        else "CPU ranks read each other's memory"
    )
    yield Line("shared memory", value, remedy)


def variables() -> Iterator[Line]:
    """The environment variables that NCCL, gloo, xds, devices, OpenMP and torch read."""
    for key, value in sorted(os.environ.items()):
        if key.startswith(_PREFIXES) and not _NOT_SHOWN.fullmatch(key):
            yield Line(f"${key}", value, slow_variable(key, value.strip()))


def slow_variable(key: str, value: str) -> str:
    """What to do about a variable that costs speed; "" if it costs nothing."""
    pattern, remedy = _SLOW_VARIABLES.get(key, ("", ""))
    if pattern and re.fullmatch(pattern, value, re.IGNORECASE):
        return remedy
    cores = _cores()
    if key == "OMP_NUM_THREADS" and value.isdecimal() and int(value) > cores:
        return f"more threads than the {cores} cores; unset it, and xds sets it to cores / ranks"
    if key in VISIBLE and value in ("", "-1"):
        return "hides every device; unset it to use them"
    return ""


PROBES: tuple[Callable[[], Iterator[Line]], ...] = (
    *(xds_and_python, torch_and_backends, system, devices, limits, shared_memory, variables),
)


# -- helpers ----------------------------------------------------------------------------------------------


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
