"""`--largest`: the largest GPT that trains 5 steps with fp32 states on this GPU, host and disk."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from child import OUT_OF_TIME, ChildFailed, results_of
from device import pick
from model import Shape, build, draw
from scale import Scale

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import Row  # noqa: E402

STEPS = 5
DEVICE_OF_TARGET, HOST_OF_TARGET = 140e9, 130e9  # the targets are for 141 GB and 128 GiB
NEAR, ON_DISK = "largest GPT, device and host", "largest GPT, device, host and disk"


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that model states may take."""

    device: float
    host: float
    disk: float = 0.0


@dataclasses.dataclass(frozen=True)
class Places:
    """Bytes of a parameter with a share r of the optimizer's states away from the device.

    device: `device` + `device_states` (1 - r); host: `host` + `host_states` r; disk: `disk_states` r.
    """

    device: float
    device_states: float
    host: float
    host_states: float
    disk_states: float

    def share(self, numel: int, room: Room) -> tuple[float, bool]:
        """A share r, and whether it fits: the middle of the shares that device, and host and disk, allow."""
        low = 1 - (room.device / numel - self.device) / self.device_states
        high = (room.host / numel - self.host) / self.host_states
        if self.disk_states:
            high = min(high, room.disk / numel / self.disk_states)
        low, high = max(0.0, low), min(1.0, high)
        return round(min(1.0, max(0.0, (low + high) / 2)), 4), low <= high


# A unit on the device takes 12 bytes of states and 4 of gradient sums. On the host the gradient has 16 bits.
HOST = Places(device=2, device_states=16, host=0, host_states=14, disk_states=0)
DISK = Places(device=0, device_states=16, host=2, host_states=2, disk_states=12)


def estimate(shape: Shape, places: Places, room: Room, max_layers: int) -> int:
    """The largest number of layers whose states fit; at least 1."""
    fits = [
        layers
        for layers in range(1, max_layers + 1)
        if places.share(dataclasses.replace(shape, layers=layers).numel, room)[1]
    ]
    return max(fits, default=1)


def next_layers(tried: Mapping[int, bool], first: int, max_layers: int) -> int | None:
    """The next number of layers to try: `first`, then away from it in growing steps, then between.

    None: the largest one that trains is known to within 2 % of `first`, or none does.
    """
    if not tried:
        return first
    good = max((layers for layers, trains in tried.items() if trains), default=0)
    bad = min((layers for layers, trains in tried.items() if not trains), default=max_layers + 1)
    reach = max(1, first // 16) * 2 ** max(0, len(tried) - 1)
    if not good:
        return None if bad <= 1 else max(1, bad - reach)
    if bad > max_layers:
        return min(max_layers, good + reach) if good < max_layers else None
    if bad - good <= max(1, first // 50):
        return None
    return (good + bad) // 2


def not_measured(reason: str) -> list[Row]:
    """The rows without figures."""
    return [Row(name, unit="B", void="not measured", note=reason) for name in (NEAR, ON_DISK)]


def measured(scale: Scale, disk: Path | None, disk_bytes: float, *, until: float) -> Iterator[Row]:
    """One row for the disk if there is a folder, else one without. A table of what was tried is its note."""
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
    first = estimate(scale.largest, places, room, scale.max_layers)
    tried: dict[int, bool] = {}
    words = []
    while (layers := next_layers(tried, first, scale.max_layers)) is not None:
        shape = dataclasses.replace(scale.largest, layers=layers)
        share, _ = places.share(shape.numel, room)
        billions = shape.numel / 1e9
        try:
            ended = list(results_of(_train, shape, share, str(disk or ""), scale, until=until))[-1]
        except ChildFailed as error:
            words.append(f"{billions:.3g}B: {error}")
            if str(error) == OUT_OF_TIME:
                break
            tried[layers] = False
            continue
        tried[layers] = True
        words.append(f"{billions:.3g}B (ratio {share}): {ended['tokens_per_second']:.0f} tokens/s")
    row.value = _largest(scale.largest, tried)
    expected = dataclasses.replace(scale.largest, layers=first).numel / 1e9
    row.note = f"expected {expected:.3g}B; {here['text']}; tried {'; '.join(words)}"
    if row.value is None:
        row.void = "not measured" if OUT_OF_TIME in row.note else "FAIL"
    yield row


def _largest(shape: Shape, tried: Mapping[int, bool]) -> float | None:
    sizes = [dataclasses.replace(shape, layers=n).numel for n, trains in tried.items() if trains]
    return max(sizes) / 1e9 if sizes else None


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


__all__ = ["DISK", "HOST", "Places", "Room", "estimate", "measured", "next_layers", "not_measured"]
