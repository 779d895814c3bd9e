"""Compare the seconds and bytes that `xds plan` predicts with those of real steps: 24 layouts, two ranks.

    python benchmarks/planner/own_runs.py [--steps N] [--keep FILE --turns N] [--machine FILE]

The machine is measured before, between and after the runs, with the kernels of both models, unless a file is
given. Layouts run one after the other in the same two processes. A row is the median of its steps, of the
slower rank, and of several turns: run it with `--keep FILE` and `--turns` 1, 2, 3. No number of a run is used
for its prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from harness import run_ranks  # noqa: E402
from memory import storages  # noqa: E402

from xds.engine.config.config import parse_config  # noqa: E402
from xds.engine.planning.machine import Machine, load_machine, parse_machine  # noqa: E402
from xds.engine.planning.models import ModelSource  # noqa: E402
from xds.engine.planning.plan import Plan, make_plan  # noqa: E402
from xds.engine.planning.seconds import PARTS, StepSeconds, StepTimer  # noqa: E402

RANKS = 2
MUST_MEDIAN, MUST_RANK, MUST_BEST, MUST_BYTES = 0.10, 0.9, 0.05, 0.03


class Source(ModelSource):
    """A model of transformers, as its users build it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        if self.name == "gpt":
            # CPUs have no fused attention with dropout, and a plan counts the fused one
            sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "attn_pdrop": 0}
            return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=256, **_ids()))
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 4, "vocab_size": 2048}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **_ids()))

    def batch(self, micro_batch_size: int) -> dict[str, Tensor]:
        length = 256 if self.name == "gpt" else 128
        tokens = torch.randint(0, 2048, (micro_batch_size, length))
        return {"input_ids": tokens, "labels": tokens.clone()}


def _ids() -> dict[str, int]:
    return {"bos_token_id": 0, "eos_token_id": 1}


@dataclass(frozen=True)
class Layout:
    """A config of one of the models."""

    name: str
    model: str
    micro_batch: int
    steps: int  # micro-batches of a step
    more: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The model and the name."""
        return f"{self.model} {self.name}"

    @property
    def config(self) -> dict[str, Any]:
        """Of `xds.initialize`."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.steps,
            "gradient_clipping": 1.0,
            "steps_per_print": 1000,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            **self.more,
        }


def layouts() -> list[Layout]:
    """All 24."""

    def zero(stage: int, **more: Any) -> dict[str, Any]:
        return {"zero_optimization": {"stage": stage, **more}}

    recompute = {"activation_checkpointing": {"enabled": True}}
    pipe, host = {"pipeline": {"stages": 2}}, {"device": "cpu"}
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    rows: list[tuple[str, str, int, int, dict[str, Any]]] = [
        *((f"stage {stage}", "gpt", 4, 1, zero(stage)) for stage in range(4)),
        ("stage 1, 4 x 1", "gpt", 1, 4, zero(1)),
        ("stage 2, 2 x 2", "gpt", 2, 2, zero(2)),
        ("stage 3, 4 x 1", "gpt", 1, 4, zero(3)),
        ("stage 2, 2 x 4", "gpt", 4, 2, zero(2)),
        ("stage 1, recomputed", "gpt", 4, 1, zero(1) | recompute),
        ("stage 3, recomputed", "gpt", 4, 1, zero(3) | recompute),
        ("tensor 2", "gpt", 4, 1, zero(0) | tensor),
        ("tensor 2, 2 x 2", "gpt", 2, 2, zero(1) | tensor),
        ("stage 1", "llama", 4, 1, zero(1)),
        ("stage 2, 4 x 1", "llama", 1, 4, zero(2)),
        ("stage 3, 2 x 4", "llama", 4, 2, zero(3)),
        ("pipeline 4 x 2", "llama", 2, 4, zero(1) | pipe),
        ("pipeline 8 x 1", "llama", 1, 8, zero(1) | pipe),
        ("pipeline 2 x 4", "llama", 4, 2, zero(1) | pipe),
        ("pipeline 4 x 2, recomputed", "llama", 2, 4, zero(0) | pipe | recompute),
        (
            "zero-bubble 4 x 2",
            "llama",
            2,
            4,
            {"pipeline": {"stages": 2, "schedule": "zero_bubble"}},
        ),
        ("offload, stage 1", "llama", 4, 1, zero(1, offload_optimizer=host)),
        ("offload, stage 2, 2 x 2", "llama", 2, 2, zero(2, offload_optimizer=host)),
        ("offload, stage 3", "llama", 4, 1, zero(3, offload_optimizer=host, offload_param=host)),
        ("tensor 2", "llama", 4, 1, zero(0) | tensor),
    ]
    return [Layout(*row) for row in rows]


