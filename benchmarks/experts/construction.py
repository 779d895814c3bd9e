"""Measure a rank's memory while it builds a mixture of 64 experts, of which it keeps its own.

    python benchmarks/experts/construction.py [--ranks 2 4]

Four layers of 64 experts, 67M parameters, fp32. A row is the peak growth of a rank's anonymous memory, sampled
every millisecond, over what it may need: its model states when it is built, and one layer with all experts.
meta: built on the meta device. init: built in zero.Init. plain: built whole on each rank; its row is what is
left after xds.initialize, over the model states alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from harness import RankFailed, Row, anonymous_bytes, finish, peak_of, run_ranks  # noqa: E402

MUST = 1.10
MIB = 2**20
LAYERS, EXPERTS, WIDTH, INNER = 4, 64, 256, 512


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": "auto"},
    }


def new_model() -> Any:
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
            self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.up, std=0.02)
            nn.init.normal_(self.down, std=0.02)

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            raise NotImplementedError  # nothing is trained

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, EXPERTS)
            self.experts = Experts()

    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def build(rank: int, world_size: int, way: str, stage: int) -> dict[str, Any]:
    """Bytes at the peak of construction and `initialize` together, and after them, over those before."""
    import torch

    import xds

    config = config_of(stage)
    warm = xds.initialize(torch.nn.Linear(8, 8), config | {"expert_parallel": {}})
    warm.destroy()  # libraries, threads, connections
    before = anonymous_bytes()

    def construct() -> Any:
        torch.manual_seed(1)
        if way == "meta":
            with torch.device("meta"):
                model = new_model()
            torch.manual_seed(1)
        elif way == "init":
            with xds.zero.Init(config):
                model = new_model()
        else:
            model = new_model()
        return xds.initialize(model, config)

    engine, peak = peak_of(construct)
    after = anonymous_bytes()
    whole = sum(param.numel() for param in new_model().parameters()) * 4
    values = engine.full_state_dict(rank0_only=False)
    torch.manual_seed(1)
    is_equal = all(
        torch.equal(values[name], value) for name, value in new_model().state_dict().items()
    )
    return {
        "peak": peak - before,
        "after": after - before,
        "plan": dict(engine.memory_plan()),
        "whole": whole,
        "equal": is_equal,
    }


def rows_of(way: str, stage: int, ranks: list[dict[str, Any]]) -> Row:
    held = max(sum(rank["plan"].values()) for rank in ranks)
    layer = ranks[0]["whole"] / LAYERS
    is_plain = way == "plain"
    allowed = held if is_plain else held + layer
    measured = max(rank["after" if is_plain else "peak"] for rank in ranks)
    row = Row(f"{way}, stage {stage}, {len(ranks)} ranks", measured / allowed, must=MUST)
    equal = "equal" if all(rank["equal"] for rank in ranks) else "DIFFERENT"
    row.note = (
        f"{measured / MIB:.0f} MiB; states {held / MIB:.0f} + layer {layer / MIB:.0f} MiB, whole model "
        f"{ranks[0]['whole'] / MIB:.0f} MiB; values {equal}"
    )
    return row


def main() -> int:
    """Run every way; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args()
    rows: list[Row] = []
    for world_size in options.ranks:
        for way, stage in (("meta", 2), ("meta", 3), ("init", 3), ("plain", 2)):
            try:
                rows.append(rows_of(way, stage, run_ranks(build, world_size, way, stage)))
            except RankFailed as error:
                print(error, flush=True)
                rows.append(Row(f"{way}, stage {stage}", must=MUST, void="FAIL (a rank failed)"))
    return finish(__file__, rows, keeps=options.ranks == [2, 4])


if __name__ == "__main__":
    raise SystemExit(main())
