"""What the engine asks of the device that it computes on. Only this file knows the kinds of devices.

    device_of(torch.device)     Host            a CPU: computes when it is called
                                Accelerator     what torch calls an accelerator; `Kind` says what it can do

A kind is a row of `KINDS`: its collectives, the variable that hides devices, and four answers. A device that
torch registers under another name (PrivateUse1) needs no row if its answers are the defaults of `Kind`. What
torch.accelerator does not cover is called of its module `torch.<name>`:

- `default_generators`;
- where they exist: `init`, `get_device_name`, `empty_cache`; `mem_get_info`, and then `memory_allocated`,
  `memory_reserved`, their `max_` forms and `reset_peak_memory_stats`; `cudart`, which registers host memory.

Without streams all work is in one queue, and a copy is waited for by waiting for the device. Without fp64 the
numbers that need it are on the host, see `wide`. Nothing here imports torch before a device is asked for.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ..utils.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHOICE = "DS_ACCELERATOR"  # the variable that names the type of device, as in DeepSpeed
_ON, _OFF = r"1|true|yes|on|y", r"0|false|no|off|n"


@final
@dataclass(frozen=True)
class Kind:
    """What one kind of device can do.

    backend: of its process groups. visible: the variable with the numbers of the devices that a process sees.
    drivers: patterns of files, one for each device. package: what registers it with torch.
    library: of native optimizers; "" is none. prefixes: of its variables.
    slow: variables, set for debugging and left, that cost speed: a pattern of their values, and what they do.
    runs_ahead: a call returns before the device has done it.
    """

    backend: str
    visible: str = ""
    drivers: tuple[str, ...] = ()
    package: str = "torch"
    library: str = ""
    prefixes: tuple[str, ...] = ()
    slow: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    has_streams: bool = True
    pins_memory: bool = True
    runs_ahead: bool = True
    has_fp64: bool = True


_SLOW_CUDA = {
    "CUDA_LAUNCH_BLOCKING": (_ON, "the host waits for each kernel; unset it after debugging"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "messages wait for kernels; unset it unless a library needs it",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (".+", "each tensor waits for cudaMalloc; unset it"),
    "NVIDIA_TF32_OVERRIDE": (_OFF, "fp32 products never use TF32; unset it"),
}
_WAITS = "the host waits for each kernel; unset it after debugging"

# By the names of DeepSpeed's DS_ACCELERATOR. "rocm" is torch's "cuda" where torch is built for HIP.
KINDS: Mapping[str, Kind] = {
    "cpu": Kind("gloo", library="cpu", has_streams=False, pins_memory=False, runs_ahead=False),
    "cuda": Kind(
        "nccl",
        "CUDA_VISIBLE_DEVICES",
        ("/proc/driver/nvidia/gpus/*",),
        library="cuda_optimizers",
        prefixes=("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_"),
        slow=_SLOW_CUDA,
    ),
    "rocm": Kind(
        "nccl",
        "HIP_VISIBLE_DEVICES",
        ("/sys/module/amdgpu/drivers/pci:amdgpu/*:*",),
        prefixes=("AMD_", "HIP_", "HSA_", "ROCBLAS_", "MIOPEN_"),
        slow={"HIP_LAUNCH_BLOCKING": (_ON, _WAITS), "AMD_SERIALIZE_KERNEL": ("[1-3]", _WAITS)},
    ),
    "xpu": Kind(
        "xccl",
        "ZE_AFFINITY_MASK",
        ("/sys/module/xe/drivers/pci:xe/*:*", "/sys/module/i915/drivers/pci:i915/*:*"),
        prefixes=("ZE_", "SYCL_", "CCL_"),
    ),
    "npu": Kind(
        "hccl",
        "ASCEND_RT_VISIBLE_DEVICES",
        ("/dev/davinci[0-9]*",),
        "torch_npu",
        prefixes=("ASCEND_", "HCCL_"),
        slow={"ASCEND_LAUNCH_BLOCKING": (_ON, _WAITS)},
        has_fp64=False,
    ),
    "mps": Kind(
        "gloo",
        prefixes=("PYTORCH_MPS_", "PYTORCH_ENABLE_MPS_"),
        slow={"PYTORCH_ENABLE_MPS_FALLBACK": (_ON, "ops that Metal lacks run on the CPU")},
        has_streams=False,
        pins_memory=False,
        has_fp64=False,
    ),
    "hpu": Kind(
        "hccl",
        "HABANA_VISIBLE_MODULES",
        ("/dev/accel/accel[0-9]*",),
        "habana_frameworks",
        prefixes=("HABANA_", "PT_HPU_", "HCCL_"),
        has_fp64=False,
    ),
    "mlu": Kind(
        "cncl",
        "MLU_VISIBLE_DEVICES",
        ("/dev/cambricon_dev[0-9]*",),
        "torch_mlu",
        prefixes=("MLU_", "NEUWARE_HOME", "CNCL_"),
        has_fp64=False,
    ),
}
VISIBLE = tuple(kind.visible for kind in KINDS.values() if kind.visible) + ("ROCR_VISIBLE_DEVICES",)
OF_ONE_MACHINE = (*VISIBLE, "CUDA_MPS_.*")  # patterns of variables that other machines do not get
PREFIXES = tuple(sorted({prefix for kind in KINDS.values() for prefix in kind.prefixes}))
SLOW = {name: row for kind in KINDS.values() for name, row in kind.slow.items()}


# -- before torch is imported: the launcher ----------------------------------------------------------------


def name_here() -> str:
    """The row of `KINDS` that ranks of this machine use, without importing torch.

    That of DS_ACCELERATOR, else what torch is built for, or what a package registers with it.
    """
    asked = os.environ.get(CHOICE, "")
    built = _built_for()
    if asked in KINDS and (asked, built) != ("cuda", "rocm"):
        return asked
    packages = [
        name for name, kind in KINDS.items() if kind.package != "torch" and _has(kind.package)
    ]
    return built or next(iter(packages), "mps" if sys.platform == "darwin" else "cuda")


def _built_for() -> str:
    """The kind of GPU that torch's build names; "" for a CPU build."""
    spec = find_spec("torch") if _has("torch") else None
    places = list(spec.submodule_search_locations or ()) if spec else []
    text = (Path(places[0]) / "version.py").read_text() if places else ""
    for name, attribute in (("rocm", "hip"), ("cuda", "cuda"), ("xpu", "xpu")):
        if re.search(rf"^{attribute}\b[^=]*= *['\"]", text, re.MULTILINE):
            return name
    return ""


