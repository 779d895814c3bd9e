"""`--largest`: the largest GPT that trains 5 steps with fp32 states on this GPU, host and disk."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from child import MEMORY, TIME, ChildFailed, results_of
from device import pick
from model import Shape, build, draw
from scale import Scale
from search import DISK, HOST, Room, estimate, next_layers

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import Row  # noqa: E402

STEPS = 5
DEVICE_OF_TARGET, HOST_OF_TARGET = 140e9, 130e9  # the targets are for 141 GB and 128 GiB
NEAR, ON_DISK = "largest GPT, device and host", "largest GPT, device, host and disk"


def not_measured(reason: str) -> list[Row]:
    """The rows without figures."""
    return [Row(name, unit="B", void="not measured", note=reason) for name in (NEAR, ON_DISK)]


def measured(scale: Scale, disk: Path | None, disk_bytes: float, *, until: float) -> Iterator[Row]:
    """The row with the disk if there is a folder, else the one without: again whenever a larger one trains.

    Its note lists what was tried.
    """
    name, places = (ON_DISK, DISK) if disk else (NEAR, HOST)
    row = Row(name, unit="B", more_is_better=True)
    try:
        (here,) = results_of(_room, scale, disk_bytes if disk else 0.0, until=until)
    except ChildFailed as error:
        row.void, row.note = "not measured", str(error)
        yield row
        return
    room = Room(**here["room"])
    if here["device_bytes"] >= DEVICE_OF_TARGET and here["host_bytes"] >= HOST_OF_TARGET:
        row.must, row.aim = (None, 20.0) if disk else (14.0, 17.0)
    first = estimate(lambda n: _numel(scale.largest, n), places, room, scale.max_layers)
    expected = _billions(scale.largest, first)
    words = [f"expected {expected:.3g}B; {here['text']}"]
    tried: dict[int, bool] = {}
    row.void = "FAIL"
    while (layers := next_layers(tried, first, scale.max_layers)) is not None:
        shape = dataclasses.replace(scale.largest, layers=layers)
        share, _ = places.share(shape.numel, room)
        try:
            (ended,) = results_of(_train, shape, share, str(disk or ""), scale, until=until)
        except ChildFailed as error:
            words.append(f"{_billions(shape, layers):.3g}B: {error}")
            if error.reason != MEMORY:
                is_late = error.reason == TIME
                row.void = row.void and ("not measured" if is_late else "FAIL")
                break
            tried[layers] = False
            continue
        tried[layers] = True
        speed = f"{ended['tokens_per_second']:.0f} tokens/s"
        words.append(f"{_billions(shape, layers):.3g}B (ratio {share}): {speed}")
        row.value, row.void = max(row.value or 0.0, _billions(shape, layers)), ""
        row.note = "; ".join(words)
        yield row
    row.note = "; ".join(words)
    yield row


def _billions(shape: Shape, layers: int) -> float:
    return _numel(shape, layers) / 1e9


def _numel(shape: Shape, layers: int) -> int:
    return dataclasses.replace(shape, layers=layers).numel


def _room(scale: Scale, disk_bytes: float) -> Iterator[dict[str, Any]]:
    """What this machine has free. Runs in a process of its own."""
    from xds.utils.available_memory import available_bytes

    device = pick(dry=scale.dry)
    host = device.total_bytes if scale.dry else available_bytes()
    kept = scale.kept_free_bytes
    room = {"device": device.free_bytes() - kept, "host": host - kept, "disk": 0.97 * disk_bytes}
    text = f"{device.name}, {device.free_bytes() / 1e9:.0f} GB and {host / 1e9:.0f} GB free"
    if disk_bytes:
        text += f", {disk_bytes / 1e9:.0f} GB of disk"
    yield {"room": room, "device_bytes": device.total_bytes, "host_bytes": host, "text": text}


def _train(shape: Shape, share: float, disk: str, scale: Scale) -> Iterator[dict[str, Any]]:
    """Build the model and train `STEPS` steps of one sequence. Runs in a process of its own."""
    import xds

    device = pick(dry=scale.dry)
    model = build(shape, device.torch_device, torch.bfloat16)
    engine = xds.initialize(model, config_of(share, disk))
    batch = draw(shape, shape.context, device.torch_device)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        device.synchronize()
        times.append(time.perf_counter() - start)
    if not torch.isfinite(loss):
        raise RuntimeError("the loss is not finite")
    speed = shape.context / (sum(times[1:]) / (STEPS - 1))
    yield {"tokens_per_second": speed, "peak_bytes": device.peak_bytes()}


def config_of(share: float, disk: str) -> dict[str, Any]:
    """The JSON of a run. share: of the states away from the device. disk: a folder, or empty."""
    offload: dict[str, Any] = {"device": "nvme" if disk else "cpu", "ratio": share}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": offload}
    if disk:
        offload["nvme_path"] = disk
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "activation_checkpointing": {},
        "zero_optimization": zero,
    }


__all__ = ["measured", "not_measured"]
