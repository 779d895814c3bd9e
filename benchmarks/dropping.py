"""The step time that dropped layers and tokens save, over the time that they take.

    python benchmarks/dropping.py [--only PATTERN] [--quick]

    saved    time of a step without dropping - time of a step with it
    share    the part of the blocks' work that is dropped, counted in the steps that are timed
    row      saved / (share * time of the blocks), the sums over all turns

The time of the blocks is that of forward and backward in plain PyTorch with them, minus that without them. All
run in the same processes and alternate. Dropped layers save messages as well, so a row may be above 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "step_time")]
from harness import Plan, Row, Watch, alternate, finish, run_ranks, slowest  # noqa: E402

THETA, MODEL, TOKENS = 0.5, "11M", 256
LEAST = 0.9  # of what is dropped is saved
KEPT_TOKENS = TOKENS // 2


@dataclass(frozen=True)
class Case:
    """What is dropped, at which stage, on two ranks."""

    what: str  # layers or tokens
    stage: int

    @property
    def name(self) -> str:
        return f"{MODEL}, {self.what}, stage {self.stage}"


def cases() -> Iterator[Case]:
    for what in ("layers", "tokens"):
        for stage in (0, 3):
            yield Case(what, stage)


def section(what: str, layers: int) -> dict[str, Any]:
    """The part of the config. gamma makes theta constant from the second step on."""
    if what == "layers":
        return {"progressive_layer_drop": {"enabled": True, "theta": THETA, "gamma": 1000.0}}
    inner = list(range(1, layers - 1))
    schedule = {"require_steps": 10**9, "seq_per_step": 1}
    random_ltd = {
        "enabled": True,
        "total_layer_num": layers,
        "random_ltd_layer_num": len(inner),
        "random_ltd_layer_id": inner,
        "random_ltd_schedule": {
            "min_value": KEPT_TOKENS,
            "max_value": TOKENS,
            "schedule_type": "fixed_linear",
            "schedule_config": schedule,
        },
    }
    routing = {"enabled": True, "random_ltd": random_ltd}
    return {"data_efficiency": {"enabled": True, "data_routing": routing}}


def dropped_share(what: str, layers: int, step: int) -> float:
    """Of the work of all blocks, in one step."""
    from xds.engine.dropping.choices import LAYERS, uniform

    if what == "tokens":
        return (layers - 2) / layers * (1 - KEPT_TOKENS / TOKENS)
    if step == 0:
        return 0.0
    draws = uniform(LAYERS, 0, step, 0, 0, layers)
    keeps = [1 - (at + 1) / layers * (1 - THETA) for at in range(layers)]
    return sum(draw >= keep for draw, keep in zip(draws, keeps, strict=True)) / layers


def time_case(rank: int, _: int, case: Case, plan: Plan) -> dict[str, Any]:
    """One rank's turns of all contestants."""
    from contestants import build
    from model import SHAPES, make_batches, make_model
    from torch import nn

    import xds

    layers = SHAPES[MODEL].layers
    count = plan.warmup + plan.rounds * plan.block
    batches = make_batches(MODEL, rank, count, TOKENS)
    steps: dict[str, Any] = {}
    for name, more in (("full", {}), ("dropped", section(case.what, layers))):
        config = {
            "train_micro_batch_size_per_gpu": len(batches[0]),
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": case.stage},
            "log_level": "warning",
            **more,
        }
        engine = xds.initialize(make_model(MODEL, TOKENS), config)

        def step(i: int, engine: Any = engine) -> Any:
            loss = engine(batches[i])
            engine.backward(loss)
            engine.step()
            return loss

        steps[name] = step
    for name in ("compute", "compute without blocks"):
        model = make_model(MODEL, TOKENS)
        if name != "compute":
            model.blocks = nn.ModuleList()
        plain = build("compute", model, batches[0], bf16=False)
        steps[name] = lambda i, plain=plain: plain(batches[i])
    seconds, _losses = alternate(steps, plan)
    shares = [dropped_share(case.what, layers, i) for i in range(count)][plan.warmup :]
    turns = [shares[at : at + plan.block] for at in range(0, len(shares), plan.block)]
    return {"seconds": seconds, "shares": [sum(turn) / len(turn) for turn in turns]}


def row_of(case: Case, plan: Plan) -> Row:
    """The row of a case."""
    with Watch() as watch:
        ranks = run_ranks(time_case, 2, case, plan)
    seconds, shares = slowest([rank["seconds"] for rank in ranks]), ranks[0]["shares"]
    names = ("full", "dropped", "compute", "compute without blocks")
    full, dropped, compute, rest = (sum(seconds[name]) for name in names)
    turns = len(shares)
    expected = sum(shares) / turns * (compute - rest)
    row = Row(case.name, (full - dropped) / expected, must=LEAST, more_is_better=True)
    row.note = (
        f"{sum(shares) / turns:.1%} of the blocks' work is dropped; a step {1000 * full / turns:.1f} ms, "
        f"{1000 * dropped / turns:.1f} ms with it; blocks {1000 * (compute - rest) / turns:.1f} ms"
    )
    row.samples, row.others_busy = seconds, watch.others
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as '*layers*'")
    parser.add_argument("--quick", action="store_true", help="one short case; keeps nothing")
    options = parser.parse_args()
    plan = Plan(rounds=1, block=2, warmup=2) if options.quick else Plan(rounds=9, block=4)
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, options.only)]
    rows = [row_of(case, plan) for case in (chosen[:1] if options.quick else chosen)]
    for row in rows if options.quick else ():
        row.must = None  # too short to judge
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
