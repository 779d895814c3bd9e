"""Compares two checkouts bit for bit: losses, gradient norms, parameters and optimizer states of trainings.

    python tests/contract/same_bits.py OTHER_CHECKOUT [--only TEXT] [--steps N]

Each checkout trains the same cases in processes of its own, on 1, 2 and 4 ranks of gloo. The digest of a case
covers the fp32 masters and both Adam moments of every parameter after the last step. Exit status 1: some case
differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}}
WIDTH, TOKENS, VOCABULARY, LAYERS, SAMPLES = 48, 12, 61, 3, 4


def cases() -> dict[str, tuple[int, dict[str, Any]]]:  # noqa: C901, PLR0915 (a list)
    """name -> (number of ranks, case). A case: config, and changes of the model and of the loop."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}

    def add(name: str, ranks: int, zero: dict[str, Any] | None = None, **more: Any) -> None:
        found[f"{ranks} ranks, {name}"] = (ranks, {"zero": zero or {}, **more})

    for ranks in (1, 2):
        for stage in (0, 1, 2, 3):
            for precision in ("fp32", "bf16", "fp16"):
                for steps in (1, 2):
                    add(
                        f"stage {stage}, {precision}, accumulation {steps}",
                        ranks,
                        {"stage": stage},
                        precision=precision,
                        accumulation=steps,
                    )
        for stage in (0, 2, 3):
            for precision in ("fp32", "bf16"):
                base: dict[str, Any] = {"precision": precision}
                name = f"stage {stage}, {precision}"
                add(
                    f"{name}, whole units",
                    ranks,
                    {"stage": stage, "unit_min_numel": 100_000_000},
                    **base,
                )
                add(
                    f"{name}, reentrant",
                    ranks,
                    {"stage": stage},
                    reentrant=True,
                    accumulation=2,
                    **base,
                )
                add(
                    f"{name}, no_sync",
                    ranks,
                    {"stage": stage},
                    no_sync=True,
                    accumulation=2,
                    **base,
                )
                add(f"{name}, own backward", ranks, {"stage": stage}, own_backward=True, **base)
                add(f"{name}, edits", ranks, {"stage": stage}, edits=True, **base)
                add(f"{name}, freezing", ranks, {"stage": stage}, freezing=True, **base)
                add(f"{name}, no clipping", ranks, {"stage": stage}, clip=0.0, **base)
                add(f"{name}, large", ranks, {"stage": stage}, large=True, accumulation=2, **base)
                host = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
                add(f"{name}, host", ranks, host, **base)
                add(f"{name}, host, accumulation", ranks, host, accumulation=2, **base)
                add(f"{name}, host, edits", ranks, host, edits=True, **base)
                add(f"{name}, host, freezing", ranks, host, freezing=True, **base)
                half = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
                add(f"{name}, half on the host", ranks, half, **base)
                early = {
                    "stage": stage,
                    "offload_optimizer": {"device": "cpu", "super_offload": True},
                }
                add(f"{name}, super_offload", ranks, early, **base, clip=1e3)
                disk = {
                    "stage": stage,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"},
                }
                add(f"{name}, disk", ranks, disk, **base)
                late = {
                    "stage": stage,
                    "offload_optimizer": {"device": "cpu", "overlap_step": True},
                }
                if stage < 3:
                    add(f"{name}, overlap_step", ranks, late, **base)
                else:
                    params = {"stage": 3, "offload_param": {"device": "cpu"}}
                    add(f"{name}, parameters on the host", ranks, params, **base)
                    add(f"{name}, parameters on the host, edits", ranks, params, edits=True, **base)
                    add(f"{name}, all on the host", ranks, {**host, **params}, **base)
                    add(
                        f"{name}, all on the host, edits",
                        ranks,
                        {**host, **params},
                        edits=True,
                        **base,
                    )
                    add(
                        f"{name}, all on the host, super",
                        ranks,
                        {**early, **params},
                        **base,
                        clip=1e3,
                    )
                    files = {"device": "nvme", "nvme_path": "FOLDER"}
                    add(
                        f"{name}, parameters on disk",
                        ranks,
                        {"stage": 3, "offload_param": files},
                        **base,
                    )
                    both = {**disk, "offload_param": files}
                    add(f"{name}, all on disk", ranks, both, **base, accumulation=2)
        for kind in ("Adam", "SGD", "Adagrad", "Lion", "Lamb", "Muon"):
            for precision in ("fp32", "bf16"):
                for zero in (
                    {"stage": 0},
                    {"stage": 2},
                    {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                ):
                    where = "host" if len(zero) > 1 else f"stage {zero['stage']}"
                    add(
                        f"{kind}, {precision}, {where}", ranks, zero, precision=precision, kind=kind
                    )
    for stage in (0, 1, 2):
        add(
            f"1-bit Adam, stage {stage}",
            2,
            {"stage": stage},
            precision="bf16",
            kind="OneBitAdam",
            clip=0.0,
        )
    for stage in (2, 3):
        zeropp = {"zero_quantized_weights": stage == 3, "zero_quantized_gradients": True}
        for precision in ("fp32", "bf16"):
            add(
                f"ZeRO++, stage {stage}, {precision}",
                2,
                {"stage": stage, **zeropp},
                precision=precision,
            )
            add(
                f"ZeRO++, stage {stage}, {precision}, host",
                2,
                {"stage": stage, **zeropp, "offload_optimizer": {"device": "cpu"}},
                precision=precision,
            )
    for stage in (1, 3):
        add(
            f"MiCS, stage {stage}",
            4,
            {"stage": stage, "mics_shard_size": 2},
            precision="bf16",
            accumulation=2,
        )
        add(f"hpZ, stage {stage}", 4, {"stage": 3, "zero_hpz_partition_size": 2}, precision="bf16")
        add(f"stage {stage}, 4 ranks, bf16", 4, {"stage": stage}, precision="bf16", accumulation=2)
    for stage in (1, 2):
        add(f"shared parameters, stage {stage}", 2, {"stage": stage, "shared_parameters": True})
        for precision in ("fp32", "bf16"):
            add(
                f"pipeline, stage {stage}, {precision}",
                4,
                {"stage": stage},
                precision=precision,
                layers=True,
                accumulation=4,
                config={"pipeline": {"stages": 2}},
            )
    for stage in (1, 3):
        add(
            f"slices, stage {stage}",
            4,
            {"stage": stage},
            llama=True,
            config={"tensor_parallel": {"tp_size": 2}},
        )
        add(
            f"sequences, stage {stage}",
            4,
            {"stage": stage},
            llama=True,
            config={"sequence_parallel_size": 2},
        )
        add(
            f"llama pipeline, stage {stage}",
            4,
            {"stage": stage},
            llama=True,
            accumulation=2,
            config={"pipeline": {"stages": 2}},
        )
    for stage in (0, 2):
        for precision in ("bf16", "fp16"):
            more = {"precision": precision, "accumulation": 2}
            add(f"stage {stage}, 4 ranks, {precision}", 4, {"stage": stage}, **more)
    for schedule in ("gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"):
        cut = {"pipeline": {"stages": 2, "schedule": schedule}}
        add(f"pipeline, {schedule}", 2, layers=True, accumulation=4, config=cut)
    streamed = {"memory_limit": 0}
    for ranks in (1, 2, 4):
        for stage in (0, 3):
            add(f"generation, stage {stage}", ranks, {"stage": stage}, llama=True, rollout={})
        add("generation, streamed", ranks, {"stage": 3}, llama=True, rollout=streamed)
    add(
        "generation, 8 bits",
        2,
        {"stage": 3, "offload_param": {"device": "cpu"}},
        llama=True,
        rollout={**streamed, "bits": 8},
    )
    slices = {"tensor_parallel": {"tp_size": 2}}
    add("generation, slices", 4, {"stage": 1}, llama=True, rollout={}, config=slices)
    return found


# -- one rank -----------------------------------------------------------------------------------------------


def build(case: dict[str, Any]) -> Any:  # noqa: C901 (three models)
    """The model of a case."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(7)
    width = 192 if case.get("large") else WIDTH
    if case.get("llama"):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY + 3,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)
            self.scale = nn.Parameter(torch.ones(()))

        def inner(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale

        def forward(self, x: Any) -> Any:
            if case.get("reentrant") and torch.is_grad_enabled():
                return checkpoint(self.inner, x, use_reentrant=True)
            return self.inner(x)

    if case.get("layers"):

        class Loss(nn.Module):
            def forward(self, x: Any) -> Any:
                return x.float().square().mean()

        layers = [nn.Linear(width, width), *(Block() for _ in range(4)), nn.Linear(width, 5)]
        return nn.Sequential(*layers, Loss())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.embed.weight
            self.unused = nn.Parameter(torch.ones(3))
            self.blocks[1].up.bias.requires_grad_(False)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids[:, :-1])
            if case.get("reentrant"):
                x = x.requires_grad_() if x.is_leaf else x
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x)).flatten(0, 1).float()
            return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

    return Model()


def config_of(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Its config."""
    zero = json.loads(json.dumps(case["zero"]).replace("FOLDER", folder))
    zero = {"unit_min_numel": 0, "stage3_param_persistence_threshold": 0, **zero}
    if zero.get("stage", 0) == 3:
        zero["stage3_param_persistence_threshold"] = 60
    optimizer: dict[str, Any] = json.loads(json.dumps(ADAMW))
    kind = case.get("kind")
    if kind:
        optimizer = {"type": kind, "params": {"lr": 1e-3}}
        if kind == "OneBitAdam":
            optimizer["params"]["freeze_step"] = 3
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "optimizer": optimizer,
        "zero_optimization": zero,
        **case.get("config", {}),
    }
    if case.get("clip", 0.5):
        config["gradient_clipping"] = case.get("clip", 0.5)
    precision = case.get("precision", "fp32")
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 30  # the first steps are skipped
        config["fp16"]["hysteresis"] = 1
    return config


