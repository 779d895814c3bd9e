"""Profiles one step: kernels of the update, time between kernels, and the host's time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device import Cpu

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def profile(contestant: Any, device: Cpu, file: Path) -> dict[str, Any]:
    """Trace one step into `file`, a Chrome trace, and return its figures."""
    import torch

    activities = list(device.activities)
    with torch.profiler.profile(activities=activities):  # the first one starts the profiler itself
        contestant.step()
        device.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        with torch.profiler.record_function("bench_step"):
            contestant.step()
        host = time.perf_counter() - start
        device.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    events = events_of(file)
    groups = getattr(contestant.engine.optimizer, "param_groups", [])
    flats = sum(len(group["params"]) for group in groups)
    return figures(events, device.is_real) | {"host": host, "flats": flats, "groups": len(groups)}


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace. Names of kernels may have characters that JSON does not allow."""
    text = file.read_text(encoding="utf-8", errors="replace")
    events: list[dict[str, Any]] = json.loads(text, strict=False)["traceEvents"]
    return events


def figures(events: list[dict[str, Any]], is_real: bool) -> dict[str, Any]:
    """Kernels that the update launches, kernels in the step, time of the device, and gaps; in seconds.

    Without a device the operations of the host are counted in place of kernels.
    """
    update = [e for e in events if e.get("name") == "bench_update" and "dur" in e]
    update = [e for e in update if e.get("cat") != "gpu_user_annotation"]
    if not update:
        raise RuntimeError("the trace has no range bench_update")
    inside = [e for e in events if "dur" in e and any(_is_in(e, each) for each in update)]
    launches = _launched(events, inside) if is_real else _adam(inside)
    if not launches:
        raise RuntimeError("the trace has no kernel that bench_update launched")
    kinds = ON_DEVICE if is_real else {"cpu_op"}
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds and "dur" in e
    )
    idle, largest, reached = 0.0, 0.0, spans[0][0]
    for first, last in spans:
        if first > reached:
            idle, largest = idle + first - reached, max(largest, first - reached)
        reached = max(reached, last)
    whole = reached - spans[0][0]
    return {
        "launches": len(launches),
        "names": sorted({str(e["name"])[:100] for e in launches}),
        "kernels": len(spans),
        "device": whole / 1e6,
        "idle": idle / 1e6,
        "largest_gap": largest / 1e6,
    }


def _is_in(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"])


def _launched(events: list[dict[str, Any]], inside: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of the calls in `inside`. A call of the driver may be within one of the runtime."""
    calls = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    numbers = {e.get("args", {}).get("correlation") for e in calls} - {None, 0}
    kernels = [e for e in events if e.get("cat") == "kernel" and "dur" in e]
    return [e for e in kernels if e.get("args", {}).get("correlation") in numbers]


def _adam(inside: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in inside if e.get("cat") == "cpu_op" and "adam" in str(e.get("name"))]


def hidden_share(events: list[dict[str, Any]]) -> float | None:
    """The share of NCCL's time during which another kernel runs; None without NCCL kernels."""
    kernels = [e for e in events if e.get("cat") == "kernel" and "dur" in e]
    sent = [e for e in kernels if "nccl" in e["name"].lower()]
    others = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" not in e["name"].lower()
    )
    merged: list[list[float]] = []
    for first, last in others:
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    whole = sum(e["dur"] for e in sent)
    if not whole:
        return None
    covered = sum(
        max(0.0, min(last, e["ts"] + e["dur"]) - max(first, e["ts"]))
        for e in sent
        for first, last in merged
    )
    return float(covered / whole)
