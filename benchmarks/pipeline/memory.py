"""Compare the model states of a rank of a pipeline with the formula, and the memory of building its part.

    python benchmarks/pipeline/memory.py [--only PATTERN] [--quick]

- `states`: all distinct storages that exist after a training step, found with the garbage collector, less the
  buckets that the engine reports. At most 1.01 of the formula with the parameters of the rank's stage.
- `within a step`: the same before the last backward of a step. From stage 2 on gradients are held there for one
  reduction a step, and stage 3 has gathered the stage's parameters once. Both lie in the buckets; the note
  names them.
- `building`: the peak growth of a rank's memory until `xds.initialize` returns, over its own parameters and one
  layer.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "step_time")]
from harness import RankFailed, Row, anonymous_bytes, finish, peak_of, run_ranks  # noqa: E402

_spec = importlib.util.spec_from_file_location("states", HERE.parent / "memory" / "main.py")
assert _spec is not None and _spec.loader is not None
states = importlib.util.module_from_spec(_spec)  # the formula, and the storages of a process
_spec.loader.exec_module(states)

MUST, MUST_BUILDING = 1.01, 1.10
MIB = 2**20
PIPE, COUNT, TOKENS = 2, 4, 2  # few tokens: activations are no model states
WAYS = ("LayerSpec, fp32", "LayerSpec, bf16", "meta, fp32", "meta, bf16")
Case = tuple[int, str]  # ZeRO stage, precision


def config_of(stage: int, precision: str, stages: int = PIPE, count: int = COUNT) -> dict[str, Any]:
    """The JSON of an engine in `stages` pipeline stages."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": stages, "partition": "uniform"},
    }


# -- states ----------------------------------------------------------------------------------------------


def weigh(_: int, __: int, cases: list[Case], width: int, layers: int) -> list[dict[str, Any]]:
    """One rank's storages after a step and within a step, for each case."""
    _weigh_one(
        (0, "fp32"), 64, 2
    )  # kernels, threads and libraries are loaded before the first reading
    return [_weigh_one(case, width, layers) for case in cases]


def _weigh_one(case: Case, width: int, layers: int) -> dict[str, Any]:
    import torch
    from model import GPT, Shape

    import xds

    known = states.storages()
    torch.manual_seed(1)
    engine = xds.initialize(GPT(Shape(width, layers, heads=8, context=TOKENS)), config_of(*case))
    readings: list[tuple[int, dict[str, int]]] = []

    def read() -> None:
        now = states.storages()
        fresh = sum(size for at, size in now.items() if known.get(at) != size)
        readings.append((fresh, dict(engine.memory_plan())))

    _train(engine)
    _before_last_backward(engine, read)
    _train(engine)
    read()
    own = sum(unit.most_numel for unit in engine._sharded.units)
    engine.destroy()
    (inside, inside_plan), (after, plan) = readings
    return {
        "numel": own,
        "after": after,
        "plan after": plan,
        "inside": inside,
        "plan inside": inside_plan,
    }


def _train(engine: Any) -> None:
    import torch

    engine.train_batch(iter([torch.randint(256, (1, TOKENS + 1)) for _ in range(COUNT)]))


def _before_last_backward(engine: Any, call: Any) -> None:
    """Call `call` before the last backward of the next step."""
    from xds.pipe.schedules.actions import Op

    executor = engine._batches._executor
    plain = executor._do

    def do(action: Any, row: Any, at: int) -> None:
        if action.op is Op.BACKWARD and all(later.op is not Op.BACKWARD for later in row[at + 1 :]):
            executor._do = plain
            call()
        plain(action, row, at)

    executor._do = do


def rows_of_states(name: str, case: Case, data: int, ranks: list[dict[str, Any]]) -> list[Row]:
    """The heaviest rank after a step, and within a step."""
    stage, precision = case
    is_bf16 = precision == "bf16"

    param = 2 if is_bf16 else 4

    def row(when: str) -> Row:
        ratios, notes = [], []
        for rank in ranks:
            numel = rank["numel"]
            buckets = rank[f"plan {when}"].get("buckets", 0)
            want = states.formula(stage, data, numel, is_bf16)
            held = rank[when] - buckets
            ratios.append(held / want)
            known = {"held gradients": 4 * (stage >= 2)}
            known["gathered parameters"] = param * (stage == 3 and when == "inside")
            rest = buckets / numel - sum(known.values())
            named = ", ".join(f"{name} {size}" for name, size in known.items() if size)
            notes.append(
                f"{numel / 1e6:.1f}M a stage: formula {want / numel:.2f} B each, held {held / numel:.2f}; "
                f"buckets beside it: {named + ', ' if named else ''}messages {rest:.2f}"
            )
        worst = max(range(len(ranks)), key=lambda i: ratios[i])
        label = "states" if when == "after" else "within a step"
        return Row(f"{label}, {name}", ratios[worst], must=MUST, note=notes[worst])

    return [row("after"), row("inside")]