def _has(package: str) -> bool:
    with suppress(ValueError):  # a module without a specification, as of a test
        return find_spec(package) is not None
    return True


def num_devices_of_driver() -> int:
    """The number of devices in the driver's list, without torch; 0 if it is unknown."""
    return sum(len(glob(pattern)) for pattern in KINDS[name_here()].drivers)


def show_only(devices: tuple[int, ...]) -> None:
    """Let processes that start from now on see these devices alone, by the driver's numbers."""
    if variable := KINDS[name_here()].visible:
        os.environ[variable] = ",".join(map(str, devices))


# -- what torch finds --------------------------------------------------------------------------------------


def kind_of(device_type: str) -> Kind:
    """What devices of a type of torch can do."""
    import torch
    import torch.distributed as dist

    name = "rocm" if device_type == "cuda" and torch.version.hip else device_type
    backends = dist.Backend.default_device_backend_map
    return KINDS.get(name) or Kind(backends.get(device_type, "gloo"))


def with_native_ops() -> list[str]:
    """The kinds of devices that have a library."""
    return [name for name, kind in KINDS.items() if kind.library]


def device_type() -> str:
    """The type of device that the ranks use: DS_ACCELERATOR's, else torch's accelerator, else "cpu".

    Raises:
        UsageError: torch does not find the device that the variable names.
    """
    import torch

    present = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if present is None else present.type
    asked = os.environ.get(CHOICE, "") or there
    if asked in ("cpu", there) or (asked, there) == ("rocm", "cuda"):
        return "cpu" if asked == "cpu" else there
    package = KINDS[asked].package if asked in KINDS else "torch"
    raise UsageError(
        f"{CHOICE} = {asked!r}: torch finds {there} here, and no such device; install a build of {package} for "
        "it, or unset the variable"
    )


def num_devices() -> int:
    """The devices that the ranks of this machine share; 0 where they compute on the CPU."""
    import torch

    return 0 if device_type() == "cpu" else torch.accelerator.device_count()


def present() -> Device:
    """This process's current device: the accelerator that torch finds, else the CPU."""
    import torch

    kind = device_type()
    if kind == "cpu":
        return device_of(torch.device(kind))
    return device_of(torch.device(kind, torch.accelerator.current_device_index()))


def versions() -> dict[str, str]:
    """What torch is built for, and packages that register a device, with their releases."""
    import torch

    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    loaded = {kind.package for kind in KINDS.values()} - {"torch"}
    return {name: str(value) for name, value in built.items() if value} | {
        name: str(getattr(sys.modules[name], "__version__", "unknown"))
        for name in sorted(loaded & sys.modules.keys())
    }


def has_backend(name: str) -> bool:
    """Whether this torch can open process groups of a backend."""
    import torch.distributed as dist

    return dist.is_backend_available(name) and (name != "mpi" or dist.is_mpi_available())


# -- events and memory of what has none --------------------------------------------------------------------


