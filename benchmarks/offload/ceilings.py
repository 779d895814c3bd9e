"""Measures what this machine can do at most: copies, CPU Adam, matrix products, the disk."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from child import results_of
from device import Device, pick
from roofline import Ceilings
from scale import Scale

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import Row  # noqa: E402

NAMES = (
    "copies to the host, pinned",
    "copies to the device, pinned",
    "copies both ways at once, pinned, sum",
    "copies to the host, pageable",
    "copies to the device, pageable",
    "CPU Adam, bf16 gradient and values",
    "CPU Adam, the same to other memory (super_offload)",
    "matrix product, bf16, square",
    "matrix product, bf16, MLP of 6.7B",
    "disk write, direct I/O",
    "disk read, direct I/O",
)
COPIES, ADAM, MATMUL, DISK = NAMES[:5], NAMES[5:7], NAMES[7:9], NAMES[9:]
ADAM_BYTES = 28  # read and written for each element
Sample = dict[str, Any]  # name, samples of a rate a second, note


def measure(scale: Scale, folder: Path | None, *, until: float) -> Iterator[Sample]:
    """Each figure as it comes, from a process of its own. folder: on the disk; None leaves it out."""
    yield from results_of(_measure, scale, str(folder) if folder else "", until=until)


def row_of(sample: Sample) -> Row:
    """The row of a figure: a rate, in giga or tera a second."""
    tera = sample["name"] in MATMUL
    rates = [rate / (1e12 if tera else 1e9) for rate in sample["rates"]]
    unit = " TFLOP/s" if tera else " GB/s"
    row = Row(sample["name"], median(rates), min(rates), max(rates), unit=unit)
    row.note = sample["note"]
    return row


def summary(samples: dict[str, Sample]) -> Ceilings:
    """The figures that bound a step."""
    best = {name: max(sample["rates"]) for name, sample in samples.items()}
    return Ceilings(
        to_host=best[COPIES[0]],
        to_device=best[COPIES[1]],
        adam=best[ADAM[0]] / ADAM_BYTES,
        matmul=max(best[name] for name in MATMUL),
    )


def _measure(scale: Scale, folder: str) -> Iterator[Sample]:
    device = pick(dry=scale.dry)
    yield from _copies(device, scale)
    yield from _products(device, scale)
    yield from _adam(scale)
    if folder:
        yield from _disk(Path(folder), scale)


def _copies(device: Device, scale: Scale) -> Iterator[Sample]:
    from xds.offload.pinned import host_memory

    num_bytes = scale.copy_bytes
    near = [torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device) for _ in "ab"]
    for kind in ("pinned", "pageable"):
        far = [host_memory(num_bytes, pin=kind == "pinned") for _ in "ab"]
        cases = {
            f"copies to the host, {kind}": [(far[0], near[0])],
            f"copies to the device, {kind}": [(near[1], far[1])],
        }
        if kind == "pinned":
            both = [pair for pairs in cases.values() for pair in pairs]
            cases["copies both ways at once, pinned, sum"] = both
        for name, pairs in cases.items():
            moved = len(pairs) * num_bytes
            times = [
                device.seconds(lambda p=pairs: device.start_copies(p))
                for _ in range(scale.rounds + 1)
            ]
            rates = [moved / seconds for seconds in times[1:]]
            yield _sample(name, rates, f"{num_bytes >> 20} MiB a copy, memory of offload/pinned.py")


def _products(device: Device, scale: Scale) -> Iterator[Sample]:
    for name, (rows, inner, columns) in zip(MATMUL, scale.matmul, strict=True):
        like = {"device": device.torch_device, "dtype": torch.bfloat16}
        left, right = torch.randn(rows, inner, **like), torch.randn(inner, columns, **like)

        def work(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            for _ in range(4):
                left @ right

        flops = 8 * rows * inner * columns
        times = [device.seconds(work) for _ in range(scale.rounds + 1)]
        yield _sample(name, [flops / each for each in times[1:]], f"{rows} x {inner} x {columns}")


def _adam(scale: Scale) -> Iterator[Sample]:
    """The op of the updates, with as many threads as the engine uses on one rank."""
    import xds.ops.kernels.adam  # noqa: F401 (defines the op)
    from xds.offload.cores import choose, this_machine
    from xds.ops.libraries import load

    load("cpu", require=True)
    threads = choose(this_machine(), os.environ, 0.8, torch.get_num_threads()).num_threads
    torch.set_num_threads(threads)
    numel = scale.adam_numel
    master, mean, square, *old = (torch.ones(numel) for _ in range(6))
    grad, out = (torch.ones(numel, dtype=torch.bfloat16) for _ in "ab")
    step = torch.ones(())
    rates = (1e-3, 0.9, 0.999, 1e-8, 0.01, True, True)
    note = f"{threads} threads, {numel / 1e6:.0f}M elements, {ADAM_BYTES} bytes an element"
    for name, place in zip(ADAM, ((), (False, *old)), strict=True):
        found = []
        for _ in range(scale.rounds + 1):
            start = time.perf_counter()
            torch.ops.xds.adam_(master, grad, mean, square, out, step, None, None, *rates, *place)
            found.append(ADAM_BYTES * numel / (time.perf_counter() - start))
        elements = median(found[1:]) / ADAM_BYTES / 1e9
        yield _sample(name, found[1:], f"{note}; {elements:.2f}e9 elements a second")


def _disk(folder: Path, scale: Scale) -> Iterator[Sample]:
    from disk import MIB, NUM_SLOTS, Bare

    from xds.offload.disk.options import DiskOptions
    from xds.offload.pinned import host_memory

    extent = min(64 * MIB, scale.disk_bytes // NUM_SLOTS)
    slots = list(host_memory(NUM_SLOTS * extent, pin=False).random_(0, 256).split(extent))
    with tempfile.TemporaryDirectory(dir=folder, prefix="disk-") as inside:
        bare = Bare(Path(inside), scale.disk_bytes, DiskOptions(MIB, 8), slots)
        bare.run("write")
        for name, operation in zip(DISK, ("write", "read"), strict=True):
            found = []
            for _ in range(min(3, scale.rounds)):
                start = time.perf_counter()
                bare.run(operation)
                found.append(scale.disk_bytes / (time.perf_counter() - start))
            yield _sample(name, found, "blocks of 1 MiB, depth 8")
        bare.close()


def _sample(name: str, rates: list[float], note: str) -> Sample:
    return {"name": name, "rates": rates, "note": note}


__all__ = ["NAMES", "measure", "row_of", "summary"]