# ---- real runs --------------------------------------------------------------------------------------


def measure_machine(rank: int, _: int) -> dict[str, Any]:
    """The contents of a machine file."""
    import torch.distributed as dist

    from xds.launcher.bench import MachinePlan
    from xds.launcher.bench_machine import Meter
    from xds.ops.comm.opening import open_collectives

    plan = MachinePlan("", "", [], None, [1, 2, 4], ["fp32"], "")
    where = open_collectives(dist.group.WORLD, torch.device("cpu"))
    meter = Meter(where, dist.group.WORLD, torch.device("cpu"))
    return meter.machine(plan, [Source("gpt"), Source("llama")])


def measure(rank: int, size: int, chosen: list[Layout], steps: int) -> tuple[list[Any], list[Any]]:
    """The machine before, between and after the runs, as its speed changes; and what each layout took."""
    half = len(chosen) // 2
    contents, runs = [measure_machine(rank, size)], []
    for part in (chosen[:half], chosen[half:]):
        runs += [_run(layout, rank, steps) for layout in part]
        contents.append(measure_machine(rank, size))
    return contents, runs


def mean_of(contents: list[Any]) -> Any:
    """A machine file with the points of all measurements; where several have one, its geometric mean."""
    first = contents[0]
    if isinstance(first, dict):
        shared = [key for key in first if all(key in each for each in contents)]
        return {key: mean_of([each[key] for each in contents]) for key in shared}
    if isinstance(first, list):
        tables = [{tuple(point[:-1]): point[-1] for point in each} for each in contents]
        places = sorted({place for table in tables for place in table})
        return [[*p, mean_of([table[p] for table in tables if p in table])] for p in places]
    is_rate = isinstance(first, float) and min(contents) > 0
    return statistics.geometric_mean(contents) if is_rate else first


def _run(layout: Layout, rank: int, steps: int) -> dict[str, Any]:
    import torch.distributed as dist

    import xds

    torch.manual_seed(rank * ("tensor" not in layout.name))
    source = Source(layout.model)
    before = storages()
    engine = xds.initialize(source.build(), layout.config)
    batches = [source.batch(layout.micro_batch) for _ in range(layout.steps)]
    seconds = []
    for number in range(steps + 2):
        time.sleep(seconds[-1] if seconds else 0.1)  # a real-time process may not run all the time
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(iter(batches))
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    held = {at: size for at, size in storages().items() if before.get(at) != size}
    found = {
        "seconds": statistics.median(seconds),
        "held": sum(held.values()),
        "plan": dict(engine.memory_plan()),
    }
    if not {"pipeline", "activation_checkpointing"} & layout.more.keys():
        found["kept"] = _kept_bytes(engine, batches[0])
    engine.destroy()
    del engine
    gc.collect()
    return found


