"""How the CPU time of each call grows with modules, parameters, units, experts, ranks and micro-batches.

    python benchmarks/growth.py [--only 'units*'] [--quick]

A row is one call of one series: CPU microseconds of a rank for each element at each size, and the exponent
between the two largest sizes. 1 is linear, 2 quadratic; below 1 a constant part still shows. Each series runs
in new processes of gloo, its sizes one after the other; a figure is the smallest of the repeats.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import Row, Watch, finish, run_ranks  # noqa: E402

LIMIT = 1.25  # of the exponent: caches and the heap of a longer run take more for each element
FLOOR_SECONDS = 0.02  # below it the clock and the constant part decide
REPEATS = 3
WIDTH = 8


@dataclass(frozen=True)
class Series:
    """Sizes of one axis, under one config."""

    axis: str
    name: str
    sizes: tuple[int, ...]
    zero: dict[str, Any]
    ranks: int = 2
    outer: dict[str, Any] | None = None  # a step has a meeting then

    @property
    def has_experts(self) -> bool:
        return self.axis.startswith(("mixtures", "experts"))


BLOCKS = (16, 128, 512, 2048)
PARAMETERS = (1, 100, 1000, 10_000)
RANKS = (2, 4, 8, 16)
MICRO_BATCHES = (1, 4, 16, 64)
MIXTURES = (1, 10, 100, 1000)
EXPERTS = (4, 16, 128, 1024)
OWN_UNITS = {"unit_min_numel": 0, "param_persistence_threshold": 0, "max_reuse_distance": 0}
MEETS = {"groups": 2, "steps": 1, "bits": 8}


def all_series() -> list[Series]:
    """Every series that the script measures."""
    found = []
    for stage in range(4):
        zero = {"stage": stage}
        found += [
            Series("blocks", f"stage {stage}", BLOCKS, zero),
            Series("units", f"stage {stage}", BLOCKS, {**zero, **OWN_UNITS}),
            Series("parameters", f"stage {stage}", PARAMETERS, zero),
            Series("ranks", f"stage {stage}", RANKS, {**zero, **OWN_UNITS}),
            Series("micro-batches", f"stage {stage}", MICRO_BATCHES, {**zero, **OWN_UNITS}),
        ]
        if stage >= 2:
            found += [
                Series("mixtures", f"stage {stage}", MIXTURES, zero),
                Series("mixtures with lists", f"stage {stage}", MIXTURES, zero),
                Series("experts", f"stage {stage}", EXPERTS, zero),
                Series("experts in a list", f"stage {stage}", EXPERTS, zero),
            ]
    host = {"offload_optimizer": {"device": "cpu"}}
    found += [
        Series(
            "units", "stage 2, optimizer on the host", BLOCKS, {"stage": 2, **OWN_UNITS, **host}
        ),
        Series(
            "units",
            "stage 3, all on the host",
            BLOCKS,
            {"stage": 3, **OWN_UNITS, **host, "offload_param": {"device": "cpu"}},
        ),
        Series("units", "stage 3, one rank", BLOCKS, {"stage": 3, **OWN_UNITS}, 1),
        Series("units", "stage 1, one rank", BLOCKS, {"stage": 1, **OWN_UNITS}, 1),
        Series("frozen", "stage 3", BLOCKS, {"stage": 3, **OWN_UNITS}),
        Series("frozen", "stage 2", BLOCKS, {"stage": 2, **OWN_UNITS}),
        Series("layers", "pipeline of 2", BLOCKS, {"stage": 1}),
        Series("layers' micro-batches", "pipeline of 2", MICRO_BATCHES, {"stage": 1}),
        Series("units", "groups that meet", BLOCKS, {"stage": 2, **OWN_UNITS}, outer=MEETS),
        Series("parameters", "groups that meet", PARAMETERS, {"stage": 2}, outer=MEETS),
        Series("plan", "stage 3", BLOCKS, {"stage": 3, **OWN_UNITS}, 1),
    ]
    return found


# -- what a rank runs -----------------------------------------------------------------------------


def build(series: Series, size: int) -> Any:
    """The model of `size`: blocks with four parameters, or one module with `size` of them."""
    from torch import nn

    if series.has_experts:
        layers, experts = (size, 4) if series.axis.startswith("mixtures") else (1, size)
        in_list = "list" in series.axis
        mixtures = [mixture(experts, in_list=in_list) for _ in range(layers)]
        return _deep(nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), m) for m in mixtures))
    layers = size if series.axis in ("blocks", "units", "frozen", "layers", "plan") else 64
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(layers)
    )
    if series.axis.startswith("layers"):
        from xds.pipe import PipelineModule

        return PipelineModule(list(blocks), loss_fn=lambda out, _: out.square().mean())
    if series.axis == "frozen":
        for block in blocks:
            block[1].weight.requires_grad_(False)
    return _wide(size) if series.axis == "parameters" else _deep(blocks)


def _deep(blocks: Any) -> Any:
    from torch import Tensor, nn

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = blocks, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x).square().mean()

    return Deep()


def mixture(num_experts: int, width: int = WIDTH, *, in_list: bool = False) -> Any:
    """A block of experts, two for each token: a stack of matrices, or modules in a list."""
    import torch
    from torch import Tensor, nn

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = num_experts
            self.weight = nn.Parameter(torch.randn(num_experts, width, width) * 0.3)

        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            outputs = torch.einsum("th,tkhi->tki", hidden_states, self.weight[top_k_index])
            return (outputs * top_k_weights.unsqueeze(-1)).sum(1)

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(width, num_experts, bias=False)
            listed = (nn.Linear(width, width) for _ in range(num_experts))
            self.experts = nn.ModuleList(listed) if in_list else Stacked()

        def forward(self, x: Tensor) -> Tensor:
            weights, index = self.gate(x).softmax(-1).topk(2, -1)
            if not in_list:
                return self.experts(x, index, weights)
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, choice = torch.where(index == number)
                result = result.index_add(0, token, expert(x[token]) * weights[token, choice, None])
            return result

    return Mixture()


def _wide(num_parameters: int) -> Any:
    import torch
    from torch import Tensor, nn

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList(torch.zeros(WIDTH) for _ in range(num_parameters))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + torch.stack(list(self.many)).sum(0)).square().mean()

    return Wide()


def config_of(series: Series, size: int) -> dict[str, Any]:
    """The config of `size`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": series.zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "log_level": "error",
    }
    if series.has_experts:
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    if series.outer is not None:
        config["outer"] = series.outer
    if series.axis == "micro-batches":
        config["gradient_accumulation_steps"] = size
    if series.axis.startswith("layers"):
        config["pipeline"] = {"stages": 2}
        config["gradient_accumulation_steps"] = 4 if series.axis == "layers" else size
    return config


