"""Test helper: the kernels of the CPU, of CUDA compiled with g++ for the host, and of a GPU, called in one way.

On the host all code of a CUDA kernel runs except for hardware instructions (see cuda_on_host): arithmetic,
indices, barriers, launches, argument checks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from xds.ops.libraries import load

HERE = Path(__file__).parent
SOURCES = HERE / "cuda_on_host"
KERNELS = HERE.parents[1] / "ops" / "csrc" / "cuda"
TORCH = Path(torch.__file__).parent
FLAGS = (
    *("-x", "c++", "-std=c++17", "-Og", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c"),
    *("-Wno-unknown-pragmas", "-Wno-unused-parameter", "-DTORCH_TARGET_VERSION=0x020b000000000000"),
    *("-I", str(SOURCES), "-I", str(KERNELS), "-isystem", str(TORCH / "include")),
)
# accesses are calls, which the runtime answers; a pack begins where it may
KERNEL_FLAGS = (
    "-fsanitize=thread",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
)


def _key() -> str:
    """Of all that the library of `OnHost` is made from."""
    found = sha256(repr((FLAGS, KERNEL_FLAGS, torch.__version__)).encode())
    found.update(subprocess.check_output(["g++", "--version"]))
    for folder in (SOURCES, KERNELS):
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


class Kernels:
    """`each` runs a test once for each way in which these kernels may run on this machine."""

    device = torch.device("cpu")
    is_cuda = True

    def call(self, op: Any, *arguments: Any) -> Any:
        return op(*arguments)

    def each(self) -> Iterator[str]:
        yield "the only way"


class OnCpu(Kernels):
    is_cuda = False

    def __init__(self) -> None:
        load("cpu", require=True)

    def each(self) -> Iterator[str]:
        """With every instruction set of this processor."""
        for name in ("baseline", "avx2", "avx512"):
            with mock.patch.dict(os.environ, XDS_CPU_ISA=name):
                try:
                    torch.ops.xds.square_sum(torch.ones(1))
                except RuntimeError as error:
                    assert "this processor runs" in str(error)
                    continue
                yield name


def build_on_host(source: Path, library: Path) -> Path:
    """Compile kernels with g++ for the host, once for all processes that ask at a time."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            objects = [library.with_suffix(f".{name}.o") for name in ("kernels", "runtime")]
            part = library.with_suffix(".part")
            _run("g++", *FLAGS, *KERNEL_FLAGS, source, "-o", objects[0])
            _run("g++", *FLAGS, SOURCES / "runtime.cpp", "-o", objects[1])
            links = ("-L", TORCH / "lib", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl")
            _run("g++", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", *objects, "-o", part, *links)
            for path in objects:
                path.unlink()
            part.rename(library)
    return library


def _run(*command: Any) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


class OnHost(Kernels):
    """CUDA kernels over host memory: ops are sent on to them, and they take CPU tensors here.

    A race of two threads is an error of the launch. `folder` keeps the library, which takes 10 s to compile.
    """

    def __init__(self, folder: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip(
                "a GPU runs the kernels themselves, and one process registers a kernel once"
            )
        library = folder / f"{_key()}.so"
        if not library.exists():
            for older in folder.glob("*.so"):
                older.unlink(missing_ok=True)
        build_on_host(SOURCES / "kernels.cpp", library)
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

    def run_blocks(self, blocks: Sequence[int] = ()) -> None:
        """Run only these blocks of each grid from now on; none: all."""
        self._library.xds_run_blocks((ctypes.c_int64 * len(blocks))(*blocks), len(blocks))


class OnGpu(Kernels):
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        for library in ("cuda_optimizers", "cuda_quantize"):
            load(library, require=True)

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