def _kept_bytes(engine: Any, batch: dict[str, Tensor]) -> int:
    """What autograd keeps of one forward, without parameters."""
    known = {p.untyped_storage()._cdata for p in engine.module.parameters()}
    known |= {b.untyped_storage()._cdata for b in engine.module.buffers()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in _of_params(engine):
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = engine(**batch)
    size = sum(kept.values())
    engine.backward(output.loss)
    engine.zero_grad()
    return size


def _of_params(engine: Any) -> set[int]:
    return {p.untyped_storage()._cdata for p in engine.module.parameters()}


# ---- the comparison ---------------------------------------------------------------------------------


def predicted(layout: Layout, timer: StepTimer) -> tuple[Plan, StepSeconds]:
    """The plan of a layout, and its seconds."""
    config = parse_config(layout.config)
    plan = make_plan(Source(layout.model), config, RANKS, RANKS, traces=True)
    return plan, timer.of(plan)


def spearman(left: list[float], right: list[float]) -> float:
    """The correlation of ranks."""

    def places(values: list[float]) -> list[float]:
        order = sorted(values)
        return [float(order.index(value)) for value in values]

    return statistics.correlation(places(left), places(right)) if len(set(left)) > 1 else 1.0


def compare(chosen: list[Layout], runs: dict[str, list[dict[str, Any]]], machine: Machine) -> bool:
    """Print a row for each layout, and the verdicts. Returns whether all hold."""
    timer = StepTimer(machine)
    errors, real, guessed, bytes_errors = [], [], [], []
    best: dict[str, list[tuple[float, float]]] = {}
    print(f"{'model':6} {'layout':28}{'measured':>10}{'predicted':>10}{'error':>8}  parts, ms")
    for layout in chosen:
        ranks = runs[layout.key]
        plan, step = predicted(layout, timer)
        seconds = max(run["seconds"] for run in ranks)
        error = step.total / seconds - 1
        errors.append(abs(error))
        real.append(seconds)
        guessed.append(step.total)
        best.setdefault(layout.model, []).append((step.tokens / seconds, step.tokens_per_second))
        parts = " ".join(f"{part.split()[0]} {step.parts[part] * 1e3:.0f}" for part in PARTS)
        times = f"{seconds * 1e3:9.1f} {step.total * 1e3:9.1f} {error:+8.1%}"
        print(f"{layout.model:6} {layout.name:28} {times}  {parts}")
        run = ranks[0]
        if "kept" in run:
            states = sum(plan.ranks[0].states.values()) + run["plan"].get("buckets", 0)
            measured = run["held"] + run["kept"]
            bytes_errors.append(abs((states + (plan.ranks[0].activations or 0)) / measured - 1))
    loss = max(1 - max(rows, key=lambda row: row[1])[0] / max(rows)[0] for rows in best.values())
    verdicts = [
        ("median error", statistics.median(errors), MUST_MEDIAN, False),
        ("rank correlation", spearman(real, guessed), MUST_RANK, True),
        ("the best predicted is slower than the best by", loss, MUST_BEST, False),
        ("bytes, median error", statistics.median(bytes_errors), MUST_BYTES, False),
    ]
    for name, value, must, is_least in verdicts:
        holds = value >= must if is_least else value <= must
        print(
            f"{name}: {value:.3f} (must {'>=' if is_least else '<='} {must}) {'' if holds else 'MISSED'}"
        )
    return all(value >= must if least else value <= must for _, value, must, least in verdicts)


def main() -> int:
    """Measure, predict and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", metavar="FILE", help="instead of the one that is measured")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="layouts, as 'gpt stage*'")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument("--keep", metavar="FILE", help="add what is measured to this file")
    parser.add_argument("--turns", type=int, default=1, help="measure if FILE has fewer turns")
    args = parser.parse_args()
    chosen = [x for x in layouts() if fnmatch.fnmatch(x.key, args.only)]
    turns: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, TypeError):
        turns = json.loads(Path(args.keep).read_text())
    if len(turns) < args.turns:
        ranks = run_ranks(measure, RANKS, chosen, args.steps)
        rows = zip(*(runs for _, runs in ranks), strict=True)
        runs = {x.key: list(row) for x, row in zip(chosen, rows, strict=True)}
        turns.append({"runs": runs, "machine": mean_of(ranks[0][0])})
        if args.keep:
            Path(args.keep).write_text(json.dumps(turns))
    content = mean_of([turn["machine"] for turn in turns])
    machine = load_machine(args.machine) if args.machine else parse_machine(content)
    for layout in chosen:
        for rank in range(RANKS):
            several = [turn["runs"][layout.key][rank]["seconds"] for turn in turns]
            turns[0]["runs"][layout.key][rank]["seconds"] = statistics.median(several)
    return 0 if compare(chosen, turns[0]["runs"], machine) else 1


if __name__ == "__main__":
    sys.exit(main())
