"""Time of sparse attention on a CPU over dense attention: forward and backward, by layout and threads.

    python benchmarks/sparse_attention.py [--only PATTERN] [--quick] [--cpu-time]

Dense is torch's scaled_dot_product_attention of the same tensors, causal for layouts that are. The figure is
the ratio of the times divided by the density: the share of dense's blocks that the layout has. Of a causal
layout it is the share of the triangle, which is what dense computes. Both take turns. --cpu-time counts the
time of the process instead of the clock's: for one thread, on a machine where others work as well.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import Row, Watch, finish  # noqa: E402

TOKENS, BLOCK, HEADS, DEPTH = 4096, 64, 4, 64
MUST = 1.5
ROUNDS = 9
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed": ("Fixed", {"num_local_blocks": 4, "num_global_blocks": 1}),
    "fixed, windows of 8": ("Fixed", {"num_local_blocks": 8, "num_global_blocks": 1}),
    "fixed, causal": ("Fixed", {"num_local_blocks": 8, "attention": "unidirectional"}),
    "bigbird": ("BigBird", {"num_random_blocks": 3}),
    "bslongformer": ("BSLongformer", {}),
    "random": ("Variable", {"num_random_blocks": 12}),
    "band of 9, causal": ("LocalSlidingWindow", {"num_sliding_window_blocks": 17}),
}


def measure(name: str, threads: int, rounds: int, clock: Any) -> Row:
    """One row. Both contestants run in this process and take turns."""
    import torch
    from torch.nn import functional as F

    from xds.ops import sparse_attention as sparse
    from xds.utils.host_memory import keep_freed_blocks

    keep_freed_blocks()  # as the engine does
    torch.set_num_threads(threads)
    kind, more = LAYOUTS[name]
    random.seed(0)
    torch.manual_seed(0)
    layout = getattr(sparse, kind)(1, BLOCK, **more).make_layout(TOKENS)
    is_causal = more.get("attention") == "unidirectional" or kind == "LocalSlidingWindow"
    n = TOKENS // BLOCK
    density = (
        layout.tril().sum().item() / (n * (n + 1) / 2)
        if is_causal
        else layout.float().mean().item()
    )
    q, k, v = (torch.randn(1, HEADS, TOKENS, DEPTH, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, HEADS, TOKENS, DEPTH)

    def ours() -> None:
        out = sparse.sparse_attention(q, k, v, layout, block=BLOCK, is_causal=is_causal)
        torch.autograd.grad(out, (q, k, v), grad)

    def dense() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        torch.autograd.grad(out, (q, k, v), grad)

    seconds: dict[str, list[float]] = {"sparse": [], "dense": []}
    for turn in range(rounds + 1):
        pair = [("sparse", ours), ("dense", dense)]
        for who, work in pair if turn % 2 else pair[::-1]:
            start = clock()
            work()
            if turn:  # the first is a warm-up
                seconds[who].append(clock() - start)
    ratios = [a / b / density for a, b in zip(seconds["sparse"], seconds["dense"], strict=True)]
    best = min(seconds["sparse"]) / min(seconds["dense"]) / density
    label = f"{name}, {threads} thread{'s' * (threads > 1)}"
    row = Row(label, statistics.median(ratios), min(ratios), max(ratios), samples=seconds)
    row.must = MUST if density <= 0.25 else None
    dense_ms = min(seconds["dense"]) * 1e3
    row.note = f"density {density:.3f}; of the best times {best:.2f}; dense {dense_ms:.0f} ms"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="*", help="layouts, as a shell pattern")
    parser.add_argument("--quick", action="store_true", help="one round, one thread; keeps nothing")
    parser.add_argument("--cpu-time", action="store_true", help="of the process; one thread")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    is_short = arguments.quick or arguments.cpu_time
    rows = []
    for name in LAYOUTS:
        for threads in (1,) if is_short else (1, 2):
            if fnmatch.fnmatch(name, arguments.only):
                with Watch() as watch:
                    row = measure(name, threads, 1 if arguments.quick else ROUNDS, clock)
                row.others_busy = watch.others
                rows.append(row)
    return finish(__file__, rows, keeps=not arguments.quick, cpu_time=arguments.cpu_time)


if __name__ == "__main__":
    sys.exit(main())
