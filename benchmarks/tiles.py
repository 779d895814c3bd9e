"""Peak memory and time of an MLP and of a loss, plain and in tiles, at 1 to 8 times the tokens.

    python benchmarks/tiles.py [--only PATTERN] [--quick]

The peak is that of forward and backward above the states: weights, inputs, outputs and the gradients of all of
them. It is given in tiles: one is the memory that plain PyTorch needs for the tokens of a tile.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import Row, Watch, anonymous_bytes, finish, peak_of, run_ranks  # noqa: E402

MIB = 2**20
TILE, FACTORS = 1024, (1, 2, 4, 8)  # tokens of a tile; the shortest sequence has two tiles
WIDTH, INNER, CLASSES = 256, 2048, 8192
MAX_TILES, MAX_GROWTH = 2.0, 1.05
WAYS = {
    "MLP": ("plain", "tiled"),
    "loss": ("plain", "tiled", "recomputed"),
}
ROUNDS = 3


def work(kind: str, way: str, tokens: int) -> tuple[Callable[[], None], int]:
    """One forward and backward, and the bytes of its states, which any way to compute it has."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from xds.tensor import run_in_tiles, tiled_loss, tiled_mlp

    torch.manual_seed(0)
    tiles = -(-tokens // TILE)
    x = torch.randn(1, tokens, WIDTH, requires_grad=True)
    if kind == "MLP":
        model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        seed = torch.randn(1, tokens, WIDTH)
        states = (2 + 2) * x.nbytes  # input, output and their gradients

        def once() -> None:
            output = model(x) if way == "plain" else tiled_mlp(model, x, tiles)
            output.backward(seed)
    else:
        model = nn.Linear(WIDTH, CLASSES, bias=False)  # type: ignore[assignment]
        labels = torch.randint(0, CLASSES, (1, tokens))
        states = 2 * x.nbytes + labels.nbytes

        def sums(x: Any, labels: Any) -> Any:
            logits = model(x).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), reduction="sum")[None]

        def once() -> None:
            if way == "plain":
                loss = sums(x, labels)[0] / tokens
            elif way == "tiled":
                loss = tiled_loss(x, model.weight, labels, tiles=tiles)  # type: ignore[arg-type]
            else:
                weights = list(model.parameters())
                parts = run_in_tiles(sums, [x, labels], tiles=tiles, output_dim=0, weights=weights)
                loss = parts.sum() / tokens
            loss.backward()

    def fresh() -> None:
        once()
        x.grad = None
        model.zero_grad()

    return fresh, states + 2 * sum(p.nbytes for p in model.parameters())


def measure(_: int, __: int, kind: str, way: str, tokens: int) -> dict[str, float]:
    """In a fresh process: bytes of the peak above the states, and seconds of a forward and backward."""
    before = anonymous_bytes()
    once, _states = work(kind, way, TILE)
    once()  # libraries are loaded and their buffers exist
    del once
    before = anonymous_bytes()
    once, states = work(kind, way, tokens)
    _, peak = peak_of(once)
    seconds = []
    for _round in range(ROUNDS):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return {"peak": peak - before - states, "seconds": statistics.median(seconds)}


def rows_of(kind: str, factors: tuple[int, ...]) -> list[Row]:
    """A row for each way and length, and the growth over lengths."""
    found = {
        (way, factor): run_ranks(measure, 1, kind, way, 2 * TILE * factor)[0]
        for factor in factors
        for way in WAYS[kind]
    }
    one_tile = found["plain", factors[-1]]["peak"] / (2 * factors[-1])
    rows = []
    for (way, factor), at in found.items():
        row = Row(f"{kind}, {factor}x, {way}: tiles", at["peak"] / one_tile, unit=" tiles")
        if way == "tiled":
            row.must = MAX_TILES
        slower = at["seconds"] / found["plain", factor]["seconds"]
        row.note = f"{2 * TILE * factor} tokens, {at['peak'] / MIB:.0f} MiB; {slower:.2f}x the time of plain"
        rows.append(row)
    for way in WAYS[kind]:
        growth = found[way, factors[-1]]["peak"] / found[way, factors[0]]["peak"]
        row = Row(f"{kind}, {way}: peak at {factors[-1]}x over 1x", growth)
        if way == "tiled":
            row.must = MAX_GROWTH
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="*", help="MLP or loss, as a shell pattern")
    parser.add_argument("--quick", action="store_true", help="1x and 2x; keeps nothing")
    arguments = parser.parse_args()
    # memory that is freed goes back to the system at once
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows: list[Row] = []
    for kind in WAYS:
        if not fnmatch.fnmatch(kind, arguments.only):
            continue
        with Watch() as watch:
            new = rows_of(kind, FACTORS[:2] if arguments.quick else FACTORS)
        for row in new:
            row.others_busy = watch.others
        rows += new
    return finish(__file__, rows, keeps=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