def train(  # noqa: C901 (one loop)
    case: dict[str, Any], steps: int, folder: str, *, reads: bool = True
) -> dict[str, Any]:
    """Losses, norms and, if it `reads` them, a digest of all states on this rank."""
    import contextlib

    import torch

    import xds

    model = build(case)
    engine = xds.initialize(model, config_of(case, folder))
    losses, norms, tokens = [], [], []
    rank = engine.dp_rank
    count = case.get("accumulation", 1)
    is_pipeline = "pipeline" in case.get("config", {})
    if case.get("precision") == "fp16":
        steps += 14
    for step in range(steps):
        micro = [batch(case, step, number, rank, engine.device) for number in range(count)]
        if is_pipeline:
            losses.append(engine.train_batch(iter(micro)).item())
        else:
            for number, one in enumerate(micro):
                last = number == count - 1
                context = (
                    engine.no_sync()
                    if case.get("no_sync") and not last
                    else contextlib.nullcontext()
                )
                with context:
                    out = engine(**one) if isinstance(one, dict) else engine(one)
                    loss = out if isinstance(out, torch.Tensor) else out.loss
                    if case.get("own_backward"):
                        loss.backward()
                    else:
                        engine.backward(loss)
                if not (case.get("no_sync") and not last):
                    engine.step()
                losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() or 0))
        if case.get("edits"):
            edit(engine, step)
        if "rollout" in case:
            tokens.append(generated(engine, case["rollout"]))
        if case.get("freezing") and step in (1, 2):
            engine.module.blocks[0].up.weight.requires_grad_(step == 2)
    digest = hashlib.sha256()
    for name, param in engine.module.named_parameters() if reads else ():
        whole = xds.zero.safe_get_full_fp32_param(param)
        if whole is None:
            whole = param.detach()
        digest.update(name.encode() + whole.detach().float().cpu().contiguous().numpy().tobytes())
        for key in ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer"):
            try:
                state = xds.zero.safe_get_full_optimizer_state(param, key)
            except Exception:
                state = None
            if state is not None:
                digest.update(state.detach().float().cpu().contiguous().numpy().tobytes())
    engine.destroy()
    texts = {"losses": [repr(x) for x in losses], "norms": [repr(x) for x in norms]}
    if tokens:
        texts["tokens"] = [repr(x) for x in tokens]
    return {**texts, "digest": digest.hexdigest()[:16]}


