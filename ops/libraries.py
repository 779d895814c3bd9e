"""The native libraries: which there are, and loading one, which builds it the first time.

Loading adds kernels for one device to ops that exist already (ops/kernels): with or without a library the
same ops are called, and without one they run their plain torch reference.
"""

from __future__ import annotations

import platform
import threading
import warnings
from typing import TYPE_CHECKING, Any, final

from ..utils.errors import BuildError
from .build import build_cache
from .build.build import build, find, find_or_build
from .build.compilers import ARCHS_VARIABLE, architectures, find_nvcc, find_torch, release, runs_on
from .build.plan import Library, Source

if TYPE_CHECKING:
    import torch  # `xds ops list` does without

__all__ = [
    "LIBRARIES",
    "BuildError",
    "NativeOpsWarning",
    "build",
    "find",
    "is_loaded",
    "load",
    "optimizer_library",
    "why_not",
]

# the same result from every instruction set: no contraction, no reordering
_CPU = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_INSTRUCTION_SETS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mprfchw"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprfchw"),
        "-mprefer-vector-width=512",
    ),
}
OPTIMIZERS = ("adam", "lion", "adagrad", "sgd", "lamb", "square_sum")
QUANTIZE = ("quantize", "signs")


class NativeOpsWarning(RuntimeWarning):
    """A native library is not there, and ops run their slower torch version."""


def _cpu_library() -> Library:
    names = list(_INSTRUCTION_SETS) if platform.machine() == "x86_64" else ["baseline"]
    kernels = [
        Source(
            "cpu/kernels.cpp",
            f"kernels_{name}.o",
            (*_CPU, f"-DXDS_ISA={name}", *_INSTRUCTION_SETS[name]),
        )
        for name in names
    ]
    return Library("cpu", "cpu", (Source("cpu/dispatch.cpp", "dispatch.o", _CPU), *kernels))


def _cuda_library(name: str, files: tuple[str, ...]) -> Library:
    return Library(name, "cuda", tuple(Source(f"cuda/{file}.cu", f"{file}.o") for file in files))


LIBRARIES = {
    library.name: library
    for library in (
        _cpu_library(),
        _cuda_library("cuda_optimizers", OPTIMIZERS),
        _cuda_library("cuda_quantize", QUANTIZE),
    )
}


def optimizer_library(device: torch.device) -> str:
    """Name of the library with the optimizers of a device; "": there is none."""
    return {"cpu": "cpu", "cuda": "cuda_optimizers"}.get(device.type, "")


def is_loaded(name: str) -> bool:
    """Whether the kernels of a library are registered in this process."""
    return _shelf.is_loaded(name)


def load(name: str, *, require: bool = False) -> bool:
    """Register the kernels of a library, building it first where it is not in the cache.

    False: it cannot be built or loaded here; the first time a NativeOpsWarning says why. A failure is not
    tried again in this process. Raises BuildError instead where it is required.
    """
    return _shelf.load(LIBRARIES[name], is_required=require)


def why_not(library: Library) -> str:
    """Why a library cannot be loaded on this machine, as far as that is known without compiling it."""
    try:
        check(library)
        return ""
    except BuildError as error:
        return error.what


def check(library: Library) -> None:
    """Raises BuildError: torch or a compiler for this library's device is not there, or they do not fit."""
    if library.device != "cuda":
        return
    built_for = find_torch().cuda
    if not built_for:
        raise BuildError("this torch is built without CUDA", remedy="install a CUDA build of torch")
    nvcc = find_nvcc(build_cache.default_folder())
    major, minor = release(nvcc)
    if major != int(built_for.partition(".")[0]):
        raise BuildError(
            f"torch is built with CUDA {built_for}, but {nvcc.words[0]} is of CUDA {major}.{minor}",
            remedy=f"set CUDA_HOME to a toolkit of CUDA {built_for}",
        )


@final
class Shelf:
    """What this process has loaded, and what it could not: torch registers a kernel once and for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, int] = {}
        self._failures: dict[str, BuildError] = {}

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded

    def load(self, library: Library, *, is_required: bool) -> bool:
        """See `load`."""
        with self._lock:
            if library.name in self._loaded:
                return True
            failure = self._failures.get(library.name)
            if failure is None:
                try:
                    self._loaded[library.name] = _open(library)
                    return True
                except BuildError as error:
                    failure = self._failures[library.name] = error
                    if not is_required:
                        warnings.warn(_told(library, error), NativeOpsWarning, stacklevel=3)
        if is_required:
            raise failure
        return False


_shelf = Shelf()


def _open(library: Library) -> int:
    """Load it into torch; the file descriptor that keeps `xds ops clean` off it."""
    import torch

    check(library)
    if library.device == "cuda":
        if not torch.cuda.is_available():
            raise BuildError("torch sees no GPU", remedy="see CUDA_VISIBLE_DEVICES and the driver")
        _check_gpu(*torch.cuda.get_device_capability())
    entry = find_or_build(library)
    fd = build_cache.use(entry)
    try:
        registry: Any = torch.ops  # not annotated
        registry.load_library(str(entry.path))
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"the native library {library.name} cannot be loaded",
            lines=str(error).splitlines(),
            remedy="`xds ops clean --all` and try again",
        ) from error
    return fd


def _check_gpu(major: int, minor: int) -> None:
    archs = architectures(find_nvcc(build_cache.default_folder()))
    if not runs_on(archs, (major, minor)):
        raise BuildError(
            f"no code is made for this GPU (sm_{major}{minor}), only for sm_{', sm_'.join(archs)}",
            remedy=f'set {ARCHS_VARIABLE} to "{major}{minor}"; kernels need 80 or newer',
        )


def _told(library: Library, error: BuildError) -> str:
    return (
        f"native ops of {library.name!r} are not used, their torch versions are, which are slower: {error}\n"
        'Set "ops": {"require": true} to make this an error, or "native": false to not build at all.'
    )
