"""A device on a machine without one: device/device.cpp, and the functions of torch's module over it.

"cuda" has CUDA's name and place in torch. "xsim" has a name of its own (PrivateUse1): on it what asks for CUDA
fails. "plain" is xsim without streams, events, page-locked memory and fp64, as Apple's devices are.

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
from types import ModuleType, SimpleNamespace
from typing import Any

SOURCES = Path(__file__).parent / "device"
NUM_DEVICES = {"cuda": 1, "xsim": 4}  # of xsim each rank has one, and the others are refused


def compiled() -> str:
    """The library, compiled once for these sources and this torch, in 18 seconds. Torch is not imported.

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


def load(library: str, device: str = "cuda") -> None:
    """For a process that has not imported torch: torch asks once, at its import, whether there is CUDA.

    device: "cuda" or "xsim"; `be_plain` makes the latter "plain".
    """
    assert "torch" not in sys.modules, "torch is imported already"
    os.environ["XDS_STAND_IN"] = device
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import torch

    torch.ops.load_library(library)
    if device == "xsim":
        torch._register_device_module(device, ModuleType(f"torch.{device}"))
        _use_kernels_of_torch(torch)
        _hide_addresses(torch)
    _replace_functions(torch, getattr(torch, device), device)
    if device == "cuda":
        torch.cuda.cudart = _Runtime
    _replace_storage(torch, device)
    _tell_workers(torch)


def be_plain() -> None:
    """From now on this process's xsim is "plain"."""
    import torch

    torch.ops.host_cuda.be_plain()
    for missing in ("Stream", "Event", "default_stream", "current_stream", "stream"):
        delattr(torch.xsim, missing)


def _use_kernels_of_torch(torch: Any) -> None:
    """Ops with a kernel of the CPU run it, instead of a formula for all devices that has other bits."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        formulas = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
        if name.startswith("aten::") and any(has(name, key) for key in formulas):
            if has(name, "CPU") and not has(name, "PrivateUse1"):
                torch.ops.host_cuda.use_host_kernel(name)


def _hide_addresses(torch: Any) -> None:
    """An address of the device is none of the host: who reads there dies."""
    for owner in (torch.Tensor, torch.UntypedStorage):
        find = owner.data_ptr

        def data_ptr(self: Any, _find: Any = find) -> int:
            address: int = _find(self)
            return address + (1 << 60) * (address > 0 and self.device.type == "xsim")

        owner.data_ptr = data_ptr


def _replace_functions(torch: Any, module: Any, device_type: str) -> None:
    ops = torch.ops.host_cuda

    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=device_type, priority=priority)

    class Event(torch.Event):  # type: ignore[misc]
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, device_type, enable_timing=enable_timing)

        def elapsed_time(self, end: Any) -> float:
            if not all(ops.is_over(event.event_id) for event in (self, end)):
                raise RuntimeError(f"{device_type.upper()} error: device not ready")
            return 1.0

    properties = SimpleNamespace(name="host memory", major=9, minor=0, total_memory=1 << 34)
    module._initialized = True
    for name, answer in {
        "_lazy_init": None,
        "init": None,
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": NUM_DEVICES[device_type],
        "set_device": None,
        "mem_get_info": (1 << 34, 1 << 34),
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_device_name": "host memory",
    }.items():
        setattr(module, name, lambda *_, _answer=answer, **__: _answer)
    module.current_device = lambda: torch.accelerator.current_device_index()
    module.Stream, module.Event = Stream, Event
    default = torch.accelerator.current_stream()
    module.default_stream = lambda device=None: default
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.device = type("device", (contextlib.nullcontext,), {})  # torch asks for instances of it
    module.empty_cache = lambda: ops.note("empty cache")
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.memory_allocated = module.memory_reserved = lambda device=None: ops.memory()[0]
    module.max_memory_allocated = module.max_memory_reserved = lambda device=None: ops.memory()[1]
    module.reset_peak_memory_stats = lambda device=None: ops.reset_peak()
    # ops draw from the CPU's generator
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.default_generators = (torch.default_generator,) * NUM_DEVICES[device_type]
    if device_type != "cuda":  # what torch asks of each device's module
        module.manual_seed = module.manual_seed_all = lambda seed: None
        module._is_in_bad_fork = lambda: False
        module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]


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


def _replace_storage(torch: Any, device_type: str) -> None:
    resize = torch.UntypedStorage.resize_

    def resized(self: Any, num_bytes: int) -> Any:
        if self.device.type != device_type:
            return resize(self, num_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device=device_type).set_(self)
        torch.ops.host_cuda.resize_storage(whole, num_bytes)
        return self

    def loaded(storage: Any, location: str) -> Any:
        if not location.startswith(device_type):
            return None
        on_host = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return on_host.to(device_type).untyped_storage()

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
