"""Time saves against a raw write of the same bytes, and against torch's two save functions.

    python benchmarks/checkpoint/save.py [--rounds 7] [--only WORD] [--quick]

Ranks are gloo processes with one thread each. A raw write shows the speed of the disk: each rank
writes its share to its own file, 4 MiB at a time, and fsyncs it. See also load.py and kills.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from harness import (  # noqa: E402
    RankFailed,
    Row,
    Watch,
    anonymous_bytes,
    finish,
    peak_of,
    ratio_row,
    run_ranks,
    slowest,
)

MAX_MEMORY_MIB = 64.0
MIB = 2**20
WRITE_BYTES = 4 * MIB
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {"stage": 2},
}


def large_model() -> Any:
    """101M parameters: 1.2 GB of values and moments."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))


def many_tensors() -> Any:
    """1,000 tensors, so 3,000 with their moments; 47 MB."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(62, 62) for _ in range(500)))


MODELS: dict[str, Callable[[], Any]] = {"1.2 GB": large_model, "3,000 tensors": many_tensors}


def engine_of(model: Any, **more: Any) -> Any:
    """An engine that has taken one step, so that its optimizer has states."""
    import xds

    engine = xds.initialize(model, {**CONFIG, **more})
    step(engine)
    return engine


def step(engine: Any) -> None:
    """One step on this rank's next random sample."""
    import torch

    engine.backward(engine(torch.randn(1, engine.module[0].in_features)).square().mean())
    engine.step()


def states_bytes(engine: Any) -> int:
    """Bytes of values and moments of the whole model."""
    return 12 * sum(param.numel() for param in engine.module.parameters())


class Turns:
    """Contestants that write in turn, each into a new folder that is removed afterwards."""

    def __init__(self, folder: str, rounds: int) -> None:
        self.folder = Path(folder)
        self.rounds = rounds
        self.seconds: dict[str, list[float]] = {}

    def run(self, writers: dict[str, Callable[[Path], Any]]) -> None:
        """One warm-up of each, then `rounds` turns; the order is reversed from round to round."""
        names = list(writers)
        for number in range(-1, self.rounds):
            for name in names if number % 2 else reversed(names):
                seconds = self.one(writers[name])
                if number >= 0:
                    self.seconds.setdefault(name, []).append(seconds)

    def one(self, write: Callable[[Path], Any]) -> float:
        import torch.distributed as dist

        target = self.folder / "turn"
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            os.sync()  # so that this turn does not write the blocks of the last one
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        write(target)
        dist.barrier()
        return time.perf_counter() - start


def raw_write(size_bytes: int) -> Callable[[Path], None]:
    """Each rank writes `size_bytes` to a file of its own, WRITE_BYTES at a time, and fsyncs it."""
    import torch
    import torch.distributed as dist

    content = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)
    view = memoryview(content.numpy())

    def write(target: Path) -> None:
        fd = os.open(target / f"{dist.get_rank()}.bin", os.O_CREAT | os.O_WRONLY)
        for at in range(0, size_bytes, WRITE_BYTES):
            os.write(fd, view[at : at + WRITE_BYTES])
        os.fsync(fd)
        os.close(fd)

    return write