class Stopwatch:
    """CPU seconds of this process by call: the smallest of the repeats."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        start = time.process_time()
        result = work()
        taken = time.process_time() - start
        self.seconds[name] = min(taken, self.seconds.get(name, math.inf))
        return result


def rank_main(rank: int, world_size: int, series: Series, sizes: Sequence[int], folder: str) -> Any:
    """CPU seconds by size and call."""
    import torch

    found = {}
    for size in (sizes[0], *sizes):  # the first one imports what is missing
        torch.manual_seed(0)
        found[size] = measured(series, size, f"{folder}/{size}-{len(found)}")
        gc.collect()
    return found


def measured(series: Series, size: int, folder: str) -> dict[str, float]:
    """CPU seconds by call."""
    import torch

    import xds

    watch = Stopwatch()
    config = config_of(series, size)
    if series.axis == "plan":
        time_plan(watch, config, lambda: build(series, size))
        return watch.seconds
    model = build(series, size)
    engine = watch.time("initialize", lambda: xds.initialize(model, config))
    x = torch.randn(4, WIDTH)
    if series.axis.startswith("layers"):
        batches = [(x, x)] * config["gradient_accumulation_steps"]
        for _ in range(REPEATS + 1):
            watch.time("train_batch", lambda: engine.train_batch(iter(batches)))
    elif series.axis == "micro-batches":
        for _ in range(REPEATS + 1):
            watch.time("a whole step", lambda: accumulated_step(engine, x, size))
    else:
        for _ in range(REPEATS + 1):
            loss = watch.time("forward", lambda: engine(x))
            watch.time("backward", lambda loss=loss: engine.backward(loss))
            watch.time("step", engine.step)
    if series.axis not in ("micro-batches", "layers' micro-batches"):
        for number in range(2):
            tag = f"{number}"
            watch.time("save_checkpoint", lambda tag=tag: engine.save_checkpoint(folder, tag=tag))
            watch.time("load_checkpoint", lambda tag=tag: engine.load_checkpoint(folder, tag=tag))
        watch.time("full_state_dict", lambda: engine.full_state_dict())
    watch.time("destroy", engine.destroy)
    return watch.seconds


def accumulated_step(engine: Any, x: Any, num_micro_batches: int) -> None:
    """A step of so many micro-batches."""
    for _ in range(num_micro_batches):
        engine.backward(engine(x))
        engine.step()


def time_plan(watch: Stopwatch, config: dict[str, Any], build_model: Callable[[], Any]) -> None:
    """`xds plan` of 8 ranks."""
    from types import ModuleType

    from xds.engine.config.config import parse_config
    from xds.engine.planning.models import model_source
    from xds.engine.planning.plan import make_plan

    module = sys.modules["growth_model"] = ModuleType("growth_model")
    module.build = build_model  # type: ignore[attr-defined]
    source = model_source("growth_model:build", None)
    watch.time("plan", lambda: make_plan(source, parse_config(config), 8, 8))


# -- the table ------------------------------------------------------------------------------------


def rows_of(series: Series, sizes: Sequence[int]) -> list[Row]:
    """One row for each call of the series."""
    seconds: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if series.axis == "ranks":
            for size in sizes:
                seconds[size] = slowest(run_ranks(rank_main, size, series, [size], folder))[size]
        else:
            seconds = slowest(run_ranks(rank_main, series.ranks, series, sizes, folder))
    rows = []
    for call in seconds[sizes[-1]]:
        first, last = seconds[sizes[-2]][call], seconds[sizes[-1]][call]
        exponent = math.log(last / first) / math.log(sizes[-1] / sizes[-2])
        each = ", ".join(f"{size}: {1e6 * seconds[size][call] / size:.0f}" for size in sizes)
        counts = last > FLOOR_SECONDS and series.axis != "ranks"
        rows.append(
            Row(
                f"{series.axis}, {series.name}: {call}",
                exponent,
                must=LIMIT if counts else None,
                unit="",
                note=f"us for each: {each}; {last:.3f} s",
                samples={str(size): [seconds[size][call]] for size in sizes},
            )
        )
    return rows


def slowest(by_rank: Sequence[dict[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    """By size and call, the seconds of the rank that takes the longest."""
    return {
        size: {call: max(rank[size][call] for rank in by_rank) for call in calls}
        for size, calls in by_rank[0].items()
    }


def main() -> int:
    """Run the series; 1 where an exponent is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="series whose name matches, such as 'units*'")
    parser.add_argument(
        "--quick", action="store_true", help="without the largest size; keeps nothing"
    )
    options = parser.parse_args()
    rows: list[Row] = []
    for series in all_series():
        if fnmatchcase(f"{series.axis}, {series.name}", options.only):
            with Watch() as watch:
                new = rows_of(series, series.sizes[:-1] if options.quick else series.sizes)
            for row in new:
                row.others_busy = watch.others
            rows += new
            print(f"{series.axis}, {series.name}: done", flush=True)
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
