"""Environment variables whose value costs speed, with what they cost. Set for debugging, they stay set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

ON = r"1|true|yes|on|y"
OFF = r"0|false|no|off|n"
MANY_CORES = 16  # with so many, one thread a rank leaves most of them idle


@final
@dataclass(frozen=True)
class Slow:
    """A variable, a pattern of its slow values, what they cost. only_gpus: where there is a GPU."""

    key: str
    values: str
    remedy: str
    only_gpus: bool = False


TABLE: Sequence[Slow] = (
    Slow("CUDA_LAUNCH_BLOCKING", ON, "the host waits for each kernel; unset it after debugging"),
    Slow(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "one queue for all streams, so messages wait for kernels; unset it unless a library needs it",
    ),
    Slow("CUDA_FORCE_PTX_JIT", ON, "each kernel is compiled at its first use; unset it"),
    Slow("CUDA_CACHE_DISABLE", ON, "each start compiles kernels anew; unset it"),
    Slow("CUDA_MODULE_LOADING", "eager", "each start loads all kernels; unset it"),
    Slow("CUBLAS_WORKSPACE_CONFIG", r":16:8", "a small workspace; :4096:8 is as deterministic"),
    Slow("NVIDIA_TF32_OVERRIDE", OFF, "fp32 products never use TF32; unset it"),
    Slow("PYTORCH_NO_CUDA_MEMORY_CACHING", ".+", "each tensor waits for cudaMalloc; unset it"),
    Slow("TORCHDYNAMO_DISABLE", ON, "nothing is compiled, whatever the config says; unset it"),
    Slow("TORCH_COMPILE_DISABLE", ON, "nothing is compiled, whatever the config says; unset it"),
    Slow(
        "TORCH_DISTRIBUTED_DEBUG",
        "detail",
        "each collective is compared over all ranks first; unset it after debugging",
    ),
    *(
        Slow(f"{prefix}NCCL_BLOCKING_WAIT", ON, "the host waits for each collective; unset it")
        for prefix in ("TORCH_", "")
    ),
    *(
        Slow(key, ON, "times each collective; unset it after debugging")
        for key in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
    ),
    Slow("TORCH_NCCL_NAN_CHECK", ON, "reads each message for NaN first; unset it after debugging"),
    Slow(
        "NCCL_P2P_DISABLE", r"[1-9]\d*", "no NVLink or PCIe between GPUs, but host memory; unset it"
    ),
    Slow("NCCL_P2P_LEVEL", "loc|0", "no NVLink or PCIe between GPUs, but host memory; unset it"),
    Slow("NCCL_SHM_DISABLE", r"[1-9]\d*", "GPUs of a machine may use the network; unset it"),
    Slow("NCCL_IB_DISABLE", r"[1-9]\d*", "sockets instead of InfiniBand or RoCE; unset it"),
    Slow("NCCL_NET", "socket", "sockets instead of InfiniBand or RoCE; unset it"),
    Slow("NCCL_NET_GDR_LEVEL", "loc|0", "messages go through host memory; unset it"),
    Slow("NCCL_NVLS_ENABLE", "0", "no reductions inside NVSwitch; unset it"),
    Slow("NCCL_DEBUG", "trace", "writes a line for each call; use WARN or INFO"),
    Slow("NCCL_CHECK_POINTERS", r"[1-9]\d*", "checks each pointer; unset it after debugging"),
    Slow("NCCL_ALGO", ".+", "NCCL chooses it by size and topology; unset it if not measured"),
    Slow("NCCL_PROTO", ".+", "NCCL chooses it by size and topology; unset it if not measured"),
    *(
        Slow(key, r"[12]", "so few channels cannot fill NVLink; unset it")
        for key in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
    ),
    Slow(
        "XDS_BACKEND", "gloo", "messages of GPUs go through host memory; unset it", only_gpus=True
    ),
    Slow("XDS_CPU_ISA", "baseline", "CPU ops without vector instructions; unset it"),
)

# options of PYTORCH_ALLOC_CONF and its older name PYTORCH_CUDA_ALLOC_CONF, written a:1,b:2
_ALLOCATOR = {
    "max_split_size_mb": "{}: larger blocks are not split, so more are allocated; use expandable_segments:True",
    "garbage_collection_threshold": "{}: cached memory is freed early, and allocated again; take it out",
}
_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def remedy(key: str, value: str, *, has_gpu: bool, num_cores: int) -> str:
    """What to do about `key` = `value`; "" if it costs nothing."""
    text = value.strip()
    if key in _ALLOCATOR_KEYS:
        return _of_allocator(text)
    if key == "OMP_NUM_THREADS":
        return _of_threads(text, num_cores)
    for slow in TABLE:
        applies = has_gpu or not slow.only_gpus
        if slow.key == key and applies and re.fullmatch(slow.values, text, re.IGNORECASE):
            return slow.remedy
    return ""


def _of_allocator(text: str) -> str:
    options = [option.partition(":")[0].strip().lower() for option in text.split(",")]
    return "; ".join(words.format(name) for name, words in _ALLOCATOR.items() if name in options)


def _of_threads(text: str, num_cores: int) -> str:
    first = text.partition(",")[0]
    threads = int(first) if first.isdecimal() else 0
    if threads > num_cores:
        return (
            f"more threads than the {num_cores} cores; unset it, and xds sets it to cores / ranks"
        )
    if threads == 1 and num_cores >= MANY_CORES:
        return f"one of {num_cores} cores for a rank's work on the host; unset it, and xds sets it"
    return ""


def usable_cores(affinity: Callable[[int], set[int]] | None = None) -> int:
    """The cores that this process may use."""
    asks = affinity or getattr(os, "sched_getaffinity", None)  # not on every system
    return len(asks(0)) if asks else os.cpu_count() or 1


__all__ = ["TABLE", "Slow", "remedy", "usable_cores"]