def generated(engine: Any, how: dict[str, Any]) -> list[list[int]]:
    """The likeliest tokens, and tokens that are drawn."""
    import torch

    prompt = torch.tensor([[5, 6, 7, 8 + engine.dp_rank]], device=engine.device)
    with engine.generating(**how):
        return [
            engine.generate(prompt, max_new_tokens=6, do_sample=draws)[0].tolist()
            for draws in (False, True)
        ]


def edit(engine: Any, step: int) -> None:
    """Writes of user code: in place, by GatheredParameters, by a setter."""
    import torch

    import xds

    block = engine.module.blocks[step % LAYERS]
    with torch.no_grad():
        if step == 0:
            with xds.zero.GatheredParameters([block.down.weight], modifier_rank=0):
                block.down.weight.mul_(0.9)
        elif step == 1:
            width = block.norm.weight.numel()
            xds.zero.safe_set_full_fp32_param(
                block.up.weight, torch.full((3 * width + 1, width), 0.01)
            )
        elif (
            step == 2
            and block.norm.weight.numel()
            and bool((block.norm.weight == block.norm.weight).all())
        ):
            block.norm.weight.mul_(1.1)


def batch(case: dict[str, Any], step: int, micro: int, rank: int, device: Any) -> Any:
    import torch

    seed = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    if case.get("layers"):
        dtype = torch.bfloat16 if case.get("precision") == "bf16" else torch.float32
        return torch.randn(SAMPLES, WIDTH, generator=seed).to(device, dtype)
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=seed).to(device)
    if case.get("llama"):
        ids = ids[:, :TOKENS]
        return {"input_ids": ids, "labels": ids}
    return ids


