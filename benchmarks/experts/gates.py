"""Compare the gates of experts with DeepSpeed's: choices, weights, losses, counts and gradients, then time.

    python benchmarks/experts/gates.py [--only PATTERN] [--rounds N] [--quick] [--store FILE]

Both run in this process on one thread, on the same logits and seeds, and take turns. DeepSpeed's gates return
routes (sparse_routes=True), as in its layer. Its tensors of [tokens, experts, capacity] do not fit in memory.
--store writes what DeepSpeed's gates return in some of the cases, which tests/experts/test_gates.py reads.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
from gate_cases import STORED, call, cases, digest, gradient  # noqa: E402
from harness import Row, Watch, finish, ratio_row  # noqa: E402

TOKENS, EXPERTS = 2**20, 64
MUST = 0.5
ROUNDS = 3
LIMITS = {"capacity_factor": 1.0, "min_capacity": 4}
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "top-1": ("top1", {}),
    "top-1, without RTS": ("top1", {"use_rts": False}),
    "top-1, noise": ("top1", {"noisy_gate_policy": "RSample"}),
    "top-1, no token dropped": ("top1", {"drop_tokens": False}),
    "top-2": ("top2", {}),
    "top-2, no token dropped": ("top2", {"drop_tokens": False}),
    "top-4, by probability": ("topk", {"k": 4}),
    "top-4, by position": ("topk", {"k": 4, "drop_policy": "position"}),
    "top-4, no token dropped": ("topk", {"k": 4, "drop_tokens": False}),
}


def both() -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
    """Gates of xds and of DeepSpeed, by the same names."""
    from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

    from xds.experts import gates

    theirs = {
        "top1": lambda logits, **options: top1gating(logits, sparse_routes=True, **options),
        # it writes on its logits
        "top2": lambda logits, **options: top2gating(logits.clone(), sparse_routes=True, **options),
        "topk": lambda logits, **options: topkgating(logits, sparse_routes=True, **options),
    }
    return {"top1": gates.top1, "top2": gates.top2, "topk": gates.topk}, theirs


def compared(rounds: int) -> Row:
    """How many cases differ, of those of so many seeds."""
    import torch

    ours, theirs = both()
    wrong = num_cases = 0
    for case in cases(*range(rounds)):
        num_cases += 1
        loss, _, _, index, _, weights, counts = (result := call(theirs, case))[0]
        routes, logits = call(ours, case)
        gradients = (
            gradient(result[1], weights.t(), loss),
            gradient(logits, routes.top_k_weights, routes.l_aux),
        )
        is_equal = (
            torch.equal(index.t().long(), routes.top_k_index)
            and torch.equal(loss, routes.l_aux)
            and torch.equal(counts.long(), routes.exp_counts)
            and torch.allclose(weights.t(), routes.top_k_weights, rtol=3e-7, atol=0)
            and torch.allclose(*gradients, rtol=1e-5, atol=1e-6)
        )
        if not is_equal:
            wrong += 1
            print("differs:", case)
    return Row(f"cases that differ, of {num_cases}", float(wrong), must=0.0, unit="")


def timed(name: str, tokens: int, rounds: int) -> list[Row]:
    """The forward, and forward and backward."""
    import torch

    torch.set_num_threads(1)
    gate, more = TIMED[name]
    options = {**LIMITS, **more}
    pair = dict(zip(("xds", "DeepSpeed"), both(), strict=True))
    torch.manual_seed(0)
    logits = torch.randn(tokens, EXPERTS, requires_grad=True)
    forward: dict[str, list[float]] = {who: [] for who in pair}
    whole: dict[str, list[float]] = {who: [] for who in pair}
    for turn in range(rounds + 1):
        for who in ("xds", "DeepSpeed") if turn % 2 else ("DeepSpeed", "xds"):
            torch.manual_seed(turn)
            start = time.process_time()
            result = pair[who][gate](logits, **options)
            end = time.process_time()
            weights = result.top_k_weights if who == "xds" else result[5]
            loss = result.l_aux if who == "xds" else result[0]
            torch.autograd.grad(weights.sum() + loss, logits)
            if turn:  # the first is a warm-up
                forward[who].append(end - start)
                whole[who].append(time.process_time() - start)
    rows = []
    for what, seconds in (("forward", forward), ("with backward", whole)):
        ours, theirs = seconds["xds"], seconds["DeepSpeed"]
        note = f"{min(ours):.2f} s against {min(theirs):.2f} s"
        rows.append(ratio_row(f"{name}, {what}", ours, theirs, must=MUST, note=note))
    return rows


def store(file: Path) -> None:
    """Write what DeepSpeed's gates return in some of the cases."""
    _, theirs = both()
    found = []
    for case in list(cases(0))[::STORED]:
        (loss, _, _, index, _, weights, counts), logits = call(theirs, case)
        size = gradient(logits, weights.t(), loss).norm()
        numbers = [float(f"{value.item():.7g}") for value in (loss, weights.sum(), size)]
        found.append([digest(index.t(), counts), *numbers])
    lines = ",\n".join(json.dumps(row) for row in found)
    file.write_text(f"[\n{lines}\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as 'top-2*'")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contestant")
    parser.add_argument("--quick", action="store_true", help="a 16th of the tokens; keeps nothing")
    parser.add_argument("--store", type=Path, metavar="FILE", help="write the table of the tests")
    options = parser.parse_args()
    if options.store:
        store(options.store)
        return 0
    rows = []
    with Watch() as watch:
        if fnmatch.fnmatch("equal", options.only):
            rows.append(compared(1 if options.quick else ROUNDS))
        for name in TIMED:
            if fnmatch.fnmatch(name, options.only):
                tokens = TOKENS // 16 if options.quick else TOKENS
                rows += timed(name, tokens, options.rounds)
    for row in rows:
        row.others_busy = watch.others
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
