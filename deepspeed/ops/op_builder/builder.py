"""`OpBuilder`: DeepSpeed's way to ask for a native op. xds builds its own ops on first use."""

from __future__ import annotations

from typing import Any

from ....ops.build import build_cache
from ....ops.build.compilers import architectures, find_nvcc, release
from ....utils.errors import BuildError, UsageError
from ...errors import raises_theirs
from ...missing import placeholder


class MissingCUDAException(Exception):
    """No CUDA compiler is found."""


class CUDAMismatchException(Exception):
    """torch is built with another CUDA than that of the compiler."""


class OpBuilder:
    """One op of DeepSpeed by name.

    NAME: its key in `ALL_OPS` and `__compatible_ops__`. BUILD_VAR: DeepSpeed's variable, without effect here.
    """

    NAME = ""
    BUILD_VAR = ""
    needs = "xds has no such op"  # why `load` cannot give it

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` gives the op on this machine."""
        return False

    @raises_theirs
    def load(self, verbose: bool = False) -> Any:
        """The op, as an object with DeepSpeed's functions.

        Raises:
            UsageError: xds has no such op.
        """
        raise UsageError(
            f"{type(self).__name__}.load(): the op {self.name!r} is not covered: {self.needs}"
        )

    def builder(self) -> Any:
        """DeepSpeed's extension for setup.py. Raises as `load`: xds builds its ops itself."""
        return OpBuilder.load(self)

    jit_load = load


class CUDAOpBuilder(OpBuilder):
    """The base of the ops that DeepSpeed has for GPUs only."""


def probe_is_compatible(builder: OpBuilder, verbose: bool = False) -> bool:
    """`builder.is_compatible()`, and False where that fails."""
    try:
        return builder.is_compatible(verbose)
    except Exception:  # noqa: BLE001 (a foreign builder)
        return False


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """(major, minor) of the CUDA compiler.

    Raises:
        MissingCUDAException: there is none.
    """
    try:
        major, minor = release(find_nvcc(build_cache.default_folder()))
    except BuildError as error:
        raise MissingCUDAException(f"{name or 'op'}: {error}") from None
    return major, minor


def get_default_compute_capabilities() -> str:
    """The GPU architectures that native ops are built for, such as "8.0;9.0"; "" without a CUDA compiler."""
    try:
        archs = architectures(find_nvcc(build_cache.default_folder()))
    except BuildError:
        return ""
    return ";".join(f"{arch[:-1]}.{arch[-1]}" for arch in archs)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "get_default_compute_capabilities",
    "installed_cuda_version",
    "probe_is_compatible",
]