def torch_writers(model: Any) -> dict[str, Callable[[Path], None]]:
    """FSDP2 with AdamW on the same model, saved by DCP as its users do, and shard by shard by torch.save."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(1, model[0].in_features)).square().mean().backward()
    optimizer.step()

    def save_dcp(target: Path) -> None:
        states, moments = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": moments}, checkpoint_id=target)

    def local(value: Any) -> Any:
        return value.to_local() if hasattr(value, "to_local") else value

    def save_shards(target: Path) -> None:
        """Each rank's shards of values and moments into one file, fsynced."""
        held = [
            {"value": local(param), **{k: local(v) for k, v in optimizer.state[param].items()}}
            for param in model.parameters()
        ]
        with open(target / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(held, file)
            file.flush()
            os.fsync(file.fileno())

    return {"dcp": save_dcp, "torch.save": save_shards}


# -- what a rank does ---------------------------------------------------------------------------------------


def synchronous(rank: int, world_size: int, folder: str, kind: str, rounds: int) -> dict[str, Any]:
    """The seconds of every turn, and the growth of memory in a save."""
    import torch

    torch.manual_seed(0)
    engine = engine_of(MODELS[kind]())
    share = states_bytes(engine) // world_size
    turns = Turns(folder, rounds)
    turns.run(
        {
            "xds": engine.save_checkpoint,
            "raw": raw_write(share),
            **torch_writers(MODELS[kind]()),
        }
    )
    gc.collect()  # frees the memory of earlier saves before this one begins
    before_bytes = anonymous_bytes()
    _, peak_bytes = peak_of(lambda: turns.one(engine.save_checkpoint))
    return {
        "seconds": turns.seconds,
        "grown": peak_bytes - before_bytes,
        "bytes": share * world_size,
    }


def without_sums(rank: int, world_size: int, folder: str, rounds: int) -> dict[str, Any]:
    """The same save with and without the CRC-32 of what is written."""
    import zlib

    import torch

    from xds.engine.checkpoint.io import tensor_file

    torch.manual_seed(0)
    engine = engine_of(large_model())

    class NoSums:
        """Replaces zlib in the writer."""

        crc32 = staticmethod(lambda part, crc=0: 0)

    def bare(target: Path) -> None:
        tensor_file.zlib = NoSums  # type: ignore[assignment]
        try:
            engine.save_checkpoint(target)
        finally:
            tensor_file.zlib = zlib

    turns = Turns(folder, rounds)
    turns.run({"with": engine.save_checkpoint, "without": bare})
    return {"seconds": turns.seconds}


def background(rank: int, world_size: int, folder: str, rounds: int) -> dict[str, Any]:
    """The stall of a background save, and steps with and without one running."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    engine = engine_of(large_model(), checkpoint={"async_save": True})
    direct = engine_of(large_model())
    share = states_bytes(engine) // world_size
    source, target = torch.ones(share, dtype=torch.uint8), torch.ones(share, dtype=torch.uint8)
    turns = Turns(folder, rounds)
    found: dict[str, list[float]] = {
        name: [] for name in ("stall", "copy", "direct", "step", "meanwhile", "first")
    }

    def steps_until_saved() -> list[float]:
        """Seconds of each step until every rank's part is written."""
        seconds = []
        busy = torch.ones(1)
        while busy:
            seconds.append(timed(lambda: step(engine)))
            busy = torch.tensor([float(engine.checkpoint_progress() is not None)])
            dist.all_reduce(busy)
        return seconds

    for number in range(-1, rounds):
        quiet = [timed(lambda: step(engine)) for _ in range(8)]
        copy = statistics.median(timed(lambda: target.copy_(source)) for _ in range(3))
        stall = turns.one(engine.save_checkpoint)
        during = steps_until_saved()
        engine.wait_for_checkpoint()
        whole = turns.one(direct.save_checkpoint)
        if number < 0:
            found["first"].append(stall)
            continue
        found["stall"].append(stall)
        found["copy"].append(copy)
        found["direct"].append(whole)
        found["step"].append(statistics.median(quiet))
        found["meanwhile"].append(statistics.median(during))
    engine.destroy()
    return {"seconds": found, "bytes": share * world_size}


def timed(work: Callable[[], Any]) -> float:
    """Seconds of `work`, on all ranks together."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


# ---- the rows -----------------------------------------------------------------------------------


def synchronous_rows(folder: str, world_size: int, rounds: int) -> Iterator[Row]:
    for kind in ("1.2 GB", "3,000 tensors"):
        with Watch() as watch:
            ranks = run_ranks(synchronous, world_size, folder, kind, rounds)
        seconds = slowest([rank["seconds"] for rank in ranks])
        what = f"{kind}, {world_size} ranks"
        rate = ranks[0]["bytes"] / statistics.median(seconds["raw"]) / 1e9
        rows = [
            ratio_row(
                f"save / torch.save + fsync, {what}",
                seconds["xds"],
                seconds["torch.save"],
                must=1.0,
            ),
            ratio_row(f"save / DCP, {what}", seconds["xds"], seconds["dcp"], must=1.0),
        ]
        if kind == "1.2 GB":
            raw = ratio_row(f"save / raw write, {what}", seconds["xds"], seconds["raw"], must=1.25)
            raw.note = f"raw {rate:.2f} GB/s"
            grown = max(rank["grown"] for rank in ranks) / MIB
            memory = Row(
                f"memory on top of a save, {what}", grown, must=MAX_MEMORY_MIB, unit=" MiB"
            )
            rows = [raw, *rows, memory]
        for row in rows:
            row.others_busy = watch.others
            row.note = row.note or f"{statistics.median(seconds['xds']):.3f} s"
            yield row


def sums_rows(folder: str, world_size: int, rounds: int) -> Iterator[Row]:
    with Watch() as watch:
        ranks = run_ranks(without_sums, world_size, folder, rounds)
    seconds = slowest([rank["seconds"] for rank in ranks])
    name = f"save / save without checksums, {world_size} ranks"
    row = ratio_row(name, seconds["with"], seconds["without"], must=1.05)
    row.others_busy = watch.others
    yield row


def background_rows(folder: str, world_size: int, rounds: int) -> Iterator[Row]:
    with Watch() as watch:
        ranks = run_ranks(background, world_size, folder, rounds)
    seconds = slowest([rank["seconds"] for rank in ranks])
    what = f"{world_size} ranks"
    stall = statistics.median(seconds["stall"])
    first = seconds["first"][0]
    rows = [
        ratio_row(
            f"stall / one copy of the states, {what}", seconds["stall"], seconds["copy"], must=1.3
        ),
        ratio_row(
            f"stall / synchronous save, {what}", seconds["stall"], seconds["direct"], must=0.10
        ),
        ratio_row(
            f"steps meanwhile / steps, {what}", seconds["meanwhile"], seconds["step"], must=1.10
        ),
    ]
    rows[0].note = f"{stall:.3f} s; the first one, which takes the memory: {first:.3f} s"
    for row in rows:
        row.others_busy = watch.others
        yield row


PARTS = {"save": synchronous_rows, "checksums": sums_rows, "background": background_rows}


def main() -> int:
    """Run every part; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part")
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is kept")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    rows: list[Row] = []
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        for world_size in [int(word) for word in options.ranks.split(",")]:
            with tempfile.TemporaryDirectory(dir=".", prefix="checkpoints-") as folder:
                try:
                    rows += part(folder, world_size, rounds)
                except RankFailed as error:
                    print(error, flush=True)
                    rows.append(
                        Row(f"{name}, {world_size} ranks", must=0.0, void="FAIL (a rank failed)")
                    )
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