@final
class HostEvent:
    """A moment of a device without events, with the methods of torch.Event. It has come when `wait` returns."""

    def __init__(self, device: Device, *, timed: bool) -> None:
        self._device = device
        self._has_come = not device.runs_ahead
        if timed:
            self.synchronize()
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return self._has_come

    def synchronize(self) -> None:
        if not self._has_come:
            self._device.synchronize()
            self._has_come = True

    def wait(self, stream: Any = None) -> None:
        """Nothing: the device has one queue."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds."""
        return 1e3 * (end._seconds - self._seconds)


@final
@dataclass(frozen=True)
class MemoryUse:
    """Bytes now and at the peak: in use, and kept by torch. Of a CPU all are those of the process."""

    now_bytes: int
    peak_bytes: int
    kept_bytes: int
    peak_kept_bytes: int


def process_memory() -> MemoryUse:
    """Memory of this process, of the host."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # no /proc: only the peak is known
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
        return MemoryUse(peak_bytes, peak_bytes, peak_bytes, peak_bytes)
    # not ru_maxrss: a child process inherits its parent's value
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    now_bytes, peak_bytes = int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024
    return MemoryUse(now_bytes, peak_bytes, now_bytes, peak_bytes)


# -- devices -----------------------------------------------------------------------------------------------


class Device(ABC):
    """A device of this process.

    The four answers: has_streams, pins_memory, runs_ahead (of the host), has_fp64.
    reports_memory: it has memory of its own, of which torch has figures.
    """

    reports_memory = False
    registers_memory = False  # that torch has not allocated

    def __init__(self, device: torch.device, kind: Kind) -> None:
        self.device, self.kind = device, kind
        self.backend = kind.backend
        self.has_streams, self.pins_memory = kind.has_streams, kind.pins_memory
        self.runs_ahead, self.has_fp64 = kind.runs_ahead, kind.has_fp64

    @property
    @abstractmethod
    def name(self) -> str:
        """E.g. "NVIDIA H200"."""

    @property
    def missing(self) -> list[str]:
        """What other devices have, and what its lack costs here."""
        return []

    @property
    @abstractmethod
    def generator(self) -> torch.Generator:
        """The one that random ops on the device draw from."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything that was started."""

    @abstractmethod
    def make_current(self) -> None:
        """Let this thread use the device where none is named."""

    @abstractmethod
    def event(self, *, timed: bool = False) -> Any:
        """A torch.Event, or what has its methods, recorded on the current stream."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused memory back to the device."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Memory that this process uses; of the host where the device reports none."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Peaks begin anew, where the device reports memory."""

    # -- host memory, where the device `registers_memory` ---------------------------------------------------

    def register(self, address: int, num_bytes: int) -> str:
        """Page-lock memory of the host. Returns the error; "" is none."""
        raise AssertionError("the device registers no memory")

    def unregister(self, address: int) -> None:
        """The opposite, when no copy is in flight any more. In any thread."""
        raise AssertionError("the device registers no memory")


@final
class Host(Device):
    """A CPU, and what only looks like a device ("meta")."""

    @property
    def name(self) -> str:
        return self.device.type

    @property
    def generator(self) -> torch.Generator:
        import torch

        return torch.default_generator

    def synchronize(self) -> None:
        return

    def make_current(self) -> None:
        return

    def event(self, *, timed: bool = False) -> HostEvent:
        return HostEvent(self, timed=timed)

    def empty_cache(self) -> None:
        return

    def memory(self) -> MemoryUse:
        return process_memory()

    def reset_peak_memory(self) -> None:
        return


