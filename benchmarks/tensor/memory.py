"""Compare the model states of a rank on pipe x data x tensor ranks with the formula, and measure building.

    python benchmarks/tensor/memory.py [--only PATTERN] [--quick]

- `states`: all distinct storages that exist after a training step, found with the garbage collector, less the
  buckets that the engine reports. The formula counts slices over the data ranks, and what no rank cuts over
  data and tensor ranks. At most 1.01 of it.
- `building`: the peak growth of a rank's memory until `xds.initialize` returns, over its own states and one
  layer. The model is on the meta device, and its weights in a file.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "examples" / "gpt")]
from harness import RankFailed, Row, anonymous_bytes, finish, peak_of, run_ranks  # noqa: E402

_spec = importlib.util.spec_from_file_location("states", HERE.parent / "memory" / "main.py")
assert _spec is not None and _spec.loader is not None
states = importlib.util.module_from_spec(_spec)  # the formula, and the storages of a process
_spec.loader.exec_module(states)

MUST, MUST_BUILDING = 1.01, 1.10
MIB = 2**20
PIPE, DATA, TENSOR, COUNT, TOKENS = 2, 2, 2, 4, 2  # few tokens: activations are no model states
Case = tuple[int, str]  # ZeRO stage, precision


def config_of(stage: int, precision: str, stages: int, tensor: int) -> dict[str, Any]:
    """The JSON of an engine."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": stages},
        "tensor_parallel": {"tp_size": tensor},
    }


def gpt(width: int, layers: int) -> Any:
    """The GPT of examples/gpt."""
    sys.path[:0] = [str(HERE.parents[1] / "examples" / "gpt")]
    from model import GPT, Shape

    return GPT(Shape(layers, width, heads=8, context=TOKENS))


def numels_of(engine: Any) -> tuple[int, int]:
    """Elements of this rank's slices, and of what no tensor rank cuts."""
    slots = [s for u in engine._sharded.units for f in u.params for s in f.layout.slots]
    cut = sum(slot.numel for slot in slots if slot.box is not None)
    return cut, sum(slot.numel for slot in slots) - cut


# -- states ----------------------------------------------------------------------------------------------


def weigh(_: int, __: int, cases: list[Case], width: int, layers: int) -> list[dict[str, Any]]:
    """One rank's storages after a step, for each case."""
    _weigh_one(
        (0, "fp32"), 64, 4
    )  # kernels, threads and libraries are loaded before the first reading
    return [_weigh_one(case, width, layers) for case in cases]


def _weigh_one(case: Case, width: int, layers: int) -> dict[str, Any]:
    import torch

    import xds

    known = states.storages()
    torch.manual_seed(1)
    engine = xds.initialize(gpt(width, layers), config_of(*case, PIPE, TENSOR))
    for _ in range(2):
        ids = [torch.randint(256, (1, TOKENS + 1)) for _ in range(COUNT)]
        for one in ids:  # the same on the ranks of a tensor group
            torch.distributed.broadcast(one, 0)
        engine.train_batch(iter([(one[:, :-1], one[:, 1:]) for one in ids]))
    now = states.storages()
    fresh = sum(size for at, size in now.items() if known.get(at) != size)
    plan, numels = dict(engine.memory_plan()), numels_of(engine)
    engine.destroy()
    return {"numels": numels, "held": fresh - plan.get("buckets", 0), "plan": plan}


