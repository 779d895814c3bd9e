"""Compare the time of a training step of xds with DDP, FSDP2, DeepSpeed and a plain loop.

    python benchmarks/step_time/main.py [--only PATTERN] [--quick] [--peers]

Contestants of one comparison run in the same processes and alternate. A row is the median of
the ratios of neighbouring turns. Their losses must agree; otherwise the row is invalid.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import (  # noqa: E402
    Plan,
    RankFailed,
    Row,
    Skip,
    Watch,
    alternate,
    comparison_parser,
    finish,
    mean_over_ranks,
    print_rows,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)

FP32_TOLERANCE = 1e-4  # relative, of the last turn's loss: the orders of summation differ
BF16_TOLERANCE = 1e-2  # contestants round at different places


FLOOR = "compute"  # forward and backward only


@dataclass(frozen=True)
class Claim:
    """`ours` takes at most `must` times as long as the fastest of `peers`."""

    ours: str
    peers: tuple[str, ...]
    must: float


@dataclass(frozen=True)
class Comparison:
    """Contestants that alternate in one pair of processes."""

    name: str
    model: str
    claims: tuple[Claim, ...]
    plan: Plan
    bf16: bool = False
    world_size: int = 2
    tokens: int = 128  # of the sequence of each rank and step

    def contestants(self) -> list[str]:
        """All contestants, once, peers first; and compute only, the lower bound of every ratio."""
        names = [peer for claim in self.claims for peer in claim.peers] + [FLOOR]
        return list(dict.fromkeys(names + [claim.ours for claim in self.claims]))

    def row_name(self, claim: Claim) -> str:
        """`comparison: ours / peer`."""
        return f"{self.name}: {claim.ours} / {claim.peers[0].partition('-view')[0]}"


DDP = ("ddp", "ddp-view")  # the faster of the two gradient layouts is the peer
# one group per block, or one group in total: the faster is the peer
FSDP2_TINY = (
    "fsdp2",
    "fsdp2-root",
)


def comparisons() -> Iterator[Comparison]:
    """Every comparison of the table."""
    for model, plan in (("11M", Plan(rounds=9, block=2)), ("40M", Plan(rounds=9, block=1))):
        for precision in ("fp32", "bf16"):
            for tokens in (64, 256):  # the share of compute decides the ratio
                yield from _of_model(model, plan, precision == "bf16", tokens)
    tiny = Plan(rounds=15, block=5, warmup=5)
    yield Comparison("400 tiny", "tiny", (Claim("xds-2", DDP, 1.10),), tiny)
    yield Comparison("400 tiny", "tiny", (Claim("xds-3", FSDP2_TINY, 0.70),), tiny)
    alone = tuple(Claim(f"xds-{stage}", ("plain",), 1.02) for stage in range(3))
    yield Comparison("30M alone", "30M", alone, Plan(rounds=15, block=1), world_size=1)


def _of_model(model: str, plan: Plan, bf16: bool, tokens: int) -> Iterator[Comparison]:
    """Every stage against its peers."""
    label = f"{model} {'bf16' if bf16 else 'fp32'} {tokens} tokens"
    stages = ("xds-0", "xds-1", "xds-2", "xds-1-shared", "xds-2-shared")
    ddp = tuple(Claim(ours, DDP, 0.92) for ours in stages)
    fsdp2 = Claim("xds-3", ("fsdp2",), 0.50)
    for claims in (ddp, (fsdp2,)):
        yield Comparison(label, model, claims, plan, bf16, tokens=tokens)
    for stage in range(4):
        must = 0.50 if stage else 0.85
        claim = Claim(f"xds-{stage}", (f"deepspeed-{stage}",), must)
        yield Comparison(label, model, (claim,), plan, bf16, tokens=tokens)


def time_contestants(rank: int, _: int, comparison: Comparison, names: list[str]) -> dict[str, Any]:
    """One rank's part of a comparison: build all contestants, alternate them."""
    from contestants import build
    from model import make_batches, make_model

    plan = comparison.plan
    tokens = comparison.tokens
    batches = make_batches(comparison.model, rank, plan.warmup + plan.rounds * plan.block, tokens)
    steps, skipped, numel = {}, {}, 0
    for name in names:
        model = make_model(comparison.model, tokens)
        numel = sum(parameter.numel() for parameter in model.parameters())
        try:
            step = build(name, model, batches[0], comparison.bf16)
        except Skip as reason:
            skipped[name] = str(reason)
            continue
        steps[name] = lambda i, step=step: step(batches[i])
    seconds, losses = alternate(steps, plan)
    return {"seconds": seconds, "losses": losses, "skipped": skipped, "numel": numel}


