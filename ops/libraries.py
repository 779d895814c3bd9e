"""The native libraries of xds, and loading one, which builds it on first use.

Loading a library registers kernels for one device with existing ops (ops/kernels). The same ops are called
with or without a library; without one they run their plain torch reference.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import warnings
from typing import TYPE_CHECKING, Any, final

from ..utils.errors import BuildError
from .build import build_cache
from .build.build import Library, Source, build, find, find_or_build
from .build.gpu import GPU_LIBRARIES, check_card, check_toolkit
from .device import kind_of, nvidia_capability

if TYPE_CHECKING:
    import torch  # only for types: `xds ops list` does not import torch

__all__ = [
    "LIBRARIES",
    "BuildError",
    "NativeOpsWarning",
    "build",
    "find",
    "is_loaded",
    "load",
    "open_plain",
    "optimizer_library",
    "why_not",
]

# no contraction and no reordering, so that every instruction set gives the same result
_CPU = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_INSTRUCTION_SETS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mprfchw"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprfchw"),
        "-mprefer-vector-width=512",
    ),
}


class NativeOpsWarning(RuntimeWarning):
    """A native library is not available, so ops run their slower torch version."""


def _cpu_library() -> Library:
    names = list(_INSTRUCTION_SETS) if platform.machine() == "x86_64" else ["baseline"]
    kernels = [
        Source(
            f"cpu/{file}.cpp",
            f"{file}_{name}.o",
            (*_CPU, f"-DXDS_ISA={name}", *_INSTRUCTION_SETS[name]),
        )
        for file in ("kernels", "blocks")
        for name in names
    ]
    registering = [
        Source(f"cpu/{file}.cpp", f"{file}.o", _CPU) for file in ("dispatch", "blocks_dispatch")
    ]
    return Library("cpu", "cpu", (*registering, *kernels))


def _memory_library() -> Library:
    names = list(_INSTRUCTION_SETS) if platform.machine() == "x86_64" else ["baseline"]
    sums = [
        Source(
            "cpu/sums.cpp",
            f"sums_{name}.o",
            (*_CPU, f"-DXDS_ISA={name}", *_INSTRUCTION_SETS[name]),
        )
        for name in names
    ]
    calls = [
        Source(f"memory/{file}.cpp", f"{file}.o", _CPU)
        for file in ("calls", "process", "read_only")
    ]
    return Library("memory", "cpu", (*calls, *sums))


LIBRARIES = {
    library.name: library for library in (_cpu_library(), _memory_library(), *GPU_LIBRARIES)
}


def optimizer_library(device: torch.device) -> str:
    """Name of the library with the optimizers for a device; "" where there is none."""
    return kind_of(device.type).library


def is_loaded(name: str) -> bool:
    """Whether the kernels of a library are registered in this process."""
    return _loaded.is_loaded(name)


def load(name: str, *, require: bool = False) -> bool:
    """Register the kernels of a library. Builds it first where it is not in the cache.

    Returns False where it cannot be built or loaded; the first time a NativeOpsWarning gives the reason.
    After a failure this process does not try again. With `require` it raises BuildError instead.
    """
    return _loaded.load(LIBRARIES[name], is_required=require)


def open_plain(name: str) -> ctypes.CDLL:
    """A library of plain functions, not of kernels. Raises BuildError: it cannot be built or loaded."""
    path = find_or_build(LIBRARIES[name]).path
    _open(LIBRARIES[name])
    return ctypes.CDLL(str(path))


def why_not(library: Library) -> str:
    """Why a library cannot be loaded on this machine, as far as this is known without compiling it."""
    try:
        check(library)
        return ""
    except BuildError as error:
        return error.what


def check(library: Library) -> None:
    """Raises BuildError: torch or a compiler for the library's device is missing, or their versions differ."""
    if library.device != "cpu":
        check_toolkit()


@final
class LoadedLibraries:
    """The libraries that this process has loaded or failed to load. torch cannot unregister a kernel."""

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
                        warnings.warn(
                            _fallback_text(library, error), NativeOpsWarning, stacklevel=3
                        )
        if is_required:
            raise failure
        return False


_loaded = LoadedLibraries()  # a process loads a library once


def _open(library: Library) -> int:
    """Load it into torch. Returns the file descriptor that protects the library from `xds ops clean`."""
    import torch

    check(library)
    if library.device != "cpu":
        check_card(nvidia_capability())
    entry = find_or_build(library)
    fd = build_cache.use(entry)
    try:
        registry: Any = torch.ops  # not annotated
        registry.load_library(str(entry.path))
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"the native library {library.name} cannot be loaded",
            lines=str(error.__cause__ or error).splitlines(),  # torch names the file alone
            remedy="`xds ops clean --all` and try again",
        ) from error
    return fd


def _fallback_text(library: Library, error: BuildError) -> str:
    return (
        f"native ops of {library.name!r} are not used; their slower torch versions run instead: {error}\n"
        'Set "ops": {"require": true} to make this an error, or "native": false to not build them.'
    )
