"""Parts of `main.py --more`: what does not fit into one call, or is seldom asked.

python benchmarks/gpu/more.py largest      # or another name of PARTS
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

import common
import timing
import torch
import torch.distributed as dist
from common import IS_CUDA, IS_TINY, Shape, figure

GPT_67 = timing.TINY if IS_TINY else Shape(32, 4096, 32, 2048)  # 6.7B


STEPS = (
    ("xds 3", timing.xds, {"stage": 3, "activation_checkpointing": {}}),
    ("plain", timing.plain, {"recomputes": True}),
)


def larger() -> None:
    """6.7B, recomputed, 2 sequences of 2,048 tokens: one after the other, for two do not fit."""
    table = "6.7B GPT, bf16, recomputed, 4,096 tokens"
    need = 19 * GPT_67.numel  # bf16 values, fp32 gradients, masters and moments; and a step
    have = torch.cuda.get_device_properties(0).total_memory if IS_CUDA else need
    if have < need:
        figure(table, "xds 3", "", f"not run: it needs {need / 1e9:.0f} GB")
        return
    for name, make, more in STEPS:
        race = timing.Race(GPT_67, 2)
        if not race.add(name, make, **more):
            continue
        found, peak = race.run(name, race.batch, 3, 3)[name], race.contestants[name].peak_bytes
        figure(table, name, "tokens/s", f"{found['tokens_a_second']:,.0f}", **found)
        figure(table, name, "matrix share", f"{found['matrix_share']:.2f}")
        figure(table, name, "peak GB", f"{peak / 1e9:.1f}", bytes=peak)
        race.drop(name)


def largest() -> None:
    """The most layers of width 4096 that train: one sequence of 2,048 tokens, recomputed."""
    most = 3 if IS_TINY else 256
    for name, make, more in STEPS:
        good, bad = 0, most + 1
        while bad - good > 1 and common.left() > 20:
            layers = min(2 * good or 8, most) if bad > most else (good + bad) // 2
            print(f"# {name}, {layers} layers", flush=True)
            try:
                shape = _wide(layers)
                batch = torch.zeros(1, shape.context + 1, dtype=torch.int64, device=common.DEVICE)
                timing.Contestant(make, shape, batch, **more).end()
                good = layers
            except torch.OutOfMemoryError:
                bad = layers
            common.release()
        text = f"{_wide(good).numel / 1e9:.2f}e9, {good} layers"
        text += "" if bad - good == 1 else "; the time ended"
        figure("largest GPT that trains, width 4096", name, "parameters", text, layers=good)


def _wide(layers: int) -> Shape:
    return Shape(layers, 32, 2, 16, 64) if IS_TINY else Shape(layers, 4096, 32, 2048)


def checkpoints() -> None:
    """355M: seconds that a save holds up training, until it is complete, and of a load."""
    folder = Path(tempfile.mkdtemp())
    table = "checkpoints of 355M: seconds"
    for stage in (0, 3):
        for is_async in (False, True):
            race = timing.Race(timing.MEDIUM, 1)
            name = f"xds {stage}, {'background' if is_async else 'blocking'}"
            section = {"async_save": is_async}
            if not race.add(name, timing.xds, stage=stage, checkpoint=section):
                continue
            engine = race.contestants[name].engine
            for _ in range(2):  # the first one takes the memory
                shutil.rmtree(folder / "save", ignore_errors=True)
                common.synchronize()
                start = time.perf_counter()
                engine.save_checkpoint(str(folder / "save"))
                call = time.perf_counter() - start
                engine.wait_for_checkpoint()
                whole = time.perf_counter() - start
            start = time.perf_counter()
            engine.load_checkpoint(str(folder / "save"))
            common.synchronize()
            load = time.perf_counter() - start
            for column, seconds in (("call", call), ("complete", whole), ("load", load)):
                figure(table, name, column, f"{seconds:.2f}", seconds=seconds)
            race.drop(name)
    shutil.rmtree(folder, ignore_errors=True)


def traces() -> None:
    """Chrome traces of one step of 355M, into XDS_BENCH_OUT."""
    race, out = timing.Race(timing.MEDIUM, timing.FEW), Path(common.OUT)
    for stage in (0, 2, 3):
        race.add(f"xds {stage}", timing.xds, stage=stage)
    for name, each in race.contestants.items():
        file = out / f"{name.replace(' ', '-')}.trace.json"
        with torch.profiler.profile() as profiler:
            each.step()
            common.synchronize()
        profiler.export_chrome_trace(str(file))
        figure("traces of a step", name, "file", file.name)


PARTS = {"6.7B": larger, "largest": largest, "checkpoint times": checkpoints, "traces": traces}

if __name__ == "__main__":
    logging.getLogger("xds").setLevel(logging.ERROR)
    timing.start_group()
    PARTS[sys.argv[1]]()
    dist.destroy_process_group()
