"""What scripts that start their own processes need beside stand_in.py; see site/sitecustomize.py."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

import messages
import stand_in
import torch
import torch.distributed as dist

LIBRARIES = "xds.ops.libraries"


def replace() -> None:
    """Replace what a build for CPUs lacks."""
    torch.ops.host_cuda.settings(False, True)  # a fault raises where it happens
    found = SimpleNamespace(name="host memory", total_memory=16 << 30, major=9, minor=0)
    count = int(os.environ["XDS_REHEARSAL"])
    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_properties = lambda device=None: found
    sys.meta_path.insert(0, _Kernels())
    torch.UntypedStorage.to = _storage_to
    _replace_groups()
    _replace_compile()
    _replace_trace()


_to = torch.UntypedStorage.to


def _storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
    """A build for CPUs makes no storage of a device, which torch.load needs."""
    if torch.device(device).type != "cuda":
        return _to(self, device=device, non_blocking=non_blocking)
    whole = torch.empty(0, dtype=torch.uint8).set_(self)
    return whole.to(device).untyped_storage()


class _Kernels(importlib.abc.MetaPathFinder):
    """Calls `use_host_kernels` when xds has imported what it replaces."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != LIBRARIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            stand_in.use_host_kernels()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_groups() -> None:
    start = dist.init_process_group
    dist.Backend.register_backend("as_nccl", messages.DeviceGroup, devices=["cpu", "cuda"])
    names = {"nccl": "as_nccl", "gloo": messages.GLOO}

    def init_process_group(backend: str | None = None, **rest: Any) -> None:
        rest.pop("device_id", None)
        start(names.get(backend or "", backend), **rest)

    dist.init_process_group = init_process_group
    dist.is_nccl_available = lambda: True


def _replace_compile() -> None:
    compiled = torch.compile

    def compile_eagerly(model: Any = None, **options: Any) -> Any:
        if options.get("backend", "inductor") == "inductor":
            options |= {"backend": "eager", "options": None, "mode": None}
        return compiled(model, **options)

    torch.compile = compile_eagerly


def _replace_trace() -> None:
    start = torch.profiler.profile.__init__

    def started(self: Any, *, activities: Any = None, **rest: Any) -> None:
        start(self, activities=[torch.profiler.ProfilerActivity.CPU], **rest)

    torch.profiler.profile.__init__ = started
