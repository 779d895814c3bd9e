"""Measure the memory and time of `xds checkpoint import` for a ZeRO-2 checkpoint in DeepSpeed's format.

    python benchmarks/checkpoint/import_memory.py [--layers 40] [--folder DIR]

The checkpoint is made here (bf16 weights, fp32 masters and moments of two ranks), so no DeepSpeed is needed.
Anonymous memory is the process's own memory; mapped pages belong to the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch

WIDTH, WORLD_SIZE, TAG = 1024, 2, "global_step3"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        source, out = Path(name, "source"), Path(name, "out")
        make(source / TAG, asked.layers)
        (source / "latest").write_text(TAG)
        measure(source, out)


def make(folder: Path, num_layers: int) -> None:
    """Write the files of all ranks, each with its own masters and moments."""
    folder.mkdir(parents=True)
    shapes = {f"layers.{n}.weight": torch.Size([WIDTH, WIDTH]) for n in range(num_layers)}
    model = {
        "module": {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()},
        "buffer_names": [],
        "param_shapes": [shapes],
        "shared_params": {},
        "global_steps": 3,
        "ds_config": {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}},
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    numel = num_layers * WIDTH * WIDTH // WORLD_SIZE
    for rank in range(WORLD_SIZE):
        states = {"step": torch.tensor(3.0)}
        states |= {key: torch.randn(numel) for key in ("exp_avg", "exp_avg_sq")}
        base = {"state": {0: states}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
        optimizer = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [torch.randn(numel)],
            "partition_count": [WORLD_SIZE],
        }
        path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)


def resident_mib() -> dict[str, float]:
    """RssAnon and RssFile of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {key: int(found[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile")}


def measure(source: Path, out: Path) -> None:
    from xds.engine.checkpoint.imports.importing import import_checkpoint

    before = resident_mib()
    peak = dict(before)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            for key, value in resident_mib().items():
                peak[key] = max(peak[key], value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    report = import_checkpoint(source, out)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    size = sum(path.stat().st_size for path in report.folder.iterdir())
    grown = {key: peak[key] - before[key] for key in peak}
    print(
        f"{size / 1e6:.0f} MB imported in {seconds:.2f} s; anonymous memory +{grown['RssAnon']:.1f} MiB, "
        f"mapped pages +{grown['RssFile']:.0f} MiB"
    )


if __name__ == "__main__":
    main()
