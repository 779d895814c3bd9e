"""What is installed: Python, packages, torch and its backends, compilers, native libraries, variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....ops.build.plan import Library
from ....utils.errors import BuildError
from ....utils.version import __version__
from . import slow_variables
from .line import Line, first_output, output

_MIN_TORCH = (2, 11)
_PYTHONS = ((3, 10), (3, 13))
_PACKAGES = ("pydantic", "tqdm")
_OPTIONAL_PACKAGES = ("numpy", "safetensors", "transformers")
_PREFIXES = (
    *("NCCL_", "GLOO_", "XDS_", "OMP_", "TORCH_", "TORCHDYNAMO_", "PYTORCH_", "UCX_", "FI_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_TF32_"),
)
# variables that the launcher sets for its own ranks, and those that may hold a secret
_NOT_SHOWN = re.compile(r"XDS_RUN_FOLDER|XDS_GRACE_FILE|.*(TOKEN|SECRET|PASSW|KEY|CREDENTIAL).*")
_SLOW = "native ops fall back to torch, which is slower"


def xds() -> Iterator[Line]:
    """The version of xds, and its folder."""
    yield Line("xds", __version__)
    yield Line("xds folder", str(Path(__file__).resolve().parents[3]))


def python() -> Iterator[Line]:
    """The interpreter, the system, and the packages that xds needs."""
    first, last = _PYTHONS
    is_tested = first <= sys.version_info[:2] <= last
    tested = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    remedy = "" if is_tested else f"not tested; use Python {tested}"
    yield Line("python", platform.python_version(), remedy)
    yield Line("interpreter", sys.executable)
    yield Line("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Line("libc", " ".join(platform.libc_ver()) or "unknown")
    for package in _PACKAGES:
        version = package_version(package)
        yield Line(package, version or "missing", "" if version else f"`pip install {package}`")
    for package in _OPTIONAL_PACKAGES:
        yield Line(package, package_version(package) or "not installed")


def package_version(name: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_and_backends() -> Iterator[Line]:
    """torch, what it is built for, and its available communication backends."""
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
    if torch.version.cuda:
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]
        yield Line("cudnn", str(cudnn or "none"))
    if not dist.is_available():
        yield Line(
            "backends", "none", "this torch has no torch.distributed; install a standard build"
        )
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


def compilers() -> Iterator[Line]:
    """The compilers and tools for native ops."""
    for name in ("gcc", "g++"):
        version = first_output(name, "--version")
        remedy = "" if version else f"install {name}; without it {_SLOW}"
        yield Line(name, version or "missing", remedy)
    ninja = first_output("ninja", "--version") or package_version("ninja")
    remedy = "" if ninja else f"`pip install ninja`; without it {_SLOW}"
    yield Line("ninja", ninja or "missing", remedy)
    nvcc = _nvcc_version()
    needs_nvcc = not nvcc and shutil.which("nvidia-smi") is not None
    remedy = "install the CUDA toolkit or set CUDA_HOME; without it " + _SLOW
    yield Line("nvcc", nvcc or "missing", remedy * needs_nvcc)
    triton = package_version("triton") or package_version("pytorch-triton")
    needs_triton = not triton and shutil.which("nvidia-smi") is not None
    remedy = "`pip install triton`; without it torch.compile cannot compile for GPUs"
    yield Line("triton", triton or "not installed", remedy * needs_triton)


def _nvcc_version() -> str:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    for program in ("nvcc", os.path.join(home, "bin", "nvcc")):
        release = re.search(r"release ([\d.]+)", output(program, "--version"))
        if release:
            return release.group(1)
    return ""


def native_ops() -> Iterator[Line]:
    """The state of each native library: built, compiled on first use, or why it cannot be built."""
    from ....ops import libraries

    for library in libraries.LIBRARIES.values():
        yield _native_op(library)


def _native_op(library: Library) -> Line:
    from ....ops import libraries
    from ....ops.build import build

    key = f"ops {library.name}"
    has_device = library.device == "cpu" or bool(shutil.which("nvidia-smi"))
    reason = libraries.why_not(library)
    try:
        entry = build.find(library) if not reason else None
    except BuildError as error:
        entry, reason = None, error.what
    if reason:
        remedy = f"see `xds ops build {library.name}`; without it {_SLOW}"
        return Line(key, f"cannot be built: {reason}", remedy * has_device)
    if entry:
        return Line(key, "built")
    waits = library.device != "cpu" and has_device
    remedy = f"the first run waits for the compiler; `xds ops build {library.name}`" * waits
    return Line(key, "not built yet, compiled on first use", remedy)


def variables() -> Iterator[Line]:
    """The environment variables that NCCL, gloo, xds, CUDA, OpenMP or the network libraries read."""
    found = {key: value for key, value in os.environ.items() if key.startswith(_PREFIXES)}
    for key, value in sorted(found.items()):
        if not _NOT_SHOWN.fullmatch(key):
            yield Line(f"${key}", value, _variable_remedy(key, value))


def _variable_remedy(key: str, value: str) -> str:
    """The remedy if the value is certainly wrong or costs speed, else ""."""
    if key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        return _interface_remedy(value)
    if key == "CUDA_VISIBLE_DEVICES" and value.strip() in ("", "-1"):
        return "hides every GPU; unset it to use them"
    if key == "OMP_NUM_THREADS" and not value.replace(",", "").isdigit():
        return "not a number; unset it, and xds sets it to cores / ranks"
    has_gpu = shutil.which("nvidia-smi") is not None
    return slow_variables.remedy(
        key, value, has_gpu=has_gpu, num_cores=slow_variables.usable_cores()
    )


def _interface_remedy(value: str) -> str:
    """The remedy for unknown names. NCCL takes prefixes, ^ to exclude, = for exact names; gloo only names."""
    try:
        there = os.listdir("/sys/class/net")
    except OSError:  # not Linux: nothing to compare with
        return ""
    if not value or value.startswith("^"):
        return ""
    names = [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
    missing = [name for name in names if not any(one.startswith(name) for one in there)]
    if not missing:
        return ""
    known = ", ".join(sorted(there))
    return f"there is no interface {', '.join(missing)}; use one of {known}"
