"""A CUDA device on a machine without one: device/device.cpp, and the functions of torch.cuda over it.

The device is host memory, so every number is real. What it records and refuses, see device/clocks.h:

- an op that reads or writes bytes of another stream without waiting for it; memory that is freed while another
  stream uses it; tensors of the CPU among those of the device;
- copies from and to page-locked memory arrive late, when the host waits for them. Until then the target is NaN;
- each wait of the host is counted by its reason.

Not there: the time that anything takes, CUDA graphs, torch.compile, xds's own CUDA kernels (torch's ops run
instead, or the kernels of the CPU, see `use_host_kernels`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCES = Path(__file__).parent / "device"


def compiled() -> str:
    """The library, compiled once for these sources and this torch, in 14 seconds. Torch is not imported.

    XDS_REHEARSAL_LIBRARY names one that is compiled, for a process whose temporary folder is another.
    """
    if given := os.environ.get("XDS_REHEARSAL_LIBRARY"):
        return given
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    sources = sorted(SOURCES.iterdir())
    text = b"".join(path.read_bytes() for path in sources) + str(torch).encode()
    text += (torch / "version.py").read_bytes()
    name = f"xds-device-{hashlib.sha256(text).hexdigest()[:16]}-{os.getuid()}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        command = [
            "g++",
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++20",
            *include,
            str(SOURCES / "device.cpp"),
        ]
        command += [
            "-o",
            str(new),
            f"-L{torch}/lib",
            "-lc10",
            "-ltorch_cpu",
            f"-Wl,-rpath,{torch}/lib",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        new.rename(library)
    return str(library)


def load(library: str) -> None:
    """For a process that has not imported torch: torch asks once, at its import, whether there is CUDA."""
    assert "torch" not in sys.modules, "torch is imported already"
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import torch

    torch.ops.load_library(library)
    _replace_functions(torch)
    _replace_storage(torch)
    _tell_workers(torch)


def _replace_functions(torch: Any) -> None:
    ops, cuda = torch.ops.host_cuda, torch.cuda

    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device="cuda", priority=priority)

    class Event(torch.Event):  # type: ignore[misc]
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

        def elapsed_time(self, end: Any) -> float:
            if not all(ops.is_over(event.event_id) for event in (self, end)):
                raise RuntimeError("CUDA error: device not ready")
            return 1.0

    properties = SimpleNamespace(name="host memory", major=9, minor=0, total_memory=1 << 34)
    cuda._initialized = True
    for name, answer in {
        "_lazy_init": None,
        "init": None,
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "mem_get_info": (1 << 34, 1 << 34),
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_device_name": "host memory",
    }.items():
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda.Stream, cuda.Event = Stream, Event
    default = torch.accelerator.current_stream()
    cuda.default_stream = lambda device=None: default
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream()
    cuda.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    cuda.device = type("device", (contextlib.nullcontext,), {})  # torch asks for instances of it
    cuda.empty_cache = lambda: ops.note("empty cache")
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize()
    cuda.memory_allocated = cuda.memory_reserved = lambda device=None: ops.memory()[0]
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda device=None: ops.memory()[1]
    cuda.reset_peak_memory_stats = lambda device=None: ops.reset_peak()
    cuda.get_rng_state = lambda device=None: (
        torch.get_rng_state()
    )  # ops draw from the CPU's generator
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,)
    cuda.cudart = _Runtime


class _Runtime:
    """The functions of CUDA's runtime that the engine calls itself."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        import torch

        torch.ops.host_cuda.pin(address, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        import torch

        torch.ops.host_cuda.unpin(address)
        return 0


def _replace_storage(torch: Any) -> None:
    resize = torch.UntypedStorage.resize_

    def resized(self: Any, num_bytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, num_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(self)
        torch.ops.host_cuda.resize_storage(whole, num_bytes)
        return self

    def loaded(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        on_host = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return on_host.to("cuda").untyped_storage()

    torch.UntypedStorage.resize_ = resized
    torch.serialization.register_package(5, lambda storage: None, loaded)


def _tell_workers(torch: Any) -> None:
    """Waits in a thread that Python starts are counted apart; autograd's threads are not such."""
    run = threading.Thread.run

    def run_as_worker(self: threading.Thread) -> None:
        torch.ops.host_cuda.is_worker()
        run(self)

    threading.Thread.run = run_as_worker  # type: ignore[method-assign]


def use_host_kernels() -> None:
    """From now on a library of CUDA kernels is that of the CPU, whose every op is one launch."""
    from xds.ops import libraries

    open_library = libraries._open

    def opened(library: Any) -> int:
        import torch

        if library.device == "cuda":
            for name in torch._C._dispatch_get_all_op_names():
                if name.startswith("xds::") and name not in _served:
                    _served.add(name)
                    torch.ops.host_cuda.use_host_kernel(name)
        return open_library(libraries.LIBRARIES["cpu"])

    libraries._open = opened


_served: set[str] = set()


def waits_of_host(*, of_workers: bool = False) -> dict[str, int]:
    """How often the host has waited for the device, by reason. of_workers: in threads of Python instead."""
    import torch

    found = {}
    for line in torch.ops.host_cuda.counts():
        name, number = line.rsplit(" ", 1)
        if (
            name not in ("launch", "async_copy", "page_lock")
            and name.startswith("worker ") == of_workers
        ):
            found[name.removeprefix("worker ")] = int(number)
    return found


def num_page_locks() -> int:
    """How often memory of the host was page-locked: all streams wait for that, and it takes milliseconds."""
    import torch

    lines = (line.rsplit(" ", 1) for line in torch.ops.host_cuda.counts())
    return next((int(number) for name, number in lines if name == "page_lock"), 0)
