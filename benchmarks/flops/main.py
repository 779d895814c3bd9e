"""Compare counted FLOPs with closed forms, and time a profiled step and the others.

    python benchmarks/flops/main.py [--quick]

MACs must equal the closed forms of `closed_forms.py`, forward and backward; all FLOPs must agree within 1 %.
Times: three engines with the same model take turns: without the section, with a section whose step never comes,
and with each step profiled and reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import closed_forms  # noqa: E402
from harness import Plan, Row, Watch, alternate, finish, ratio_row, run_ranks  # noqa: E402

BATCH, LENGTH, VOCAB = 2, 24, 96
SIZES = {
    "11M": {"n_layer": 6, "n_embd": 384, "n_head": 6},
    "0.3M": {"n_layer": 4, "n_embd": 64, "n_head": 2},
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TEXT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def models() -> dict[str, tuple[nn.Module, dict[str, Tensor], closed_forms.Work]]:
    """Each small model, a batch, and its closed form."""
    import transformers as hf

    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    text = {"input_ids": ids, "labels": ids}
    gpt2 = hf.GPT2Config(n_layer=3, n_embd=32, n_head=2, n_positions=32, **TEXT, **NO_DROPOUT)
    llama = hf.LlamaConfig(**LLAMA)
    mixtral = hf.MixtralConfig(num_local_experts=4, **LLAMA)
    vit = hf.ViTConfig(
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return {
        "GPT-2": (hf.GPT2LMHeadModel(gpt2), text, closed_forms.gpt2(gpt2, BATCH, LENGTH)),
        "Llama": (hf.LlamaForCausalLM(llama), text, closed_forms.llama(llama, BATCH, LENGTH)),
        "ViT": (hf.ViTForImageClassification(vit), images, closed_forms.vit(vit, BATCH, 5)),
        "Mixtral": (
            hf.MixtralForCausalLM(mixtral),
            text,
            closed_forms.mixtral(mixtral, BATCH, LENGTH),
        ),
    }


def counts() -> list[Row]:
    """What an engine counts in a step, against the closed forms."""
    import xds

    rows = []
    for name, (model, batch, wanted) in models().items():
        with tempfile.TemporaryDirectory() as folder:
            engine = xds.initialize(model, _config(1, f"{folder}/profile.txt"))
            for _ in range(2):
                engine.backward(engine(**batch).loss)
                engine.step()
        found = engine.flops_profile()
        engine.destroy()
        assert found is not None and found.backward is not None
        figures = {
            "forward MACs": (found.macs, wanted.macs, 0.0),
            "backward MACs": (found.backward.macs, wanted.backward_macs, 0.0),
            "forward FLOPs": (found.flops, wanted.flops, 0.01),
        }
        for what, (counted, closed, limit) in figures.items():
            off = abs(counted / closed - 1)
            note = f"{counted:,} counted, {closed:,} by the closed form"
            rows.append(
                Row(f"{name}, {what}: difference", off, must=limit, aim=0.0, unit="", note=note)
            )
    return rows


def _config(profile_step: int | None, path: str = "") -> dict[str, Any]:
    section = {"enabled": True, "profile_step": profile_step, "output_file": path}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 0},
        **({} if profile_step is None else {"flops_profiler": section}),
    }


def _regions(engine: Any) -> float:
    """Seconds that a step spends in what the profiler is told: its regions and its end."""
    report = engine._parts.report

    def run() -> None:
        for name in ("forward", "backward", "reduce", "step"):
            with report.region(name):
                pass
        report.profiler.step()

    return min(timeit.repeat(run, number=2000, repeat=25)) / 2000


def _steps(
    rank: int, world_size: int, plan: Plan, shape: dict[str, int], length: int
) -> dict[str, list[float]]:
    import transformers as hf

    import xds
    from xds.engine.profiling.steps import build_profiler

    words = {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2, "n_positions": 512}
    config = hf.GPT2Config(**shape, **words, **NO_DROPOUT)
    torch.manual_seed(0)
    ids = torch.randint(3, 1024, (BATCH, length))
    folder = tempfile.mkdtemp()
    kinds = {"plain": None, "others": 10**9, "profiled": 0}
    engines = {
        name: xds.initialize(hf.GPT2LMHeadModel(config), _config(step, f"{folder}/profile.txt"))
        for name, step in kinds.items()
    }

    def step_of(name: str) -> Callable[[int], Tensor]:
        engine = engines[name]

        def step(number: int) -> Tensor:
            if name == "profiled":  # a new profiler for each step, which it also reports
                section = engine.config.flops_profiler.model_copy(
                    update={"profile_step": engine.global_steps}
                )
                changed = engine.config.model_copy(update={"flops_profiler": section})
                report = engine._parts.report
                report.profiler = build_profiler(changed, engine._sharded.collectives)
                report.profiler.follow(engine)
            loss: Tensor = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss

        return step

    seconds, _ = alternate({name: step_of(name) for name in kinds}, plan)
    return seconds | {
        f"regions of {name}": [_regions(engines[name])] for name in ("plain", "others")
    }


def costs(*, quick: bool) -> list[Row]:
    """A profiled step, and the others, over a step of an engine without the section."""
    plan = Plan(rounds=3 if quick else 15, block=2, warmup=2)
    rows = []
    for size, length in (("11M", 64), ("11M", 256), ("0.3M", 64)):
        with Watch() as watch:
            (seconds,) = run_ranks(_steps, 1, plan, SIZES[size], length)
        plain = statistics.median(seconds["plain"])
        what = f"{size} GPT-2, {BATCH * length} tokens"
        note = f"plain step {1e3 * plain:.0f} ms"
        for name, must in (("profiled", 2.0), ("others", None)):
            label = "a profiled step" if name == "profiled" else "the other steps"
            rows.append(
                ratio_row(
                    f"{label}, {what}, over no profiler",
                    seconds[name],
                    seconds["plain"],
                    must=must,
                    note=note,
                    samples=seconds,
                    others_busy=watch.others,
                )
            )
        (with_it,), (without,) = seconds["regions of others"], seconds["regions of plain"]
        share = max(0.0, with_it - without) / plain
        note = (
            f"{1e6 * with_it:.2f} us a step in regions, {1e6 * without:.2f} us without a profiler"
        )
        rows.append(
            Row(
                f"the other steps, {what}: their regions, share of a step",
                share,
                must=0.0005,
                unit="",
                note=note,
            )
        )
    return rows


def main() -> int:
    """Print and keep the rows; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds; keeps nothing")
    parser.add_argument(
        "--counts", action="store_true", help="only the comparison with closed forms"
    )
    options = parser.parse_args()
    rows = counts() + ([] if options.counts else costs(quick=options.quick))
    return finish(HERE, rows, keeps=not (options.quick or options.counts))


if __name__ == "__main__":
    raise SystemExit(main())