def run_states(only: str, width: int, layers: int) -> list[Row]:
    """ZeRO stages 0-3 in fp32 and bf16."""
    cases = {
        f"states, pipe {PIPE} x data {DATA} x tensor {TENSOR}, stage {stage}, {precision}": (
            stage,
            precision,
        )
        for precision in ("fp32", "bf16")
        for stage in range(4)
        if fnmatch.fnmatch(f"states, stage {stage}, {precision}", only)
    }
    try:
        found = run_ranks(weigh, PIPE * DATA * TENSOR, list(cases.values()), width, layers)
    except RankFailed as error:
        print(error, flush=True)
        return [Row(name, must=MUST, void="FAIL (a rank failed)") for name in cases]
    rows = []
    for index, (name, (stage, precision)) in enumerate(cases.items()):
        is_bf16, ratios, notes = precision == "bf16", [], []
        for rank in found:
            cut, whole = rank[index]["numels"]
            want = states.formula(stage, DATA, cut, is_bf16)
            want += states.formula(stage, DATA * TENSOR, whole, is_bf16)
            held = rank[index]["held"]
            ratios.append(held / want)
            notes.append(
                f"{cut / 1e6:.1f}M in slices, {whole / 1e6:.2f}M whole: formula {want / MIB:.1f} MiB, held "
                f"{held / MIB:.1f}"
            )
        worst = max(range(len(found)), key=lambda i: ratios[i])
        rows.append(Row(name, ratios[worst], must=MUST, note=notes[worst]))
    return rows


# -- building --------------------------------------------------------------------------------------------


def build(
    _: int, tensor: int, precision: str, folder: str, width: int, layers: int
) -> dict[str, int]:
    """Peak bytes of building this rank's slices, over what was there before."""
    import torch

    import xds

    make = [1, precision, 1, tensor]
    torch.manual_seed(1)
    xds.initialize(gpt(64, 2), config_of(*make)).destroy()  # type: ignore[arg-type]
    before = anonymous_bytes()

    def construct() -> Any:
        with torch.device("meta"):
            model = gpt(width, layers)
        weights = Path(folder) / "model.safetensors"
        return xds.initialize(model, config_of(*make), weights=weights)  # type: ignore[arg-type]

    engine, peak = peak_of(construct)
    return {"own": sum(numels_of(engine)), "peak": peak - before}


def _write_weights(folder: str, width: int, layers: int) -> int:
    """The number of elements of the whole model."""
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = gpt(width, layers)
    state = {name: torch.full(param.shape, 0.01) for name, param in model.named_parameters()}
    save_file(state, Path(folder) / "model.safetensors")
    return sum(param.numel() for param in model.parameters())


def run_building(only: str, width: int, layers: int, tensor: int) -> list[Row]:
    """A model on the meta device with a file of weights."""
    rows = []
    for precision in ("fp32", "bf16"):
        row = Row(f"building from meta, {precision}, tensor {tensor}", must=MUST_BUILDING)
        if not fnmatch.fnmatch(row.name, only):
            continue
        rows.append(row)
        if importlib.util.find_spec("safetensors") is None:
            row.void = "SKIP (safetensors is not installed)"
            continue
        with tempfile.TemporaryDirectory() as folder:
            whole = _write_weights(folder, width, layers)
            try:
                ranks = run_ranks(build, tensor, precision, folder, width, layers)
            except RankFailed as error:
                print(error, flush=True)
                row.void = "FAIL (a rank failed)"
                continue
        size = 4 if precision == "fp32" else 2 + 4  # parameters, and their fp32 masters
        layer = 12 * width * width
        ratios = [rank["peak"] / (size * rank["own"] + 4 * layer) for rank in ranks]
        worst = max(range(tensor), key=lambda i: ratios[i])
        row.value, own = ratios[worst], ranks[worst]["own"]
        row.note = (
            f"{ranks[worst]['peak'] / MIB:.0f} MiB at most; own share {size * own / MIB:.0f} MiB + one layer "
            f"{4 * layer / MIB:.0f} MiB; the whole model {size * whole / MIB:.0f} MiB"
        )
    return rows


def main() -> int:
    """Run the chosen cases; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as 'building*'")
    parser.add_argument("--quick", action="store_true", help="small; keeps nothing")
    options = parser.parse_args()
    width, layers = (256, 4) if options.quick else (512, 8)
    rows = [] if options.only.startswith("building") else run_states(options.only, width, layers)
    width, layers, tensor = (512, 8, 2) if options.quick else (1024, 16, 4)
    rows += run_building(options.only, width, layers, tensor)
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
