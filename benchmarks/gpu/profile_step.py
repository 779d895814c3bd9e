"""Profiles one step: kernels of the update, time between kernels, and the host's time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from device import Cpu

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def profile(contestant: Any, device: Cpu, file: Path) -> dict[str, Any]:
    """Trace one step into `file`, a Chrome trace, and return its figures."""
    import torch

    device.synchronize()
    with torch.profiler.profile(activities=list(device.activities)) as profiler:
        start = time.perf_counter()
        with torch.profiler.record_function("bench_step"):
            contestant.step()
        host = time.perf_counter() - start
        device.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    groups = getattr(contestant.engine.optimizer, "param_groups", [])
    flats = sum(len(group["params"]) for group in groups)
    return figures(events, device.is_real) | {"host": host, "flats": flats, "groups": len(groups)}


def figures(events: list[dict[str, Any]], is_real: bool) -> dict[str, Any]:
    """Launches in the update, kernels in the step, time of the device, and gaps; in seconds.

    Without a device the operations of the host are counted in place of kernels.
    """
    update = [e for e in events if e.get("name") == "bench_update" and "dur" in e]
    update = [e for e in update if e.get("cat") != "gpu_user_annotation"]
    if not update:
        raise RuntimeError("the trace has no event bench_update")
    begin, end = update[0]["ts"], update[0]["ts"] + update[0]["dur"]
    launches = [e for e in events if _is_launch(e, is_real) and begin <= e["ts"] <= end]
    kinds = ON_DEVICE if is_real else {"cpu_op"}
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds and "dur" in e
    )
    if not spans:
        raise RuntimeError("the trace has no kernels")
    idle, largest, reached = 0.0, 0.0, spans[0][0]
    for first, last in spans:
        if first > reached:
            idle, largest = idle + first - reached, max(largest, first - reached)
        reached = max(reached, last)
    whole = reached - spans[0][0]
    return {
        "launches": len(launches),
        "kernels": len(spans),
        "device": whole / 1e6,
        "idle": idle / 1e6,
        "largest_gap": largest / 1e6,
    }


def _is_launch(event: dict[str, Any], is_real: bool) -> bool:
    if not is_real:
        return event.get("cat") == "cpu_op" and "adam" in str(event.get("name"))
    is_call = event.get("cat") in ("cuda_runtime", "cuda_driver")
    return is_call and "LaunchKernel" in str(event.get("name"))


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
