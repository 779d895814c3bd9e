"""Counts bytes: of states on host and device, and of the copies between them in a step."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from model import GPT, Shape
from roofline import host_bytes, lane_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import xds
from xds.offload import lanes
from xds.offload.sender import NUM_BUFFERS

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import Row  # noqa: E402

COPIES = ("xds-to-host", "xds-to-device")
SHAPE = Shape(layers=6, width=64, heads=4, context=16, vocabulary=64)
COUNTED = (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor)


class Counting(TorchDispatchMode):
    """Counts the bytes of sources of copies and of sums in place, in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COUNTED and isinstance(args[1], Tensor):
            self.num_bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


class Traffic:
    """The bytes of all copies in each lane, by the name of the lane. On a CPU lanes are threads."""

    def __init__(self) -> None:
        self._total: Counter[str] = Counter()
        self._lanes: dict[str, lanes.ThreadLane] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, the copies of new jobs are counted."""
        run = lanes.ThreadLane.run

        def counting_run(lane: lanes.ThreadLane, job: Callable[[], Any], after: Any = None) -> Any:
            def counted() -> None:
                with Counting() as counting:
                    job()
                self._total[lane.name] += counting.num_bytes

            self._lanes[lane.name] = lane
            return run(lane, counted if lane.name in COPIES else job, after)

        with mock.patch.object(lanes.ThreadLane, "run", counting_run):
            yield

    def total(self) -> tuple[int, int]:
        """Bytes to the host, and to the device, when all jobs are done."""
        for name in (COPIES[0], "xds-update", COPIES[1]):  # each may add jobs to the next one
            self._lanes[name].run(lambda: None).wait()
        return self._total[COPIES[0]], self._total[COPIES[1]]


def build(stage: int, accumulation: int, *, params: bool) -> xds.Engine:
    torch.manual_seed(1)
    zero: dict[str, Any] = {
        "stage": stage,
        "unit_min_numel": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu"},
    }
    if params:
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    return xds.initialize(GPT(SHAPE), config)


def train(engine: xds.Engine, steps: int) -> None:
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randint(SHAPE.vocabulary, (2, SHAPE.context + 1))))
        engine.step()


def unit_numels(engine: xds.Engine) -> list[int]:
    return [flat.layout.numel for unit in engine._parts.sharded.units for flat in unit.params]


def rows() -> Iterator[Row]:
    """Bytes a parameter, one rank, bf16 and Adam; every row must be exact."""
    for stage, accumulation, params in ((2, 1, False), (2, 4, False), (3, 1, False), (3, 1, True)):
        where = ", offload_param" if params else ""
        times = f", {accumulation} micro-batches" if accumulation > 1 else ""
        name = f"stage {stage}{where}{times}"
        yield from _memory_rows(name, stage, accumulation, params)
        yield from _traffic_rows(name, stage, accumulation, params)
    yield _units_row()


def _memory_rows(name: str, stage: int, accumulation: int, params: bool) -> Iterator[Row]:
    gc.collect()
    known = storages()
    engine = build(stage, accumulation, params=params)
    train(engine, 2)
    engine.full_state_dict()  # a call that waits for the updates
    gc.collect()
    sizes, plan = unit_numels(engine), engine.memory_plan()
    fresh = sum(size for at, size in storages().items() if known.get(at) != size)
    numel, counts = sum(sizes), 4 * len(sizes)  # Adam's step counts
    ring = 0 if params else NUM_BUFFERS * 2 * max(sizes)
    want = host_bytes(accumulation, params_on_host=params)
    note = f"and {ring} bytes of buffers, {counts} of step counts; {numel} parameters"
    yield exact_row(f"host bytes, {name}", (plan["host"] - ring - counts) / numel, want, note)
    near = sum(plan[kind] for kind in ("param", "grad", "master", "optimizer"))
    yield exact_row(f"device bytes, {name}", near / numel, 0 if params else 2)
    row = Row(f"bytes of all tensors / planned, {name}", fresh / sum(plan.values()), must=1.01)
    row.note = f"{fresh} bytes in storages; planned {plan}"
    yield row
    engine.destroy()


def _traffic_rows(name: str, stage: int, accumulation: int, params: bool) -> Iterator[Row]:
    steps, traffic = 3, Traffic()
    with traffic.counted():
        engine = build(stage, accumulation, params=params)
        train(engine, 2)
        before = traffic.total()
        train(engine, steps)
        numel = sum(unit_numels(engine)) * steps
        out, back = ((b - a) / numel for a, b in zip(before, traffic.total(), strict=True))
        engine.destroy()
    want_out, want_back = lane_bytes(accumulation, params_on_host=params)
    yield exact_row(f"bytes to the host in a step, {name}", out, want_out)
    if not params:
        yield exact_row(f"bytes to the device in a step, {name}", back, want_back)
        both = f"formula: 2 x {accumulation} + 2"
        yield exact_row(
            f"bytes both ways in a step, {name}", out + back, want_out + want_back, both
        )
        return
    row = Row(f"bytes to the device in a step, {name}", back, must=want_back, unit=" B")
    row.note = (
        "at most: forward and backward fetch each unit; those still needed are not fetched again"
    )
    yield row


def _units_row() -> Row:
    """With offload_param: parameters of blocks on the device, in blocks.

    Forward begins and ends with the parameters outside of the blocks, so they stay.
    """
    engine = build(3, 1, params=True)
    flats = [flat for unit in engine._parts.sharded.units for flat in unit.params]
    block_bytes = 2 * max(flat.layout.numel for flat in flats)
    blocks = [flat for flat in flats if 2 * flat.layout.numel == block_bytes]
    held = []

    def count(*_: Any) -> None:
        held.append(sum(flat.raw.untyped_storage().nbytes() for flat in blocks))

    for block in engine.module.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(count)
        block.register_full_backward_hook(count)
    train(engine, 2)
    others = 2 * sum(unit_numels(engine)) - block_bytes * len(blocks)
    engine.destroy()
    row = Row("blocks on the device, stage 3, offload_param", max(held) / block_bytes, must=2.0)
    row.unit = " blocks"
    row.note = f"at the end of each block's forward and backward; a block has {block_bytes} bytes, "
    row.note += f"and the parameters outside of blocks, {others} bytes, are there as well"
    return row


def storages() -> dict[int, int]:
    """Bytes of every storage that a live tensor refers to, by address."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def exact_row(name: str, value: float, want: float, note: str = "") -> Row:
    row = Row(name, value, must=want, unit=" B", note=note)
    if value != want:
        row.void = "FAIL"
    return row


__all__ = ["rows"]