def run(comparison: Comparison, names: list[str]) -> tuple[dict[str, Any], float | None]:
    """The samples of all contestants over all ranks, and the share of the cores that other processes used."""
    with Watch() as watch:
        ranks = run_ranks(time_contestants, comparison.world_size, comparison, names)
    return {
        "seconds": slowest([rank["seconds"] for rank in ranks]),
        "losses": mean_over_ranks([rank["losses"] for rank in ranks]),
        "skipped": ranks[0]["skipped"],
        "numel": ranks[0]["numel"],
    }, watch.others


def build_rows(comparison: Comparison, found: dict[str, Any], busy: float | None) -> list[Row]:
    """The rows of a comparison: correctness first, then the ratio to the faster peer."""
    rows = []
    seconds = found["seconds"]
    for claim in comparison.claims:
        row = Row(comparison.row_name(claim), must=claim.must, others_busy=busy)
        rows.append(row)
        peers = [peer for peer in claim.peers if peer in seconds]
        if claim.ours not in seconds or not peers:
            missing = next(n for n in (claim.ours, *claim.peers) if n in found["skipped"])
            row.void = f"SKIP ({found['skipped'][missing]})"
            continue
        peer = min(peers, key=lambda name: statistics.median(seconds[name]))
        ours, theirs = seconds[claim.ours], seconds[peer]
        measured = ratio_row(row.name, ours, theirs)
        row.value, row.low, row.high = measured.value, measured.low, measured.high
        row.samples = {claim.ours: ours, peer: theirs}
        floor = ratio_row(FLOOR, seconds[FLOOR], theirs).value
        row.note = f"{_ms(ours)} / {_ms(theirs)} ms; compute alone {floor:.3f}x"
        row.void = _disagreement(comparison, found["losses"], claim.ours, peer)
    return rows


def _disagreement(
    comparison: Comparison, losses: dict[str, list[float]], ours: str, peer: str
) -> str:
    last = slice(-comparison.plan.block, None)
    a, b = (statistics.fmean(losses[name][last]) for name in (ours, peer))
    tolerance = BF16_TOLERANCE if comparison.bf16 else FP32_TOLERANCE
    if abs(a - b) <= tolerance * abs(b):
        return ""
    return f"VOID (loss {a:.6f}, {peer} {b:.6f})"


def _ms(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e3:.1f}"


def print_notes(comparison: Comparison, found: dict[str, Any], busy: float | None) -> None:
    """The absolute figures of all contestants: notes without targets."""
    others = "unknown" if busy is None else f"{busy:.0%}"
    size = f"{found['numel'] / 1e6:.2f}M parameters"
    print(f"\n# {comparison.name}, {size}, ms a step; others took {others}", flush=True)
    for name, samples in found["seconds"].items():
        low, high = min(samples) * 1e3, max(samples) * 1e3
        loss = found["losses"][name][-1]
        print(f"#   {name:12} {_ms(samples):>8} ({low:.1f}-{high:.1f})  last loss {loss:.6f}")
    for name, reason in found["skipped"].items():
        print(f"#   {name:12} skipped: {reason}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = comparison_parser(__doc__ or "", example="11M fp32*", quick="a slice of about 20 s")
    parser.add_argument("--peers", action="store_true", help="the peers among themselves")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> Iterator[Comparison]:
    """The comparisons with the claims that the command line asks for."""
    for comparison in comparisons():
        pattern = options.only if any(c in options.only for c in "*?[") else f"*{options.only}*"
        claims = tuple(
            claim
            for claim in comparison.claims
            if fnmatch.fnmatch(comparison.row_name(claim), pattern)
        )
        plan = comparison.plan
        if options.quick:
            if comparison.name not in ("11M fp32 64 tokens", "400 tiny") or "deepspeed" in str(
                claims
            ):
                continue
            plan = replace(plan, rounds=3, warmup=2)
        if options.rounds:
            plan = replace(plan, rounds=options.rounds)
        if claims:
            yield replace(comparison, claims=claims, plan=plan)


def main() -> int:
    """Run the selected cases; 1 if a row fails."""
    options = arguments()
    rows: list[Row] = []
    for comparison in chosen(options):
        names = comparison.contestants()
        if options.peers:
            names = [name for name in names if not name.startswith("xds")]
        wait_until_quiet(options.patience)
        try:
            found, busy = run(comparison, names)
        except RankFailed as error:
            reason = str(error).strip().splitlines()[-1]
            print(f"\n# {comparison.name}: {error}", flush=True)
            rows += [
                Row(comparison.row_name(c), must=c.must, void=f"FAIL ({reason})")
                for c in comparison.claims
            ]
            continue
        print_notes(comparison, found, busy)
        if not options.peers:
            fresh = build_rows(comparison, found, busy)
            print_rows(fresh)
            rows += fresh
    if options.peers:
        return 0
    print()
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
