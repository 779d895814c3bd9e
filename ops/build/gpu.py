"""The native libraries for GPUs of NVIDIA: their sources, and what they need of torch, nvcc and the card."""

from __future__ import annotations

from ...utils.errors import BuildError
from . import build_cache
from .build import Library, Source
from .compilers import ARCHS_VARIABLE, architectures, find_nvcc, find_torch, release, runs_on

OPTIMIZERS = ("adam", "frozen_adam", "lion", "adagrad", "sgd", "lamb", "square_sum", "decide")
QUANTIZE = ("quantize", "signs")


def _library(name: str, files: tuple[str, ...]) -> Library:
    return Library(name, "cuda", tuple(Source(f"cuda/{file}.cu", f"{file}.o") for file in files))


GPU_LIBRARIES = (_library("cuda_optimizers", OPTIMIZERS), _library("cuda_quantize", QUANTIZE))


def check_toolkit() -> None:
    """Raises BuildError: torch or nvcc is missing, or their versions differ."""
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


def check_card(capability: tuple[int, int] | None) -> None:
    """Raises BuildError: there is no GPU, None, or the code is built for others."""
    if capability is None:
        raise BuildError("torch finds no GPU", remedy="check CUDA_VISIBLE_DEVICES and the driver")
    major, minor = capability
    archs = architectures(find_nvcc(build_cache.default_folder()))
    if not runs_on(archs, capability):
        raise BuildError(
            f"no code is built for this GPU (sm_{major}{minor}), only for sm_{', sm_'.join(archs)}",
            remedy=f'set {ARCHS_VARIABLE} to "{major}{minor}"; kernels need 80 or newer',
        )