@final
class Accelerator(Device):
    """A device of torch.accelerator."""

    def __init__(self, device: torch.device, kind: Kind) -> None:
        import torch

        super().__init__(device, kind)
        self._module: Any = torch.get_device_module(device.type)
        self.reports_memory = hasattr(self._module, "mem_get_info")
        self.registers_memory = hasattr(self._module, "cudart")
        if device.type == "xpu":  # cards of one kind differ
            self.has_fp64 = bool(self._module.get_device_properties(device).has_fp64)

    @property
    def missing(self) -> list[str]:
        answers = {
            "no streams, so copies are waited for": self.has_streams,
            "no page-locked memory, so copies are slower": self.pins_memory,
            "no fp64, so norms are added on the host": self.has_fp64,
            "no collectives of its own, so messages go through host memory": self.backend != "gloo",
        }
        return [text for text, has in answers.items() if not has]

    @property
    def name(self) -> str:
        find = getattr(self._module, "get_device_name", None)
        return self.device.type if find is None else str(find(self.device))

    @property
    def generator(self) -> torch.Generator:
        getattr(self._module, "init", lambda: None)()  # fills default_generators
        generator: torch.Generator
        if self.device.type == "mps":
            generator = self._module._get_default_mps_generator()
        else:
            generator = self._module.default_generators[self.index]
        return generator

    @property
    def index(self) -> int:
        import torch

        index = self.device.index
        return torch.accelerator.current_device_index() if index is None else index

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize(self.device)

    def make_current(self) -> None:
        import torch

        torch.accelerator.set_device_index(self.index)

    def event(self, *, timed: bool = False) -> Any:
        import torch

        if not self.has_streams:
            return HostEvent(self, timed=timed)
        event = torch.Event(self.device, enable_timing=timed)
        event.record(self.current_stream())
        return event

    def current_stream(self) -> torch.Stream:
        import torch

        return torch.accelerator.current_stream(self.device)

    def empty_cache(self) -> None:
        getattr(self._module, "empty_cache", lambda: None)()

    def memory(self) -> MemoryUse:
        if not self.reports_memory:
            return process_memory()
        module, device = self._module, self.device
        return MemoryUse(
            module.memory_allocated(device),
            module.max_memory_allocated(device),
            module.memory_reserved(device),
            module.max_memory_reserved(device),
        )

    def reset_peak_memory(self) -> None:
        if self.reports_memory:
            self._module.reset_peak_memory_stats(self.device)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Bytes that no process has, and all, where the device reports memory."""
        free, total = self._module.mem_get_info(self.device)
        return int(free), int(total)

    def register(self, address: int, num_bytes: int) -> str:
        import torch

        runtime = self._module.cudart()
        code = runtime.cudaHostRegister(address, num_bytes, 0)
        if int(code) == 0:
            return ""
        # The runtime returns the error once more after the next launch of a kernel in this thread.
        with suppress(RuntimeError, AssertionError):  # AssertionError: torch without CUDA
            torch.ones(1, device=self.device.type)
        return str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        # the current device of a new thread is device 0, where a call would allocate a context
        with (
            suppress(RuntimeError),
            self._module.device(self.index),
        ):  # an earlier error of the device
            self._module.synchronize()  # copies from or to this memory may be in flight
        with self._module.device(self.index):
            self._module.cudart().cudaHostUnregister(address)


def cards_of_nvidia() -> tuple[list[Any], list[str]]:
    """The properties of each card, and the architectures for which this torch has kernels."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() and not torch.version.hip else 0
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    return cards, torch.cuda.get_arch_list() if cards else []


def nccl_version() -> str:
    """E.g. "2.28.3", where torch has NCCL."""
    import torch

    nccl: Any = torch.cuda.nccl  # not annotated
    return ".".join(map(str, nccl.version()))


def nvidia_capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """The compute capability of a GPU of NVIDIA, by default the current one; None: there is no such device."""
    import torch

    is_nvidia = torch.cuda.is_available() if device is None else device.type == "cuda"
    return torch.cuda.get_device_capability(device) if is_nvidia and not torch.version.hip else None


@cache
def device_of(device: torch.device) -> Device:
    """The one object of this process for `device`."""
    if device.type in ("cpu", "meta"):
        return Host(device, KINDS["cpu"])
    return Accelerator(device, kind_of(device.type))


def accelerator_of(device: torch.device) -> Accelerator:
    """The same where it is known that the device is no CPU."""
    found = device_of(device)
    assert isinstance(found, Accelerator)
    return found


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Those of this thread on each of the devices that has streams, for `use_streams`."""
    every = [device_of(device) for device in set(devices)]
    return [
        one.current_stream() for one in every if isinstance(one, Accelerator) and one.has_streams
    ]


def use_streams(streams: Iterable[torch.Stream]) -> None:
    """Make them those of this thread, which is another one: a new thread uses the default streams."""
    import torch

    for stream in streams:
        torch.accelerator.set_stream(stream)


# -- random numbers and fp64 -------------------------------------------------------------------------------


def generators(*devices: torch.device) -> list[torch.Generator]:
    """The default generators of the CPU and of `devices`, each once."""
    import torch

    every = [torch.default_generator, *(device_of(device).generator for device in devices)]
    return list(dict.fromkeys(every))


@contextmanager
def keeping_draws(*devices: torch.device) -> Iterator[None]:
    """At the end the generators of the CPU and of `devices` have the states that they had before."""
    states = [(generator, generator.get_state()) for generator in generators(*devices)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast; None: it is off, or there is none, as on the meta device of a plan."""
    import torch

    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def wide_place(device: torch.device) -> torch.device:
    """Where fp64 numbers of `device` are: there, or on the host where it has no fp64."""
    import torch

    return device if device_of(device).has_fp64 else torch.device("cpu")


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in fp64, at its `wide_place`. The host waits for it where that is another device."""
    return tensor.to(wide_place(tensor.device)).double()
