"""What scripts that start their own processes need beside stand_in.py; see site/sitecustomize.py."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import messages
import stand_in
import torch
import torch.distributed as dist

LIBRARIES = "xds.ops.libraries"
NCCL = "nccl:"


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


class Nccl(messages.DeviceGroup):
    """Its messages are ranges of a trace, as those of NCCL."""

    def _send(self, name: str, *rest: Any, **more: Any) -> Any:
        with torch.profiler.record_function(f"{NCCL}{name}"):
            return super()._send(name, *rest, **more)


def _replace_groups() -> None:
    start = dist.init_process_group
    dist.Backend.register_backend("as_nccl", Nccl, devices=["cpu", "cuda"])
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
    profile = torch.profiler.profile
    start, export = profile.__init__, profile.export_chrome_trace

    def started(self: Any, *, activities: Any = None, **rest: Any) -> None:
        start(self, activities=[torch.profiler.ProfilerActivity.CPU], **rest)

    def exported(self: Any, path: str) -> None:
        export(self, path)
        trace = json.loads(Path(path).read_text())
        trace["traceEvents"] += as_on_a_device(trace["traceEvents"])
        Path(path).write_text(json.dumps(trace))

    profile.__init__, profile.export_chrome_trace = started, exported


WHOLE = ("xds::", "aten::_foreach", "aten::_fused")  # one kernel, whatever the CPU runs for it
NONE = (
    "empty",
    "as_strided",
    "detach",
    "set_",
    "is_set_to",
    "resolve_",
    "view",
    "alias",
)  # no kernel


def as_on_a_device(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A launch and a kernel for each operation of the host that has no other one in it, and each message."""
    sent = [e | {"name": f"ncclDevKernel_{e['name']}"} for e in events if _is_message(e)]
    made = [event for at, e in enumerate(sent) for event in _launch_of(e, -1 - at)]
    ops = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and "dur" in e),
        key=lambda e: (e["tid"], e["ts"], -e["dur"]),
    )
    end, thread = 0.0, None
    for number, (op, after) in enumerate(zip(ops, [*ops[1:], None], strict=True), 1):
        if op["tid"] == thread and op["ts"] < end:
            continue
        is_whole = op["name"].startswith(WHOLE)
        has_others = after and after["tid"] == op["tid"] and after["ts"] < op["ts"] + op["dur"]
        if op["name"].removeprefix("aten::").startswith(NONE) or (has_others and not is_whole):
            continue
        end, thread = op["ts"] + op["dur"], op["tid"]
        made += _launch_of(op, number)
    return made


def _is_message(event: dict[str, Any]) -> bool:
    is_range = event.get("cat") == "user_annotation" and "dur" in event
    return is_range and event["name"].startswith(NCCL)


def _launch_of(op: dict[str, Any], number: int) -> list[dict[str, Any]]:
    args = {"correlation": number}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": args}
    kernel = {"ph": "X", "cat": "kernel", "name": op["name"], "args": args, "pid": 0, "tid": 7}
    return [
        call | {key: op[key] for key in ("pid", "tid", "ts", "dur")},
        kernel | {"ts": op["ts"] + 1.0, "dur": op["dur"]},
    ]