def run_rank(rank: int, ranks: int, names: list[str], steps: int, folder: str) -> None:
    """All cases of this number of ranks; rank 0 writes what came of them."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{ranks}", rank=rank, world_size=ranks
    )
    found: dict[str, Any] = {}
    for name in names:
        case = cases()[name][1]
        try:
            result: Any = train(case, steps, folder)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            if os.environ.get("SAME_BITS_TRACE"):
                traceback.print_exc()
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, result)
        found[name] = everyone
    if rank == 0:
        Path(folder, f"found{ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


# -- both checkouts -----------------------------------------------------------------------------------------


def run(checkout: Path, chosen: Collection[str], steps: int) -> dict[str, Any]:
    """What came of the cases in a checkout: for each case the result of every rank."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "path").mkdir()
        (Path(folder) / "path" / "xds").symlink_to(checkout.resolve(), target_is_directory=True)
        environment = dict(
            os.environ, PYTHONPATH=f"{folder}/path", PYTHONSAFEPATH="1", OMP_NUM_THREADS="1"
        )
        for ranks in (1, 2, 4):
            names = [
                name for name, (number, _) in cases().items() if number == ranks and name in chosen
            ]
            if not names:
                continue
            command = [sys.executable, __file__, "--rank"]
            argument = json.dumps([ranks, names, steps, folder])
            processes = [
                subprocess.Popen([*command, str(rank), argument], env=environment, cwd=folder)
                for rank in range(ranks)
            ]
            for process in processes:
                process.wait()
            result = Path(folder) / f"found{ranks}.json"
            found |= (
                json.loads(result.read_text())
                if result.exists()
                else {name: "died" for name in names}
            )
    return found


def main() -> int:
    if sys.argv[1] == "--rank":
        ranks, names, steps, folder = json.loads(sys.argv[3])
        run_rank(int(sys.argv[2]), ranks, names, steps, folder)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout, or a JSON of --save")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--own", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument(
        "--save", type=Path, help="write what this checkout gives, and compare nothing"
    )
    options = parser.parse_args()
    chosen = [name for name in cases() if options.only in name]
    if options.save is not None:
        options.save.write_text(json.dumps(run(options.own, chosen, options.steps), indent=0))
        return 0
    if options.other.is_file():
        wanted = json.loads(options.other.read_text())
        wanted = {name: value for name, value in wanted.items() if name in chosen}
    else:
        wanted = run(options.other, chosen, options.steps)
    found = run(options.own, chosen, options.steps)
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    for name in differing:
        print(
            f"{name}\n   {json.dumps(wanted[name])[:600]}\n   {json.dumps(found.get(name))[:600]}"
        )
    errors = sum("error" in json.dumps(value) for value in wanted.values())
    equal = len(wanted) - len(differing)
    print(f"{equal} of {len(wanted)} cases are equal bit for bit; {errors} are errors there")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
