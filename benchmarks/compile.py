"""Claim: an engine with `compile` enabled is as fast as a plain compiled training loop.

Both sides train the GPT of examples/gpt/model.py on one rank and one thread, each block compiled by
torch.compile's default backend. The two contestants of a row alternate in a separate process. A row is the
median of the ratios of neighbouring turns, for wall time and for the process's CPU time, which other processes
disturb less. Only two run per process: with four in one heap, the one at its end paid for returning pages.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "gpt")]
from harness import Row, Watch, finish, print_rows, ratio_row, run_ranks  # noqa: E402

MUST = 1 / 0.98  # speed at least 0.98 of the plain compiled loop, as a ratio of step times
TOLERANCE = 1e-5  # relative, of the loss after the last turn
CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PLAIN, ENGINE = "plain compiled", "xds compiled"
EAGER, EAGER_ENGINE = "plain eager", "xds eager"

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Pair:
    """Two contestants that alternate in one process; `must` bounds their ratio of step times."""

    ours: str
    theirs: str
    must: float | None = None


PAIRS = (Pair(ENGINE, PLAIN, MUST), Pair(EAGER_ENGINE, EAGER), Pair(ENGINE, EAGER_ENGINE))


@dataclass(frozen=True)
class Case:
    """Sizes of a comparison; `batch` sequences of `context` tokens per step."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    rounds: int
    context: int = 128
    has_bar: bool = True


CASES = (
    Case(
        "example", layers=4, width=160, heads=5, batch=8, rounds=241
    ),  # as examples/gpt/zero0.json
    Case("example, batch 2", layers=4, width=160, heads=5, batch=2, rounds=161, has_bar=False),
    Case("11M", layers=6, width=384, heads=6, batch=1, rounds=81),
)


def make_model(case: Case) -> Any:
    """The example's GPT, with the same weights for all contestants."""
    import torch
    from model import GPT, Shape

    torch.manual_seed(1)
    return GPT(Shape(case.layers, case.width, case.heads, case.context))


def plain(case: Case, compiles: bool) -> Step:
    """A plain training loop with fused AdamW."""
    import torch

    model = make_model(case)
    for block in model.blocks if compiles else ():
        block.compile()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

    def step(tokens: Any) -> Any:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def engine(case: Case, compiles: bool) -> Step:
    """The same with an engine; only the config enables compilation."""
    import xds

    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW | {"betas": list(ADAMW["betas"])}},
        "compile": {"enabled": compiles},
    }
    trained = xds.initialize(make_model(case), config)

    def step(tokens: Any) -> Any:
        loss = trained(tokens[:, :-1], tokens[:, 1:])
        trained.backward(loss)
        trained.step()
        return loss

    return step


BUILDERS = {
    PLAIN: (plain, True),
    ENGINE: (engine, True),
    EAGER: (plain, False),
    EAGER_ENGINE: (engine, False),
}


def measure(rank: int, world_size: int, case: Case, pair: Pair, rounds: int) -> dict[str, Any]:
    """One process: build both, then turns of one step each; the first contestant alternates."""
    import torch
    from torch._dynamo.utils import counters

    generator = torch.Generator().manual_seed(7)
    shape = (case.batch, case.context + 1)
    batches = [torch.randint(0, 256, shape, generator=generator) for _ in range(rounds + 3)]
    names = [pair.theirs, pair.ours]
    steps = {}
    for name in names:
        build, compiles = BUILDERS[name]
        steps[name] = build(case, compiles)
        for batch in batches[:3]:
            steps[name](batch)
    graphs = counters["stats"]["unique_graphs"]
    gc.collect()
    gc.freeze()
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    faults: dict[str, list[int]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for turn, batch in enumerate(batches[3:]):
        for name in names if turn % 2 == 0 else names[::-1]:
            faulted = _page_faults()
            start, used = time.perf_counter(), time.process_time()
            losses[name] = float(steps[name](batch))
            cpu[name].append(round(time.process_time() - used, 6))
            wall[name].append(round(time.perf_counter() - start, 6))
            faults[name].append(_page_faults() - faulted)
    late = counters["stats"]["unique_graphs"] - graphs
    breaks = sum(counters["graph_break"].values())
    found = {"wall": wall, "cpu": cpu, "faults": faults, "losses": losses}
    return found | {"counts": f"{graphs} graph, {breaks} breaks, {late} late recompiles"}


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def build_rows(case: Case, pair: Pair, found: dict[str, Any], busy: float | None) -> Iterator[Row]:
    """The ratio of xds to the loop, by wall time and by CPU time; void where their losses differ."""
    ours, theirs = pair.ours, pair.theirs
    losses = found["losses"]
    void = ""
    if abs(losses[ours] - losses[theirs]) > TOLERANCE * abs(losses[theirs]):
        void = f"VOID (loss {losses[ours]:.6f}, {theirs} {losses[theirs]:.6f})"
    faults = " / ".join(f"{statistics.median(found['faults'][n]):.0f}" for n in (ours, theirs))
    for clock in ("wall", "cpu"):
        taken = found[clock]
        row = ratio_row(f"{case.name}: {ours} / {theirs}, {clock} time", taken[ours], taken[theirs])
        row.must, row.others_busy, row.void = pair.must if case.has_bar else None, busy, void
        row.note = (
            f"{_ms(taken[ours])} / {_ms(taken[theirs])} ms; {faults} page faults; {found['counts']}"
        )
        row.samples = {ours: taken[ours], theirs: taken[theirs]}
        yield row


def _ms(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e3:.1f}"


def main() -> int:
    """Run the cases; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="few rounds; keeps nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        if options.only not in case.name:
            continue
        rounds = 5 if options.quick else options.rounds or case.rounds
        for pair in PAIRS:
            with Watch() as watch:
                found = run_ranks(measure, 1, case, pair, rounds)[0]
            fresh = list(build_rows(case, pair, found, watch.others))
            print_rows(fresh)
            rows += fresh
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