def run_states(only: str, width: int, layers: int, data: int = 2) -> list[Row]:
    """ZeRO stages 0-3 in fp32 and bf16."""
    cases = {
        f"pipe {PIPE} x data {data}, stage {stage}, {precision}": (stage, precision)
        for precision in ("fp32", "bf16")
        for stage in range(4)
        if fnmatch.fnmatch(f"states, stage {stage}, {precision}", only)
    }
    try:
        ranks = run_ranks(weigh, PIPE * data, list(cases.values()), width, layers) if cases else []
    except RankFailed as error:
        print(error, flush=True)
        return [Row(f"states, {name}", must=MUST, void="FAIL (a rank failed)") for name in cases]
    rows = []
    for index, (name, case) in enumerate(cases.items()):
        rows += rows_of_states(name, case, data, [rank[index] for rank in ranks])
    return rows


# -- building --------------------------------------------------------------------------------------------


def build(_: int, stages: int, way: str, folder: str, width: int, layers: int) -> dict[str, int]:
    """Peak bytes of building this rank's part, over what was there before."""
    import torch
    from model import GPT, Block, Shape

    import xds
    from xds.pipe.layer_specs import LayerSpec
    from xds.pipe.module import PipelineModule

    kind, precision = way.split(", ")
    make = partial(config_of, 1, precision, stages, stages)
    small = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(stages)]
    xds.initialize(PipelineModule(small), make()).destroy()  # libraries, threads, connections
    shape = Shape(width, layers, heads=8, context=64)
    weights = None
    before = anonymous_bytes()

    def construct() -> Any:
        nonlocal weights
        if kind == "meta":
            weights = Path(folder) / "model.safetensors"
            with torch.device("meta"):
                model: Any = GPT(shape)
        else:
            model = PipelineModule([LayerSpec(Block, shape) for _ in range(layers)])
        return xds.initialize(model, make(), weights=weights)

    engine, peak = peak_of(construct)
    own = sum(unit.most_numel for unit in engine._sharded.units)
    return {"own": own, "peak": peak - before, "held": sum(engine.memory_plan().values())}


def _write_weights(folder: str, width: int, layers: int) -> None:
    import torch
    from model import GPT, Shape
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = GPT(Shape(width, layers, heads=8, context=64))
    state = {name: torch.full(param.shape, 0.01) for name, param in model.named_parameters()}
    save_file(state, Path(folder) / "model.safetensors")


def run_building(
    only: str, width: int, layers: int, stages: int, ways: Sequence[str] = WAYS
) -> list[Row]:
    """A model from LayerSpecs, and one from the meta device with a file of weights."""
    rows = []
    layer = 12 * width * width
    for way in ways:
        name = f"building from {way}, pipe {stages}"
        if not fnmatch.fnmatch(name, only):
            continue
        row = Row(name, must=MUST_BUILDING)
        rows.append(row)
        if way.startswith("meta") and importlib.util.find_spec("safetensors") is None:
            row.void = "SKIP (safetensors is not installed)"
            continue
        with tempfile.TemporaryDirectory() as folder:
            if way.startswith("meta"):
                _write_weights(folder, width, layers)
            try:
                ranks = run_ranks(build, stages, way, folder, width, layers)
            except RankFailed as error:
                print(error, flush=True)
                row.void = "FAIL (a rank failed)"
                continue
        size = 4 if "fp32" in way else 2 + 4  # parameters, and their fp32 masters
        ratios = [rank["peak"] / (size * rank["own"] + 4 * layer) for rank in ranks]
        worst = max(range(stages), key=lambda i: ratios[i])
        row.value, own = ratios[worst], ranks[worst]["own"]
        row.note = (
            f"{ranks[worst]['peak'] / MIB:.0f} MiB at most; own share {size * own / MIB:.0f} MiB + one layer "
            f"{4 * layer / MIB:.0f} MiB; the whole model {size * sum(r['own'] for r in ranks) / MIB:.0f} MiB"
        )
    return rows


def main() -> int:
    """Run the chosen cases; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as 'building*'")
    parser.add_argument(
        "--quick", action="store_true", help="small, 2 ways to build; keeps nothing"
    )
    options = parser.parse_args()
    width, layers = (256, 4) if options.quick else (512, 6)
    rows = run_states(options.only, width, layers)
    width, layers, stages = (512, 8, 2) if options.quick else (1024, 16, 4)
    ways = WAYS[::3] if options.quick else WAYS  # each kind and each precision once
    rows += run_building(options.only, width, layers, stages, ways)
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
