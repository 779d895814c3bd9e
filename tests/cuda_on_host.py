"""Test helper: compiles the CUDA kernels with g++ and tests/ops/cuda_on_host, and runs them without a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


class Host:
    """Kernels over host memory: ops are sent on to their CUDA kernels, which take CPU tensors here."""

    device = torch.device("cpu")

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self._library = ctypes.CDLL(str(library))
        self._library.xds_launches.restype = ctypes.c_int64
        self._library.xds_questions.restype = ctypes.c_int64
        self._keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def call(self, op: Any, *arguments: Any) -> Any:
        return op.redispatch(self._keys, *arguments)

    def launches(self, run: Callable[[], Any]) -> int:
        before = self._library.xds_launches()
        run()
        return int(self._library.xds_launches() - before)

    def questions(self, run: Callable[[], Any]) -> int:
        """How often `run` asks CUDA how many blocks of a kernel run at once."""
        before = self._library.xds_questions()
        run()
        return int(self._library.xds_questions() - before)

    def set_multiprocessors(self, count: int) -> None:
        self._library.xds_set_multiprocessors(count)


class Gpu:
    """The same on a real device."""

    device = torch.device("cuda", 0)

    def __init__(self, library: str) -> None:
        from xds.ops.libraries import load

        load(library, require=True)

    def call(self, op: Any, *arguments: Any) -> Any:
        return op(*arguments)

    def launches(self, run: Callable[[], Any]) -> int:
        """How many kernels run; memory copies and fills are not counted."""
        from torch.profiler import ProfilerActivity, profile

        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run()
            torch.cuda.synchronize()
        return sum(
            event.count
            for event in found.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA and "xds::" in event.key
        )


def host(name: str, folder: Path) -> Host:
    """The kernels of tests/ops/cuda_on_host/<name>.cpp, compiled into `folder`, in about 6 seconds."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels themselves, and one process registers a kernel once")
    library = folder / f"{name}.so"
    command = [
        *(
            "g++",
            "-x",
            "c++",
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            "-Werror",
        ),
        *("-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wl,-Bsymbolic"),
        *(
            "-fsanitize=alignment,bounds",
            "-fsanitize-undefined-trap-on-error",
        ),  # a pack begins where it may
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        *(
            "-I",
            str(HERE / "ops" / "cuda_on_host"),
            "-I",
            str(HERE.parent / "ops" / "csrc" / "cuda"),
        ),
        *("-isystem", str(_TORCH / "include")),
        *(str(HERE / "ops" / "cuda_on_host" / f"{name}.cpp"), "-x", "none", "-o", str(library)),
        *("-L", str(_TORCH / "lib"), "-ltorch_cpu", "-ltorch", "-lc10"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Host(library)


def gpu(library: str) -> Gpu:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Gpu(library)
