"""Time saves against a raw write of the same bytes, and against torch's two save functions.

    python benchmarks/checkpoint/main.py [--rounds 7] [--only WORD] [--quick]

Ranks are gloo processes with one thread each. A raw write shows the speed of the disk: each rank
writes its share to its own file, 4 MiB at a time, and fsyncs it. See also load.py, kills.py and corruption.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import (  # noqa: E402
    RankFailed,
    Row,
    Watch,
    finish,
    ratio_row,
    run_ranks,
    slowest,
)
from saving import MIB, background, synchronous, without_sums  # noqa: E402

MAX_MEMORY_MIB = 64.0


def synchronous_rows(folder: str, world_size: int, rounds: int) -> Iterator[Row]:
    for kind, dcp_aim in (("1.2 GB", None), ("3,000 tensors", 1 / 3)):
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
            ratio_row(f"save / DCP, {what}", seconds["xds"], seconds["dcp"], must=1.0, aim=dcp_aim),
        ]
        if kind == "1.2 GB":
            raw = ratio_row(
                f"save / raw write, {what}", seconds["xds"], seconds["raw"], must=1.25, aim=1.1
            )
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
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
