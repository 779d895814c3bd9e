"""Time a load against a raw read of the same bytes, at the same and at another number of ranks.

    python benchmarks/checkpoint/load.py [--folder DIR] [--gigabytes 1] [--rounds 5] [--ranks 2,4] [--warm]

Each rank reads its share from the disk: it is removed from the page cache first (not with --warm). Raw: the
rank's own file, 4 MiB at a time, into allocated memory, without checksums. All variants alternate.
`fresh`: an engine without optimizer states, as after a start. `again`: into existing states.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import Row, finish, ratio_row, run_ranks, slowest  # noqa: E402

MAX_LOAD, MAX_RESHARDED = 1.25, 1.5
WIDTH, READ_BYTES = 1024, 4 << 20
STATE_BYTES = 12  # fp32 value and two moments
LAYOUTS = ((3, 3), (2, 1))  # stage now and stage of what was saved


def build(gigabytes: float, stage: int) -> Any:
    """An engine with this number of bytes of values and states over all ranks, after one step."""
    import torch
    from torch import nn

    import xds

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(self.norm(x)))

    depth = max(1, round(gigabytes * 1e9 / STATE_BYTES / (4 * WIDTH * WIDTH)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    engine = xds.initialize(nn.Sequential(*(Block() for _ in range(depth))), config)
    engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
    engine.step()
    return engine


def write(rank: int, world_size: int, folder: str, gigabytes: float) -> None:
    for stage in {stage for pair in LAYOUTS for stage in pair}:
        build(gigabytes, stage).save_checkpoint(folder, f"{world_size}-{stage}")


def forget(folder: Path) -> None:
    """Remove the files from the page cache."""
    for path in folder.glob("rank_*"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def raw_read(path: Path, memory: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    size = os.fstat(fd).st_size
    for at in range(0, size, READ_BYTES):
        os.preadv(fd, [memory[at : min(at + READ_BYTES, size)]], at)
    os.close(fd)


def measure(
    rank: int, world_size: int, folder: str, gigabytes: float, rounds: int, warm: bool, stage: int
) -> dict[str, list[float]]:
    import torch.distributed as dist

    root = Path(folder)
    engine = build(gigabytes, stage)
    own = next((root / f"{world_size}-{stage}").glob(f"rank_{rank:05d}-*"))
    memory = memoryview(bytearray(own.stat().st_size))

    def load(tag: str) -> Callable[[], None]:
        return lambda: engine.load_checkpoint(folder, tag)

    same = f"{world_size}-{stage}"
    turns: dict[str, tuple[str, Callable[[], None]]] = {
        "raw": (same, lambda: raw_read(own, memory)),
        "same fresh": (same, load(same)),
        "same again": (same, load(same)),
    }
    for size, old_stage in sorted(path.name.split("-") for path in root.glob("[0-9]*-*")):
        if int(size) != world_size and (stage, int(old_stage)) in LAYOUTS:
            turns[f"from {size} ranks"] = (f"{size}-{old_stage}", load(f"{size}-{old_stage}"))
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(rounds + 1):
        for name, (tag, run) in turns.items():
            if name != "same again":
                engine.optimizer.state.clear()
            dist.barrier()
            if not warm and rank == 0:
                forget(root / tag)
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def rows_of(found: dict[str, list[float]], where: str) -> list[Row]:
    rows = []
    for name, seconds in found.items():
        if name == "raw":
            continue
        peer = "raw" if name.startswith("same") else "same fresh"
        must = {"same fresh": MAX_LOAD, "same again": None}.get(name, MAX_RESHARDED)
        note = f"{statistics.median(seconds):.3f} s, raw {statistics.median(found['raw']):.3f} s"
        label = f"load, {where}, {name}, over {peer}"
        rows.append(ratio_row(label, seconds, found[peer], must=must, note=note))
    return rows


def main() -> int:
    """Run every layout; 1 if a row fails."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--folder", type=Path)
    options.add_argument("--gigabytes", type=float, default=1.0)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--warm", action="store_true")
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=given.folder))
    rows: list[Row] = []
    try:
        sizes = [int(size) for size in given.ranks.split(",")]
        for size in {*sizes, 3}:
            run_ranks(write, size, str(folder), given.gigabytes)
        for size in sizes:
            for stage, _ in LAYOUTS:
                arguments = (str(folder), given.gigabytes, given.rounds, given.warm, stage)
                found = slowest(run_ranks(measure, size, *arguments))
                rows += rows_of(found, f"{size} ranks, stage {stage}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return finish(__file__, rows, keeps=not given.warm)


if __name__ == "__main__":
    sys.exit(main())
