"""Models of transformers on one device: generation, inference, and sections that change the computation.

python benchmarks/gpu/models.py generation      # or another name of GROUPS
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import common
import torch
from common import DEVICE, IS_CUDA, IS_REHEARSED, IS_TINY, case, config
from torch import Tensor, nn

import xds

NUM_LAYERS, WIDTH, VOCABULARY = (4, 32, 128) if IS_TINY else (8, 256, 512)
HOST: dict[str, Any] = {"device": "cpu"}
STREAMED = {
    "stage": 3,
    "offload_param": HOST,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "unit_min_numel": 0,
}


def build(kind: str) -> Any:
    """A small GPT-2 or Llama, fp32 on the host: the same numbers for every device."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": 4}
        sizes |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=VOCABULARY, **tokens))
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": VOCABULARY}
    sizes |= {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens))


def prompt() -> Tensor:
    """[4, 8] token numbers on the device."""
    return (torch.arange(1, 33).view(4, 8) % VOCABULARY).to(DEVICE)


def greedy(model: Any, **more: Any) -> Tensor:
    """Twelve new tokens."""
    tokens = prompt()
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **more}
    found: Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
    return found.cpu()


def train(engine: Any, steps: range) -> list[float]:
    """The loss of each step."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(VOCABULARY, (common.SEQUENCES, 64)).to(DEVICE)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def generation() -> None:
    """Rollouts of an engine that trains, and its weights on their way out."""
    for kind in ("gpt2",) if IS_REHEARSED else ("gpt2", "llama"):
        wanted = greedy(build(kind).to(DEVICE).eval())
        ways: dict[str, Any] = {
            **{
                f"stage {stage}": {"stage": stage}
                for stage in ((3,) if IS_REHEARSED else (0, 2, 3))
            },
            "parameters on the host": STREAMED,
        }
        for name, zero in ways.items():
            with case(f"generate, {kind}, {name}") as result:
                settings = config("fp32", zero["stage"], zero=zero)
                engine = xds.initialize(build(kind), settings)
                plain = xds.initialize(build(kind), settings)
                found = greedy(engine)
                static = greedy(engine, cache_implementation="static", disable_compile=True)
                with engine.generating(memory_limit=0) as module:
                    streamed = greedy(module)
                are_equal = [torch.equal(one, wanted) for one in (found, static, streamed)]
                sampled = greedy(engine, do_sample=True)
                losses, without = train(engine, range(4)), train(plain, range(4))
                weights = {name: tensor.cpu() for name, tensor in engine.weights()}
                twin = build(kind)
                twin.load_state_dict(weights, strict=False)
                masters = common.masters_of(engine)
                is_out = all(map(torch.equal, twin.parameters(), masters))
                text = f"tokens {are_equal}, weights {is_out}, losses {losses == without}"
                is_right = all(are_equal) and is_out and losses == without
                result(is_right and sampled.shape == wanted.shape, text)
                engine.destroy()
                plain.destroy()
    with case("generate, compiled with a static cache") as result:
        engine = xds.initialize(build("llama"), config("bf16", 3))
        same = greedy(engine), greedy(engine, cache_implementation="static")
        share = float((same[0] == same[1]).float().mean())
        result(share > 0.8, f"{share:.2f} of the tokens")
        engine.destroy()


def inference() -> None:
    """`xds.init_inference`: precisions, few bits, streamed weights, compiled code, graphs."""
    model = build("llama")
    wanted = greedy(copy.deepcopy(model).to(DEVICE).eval())
    ways: dict[str, dict[str, Any]] = {
        "fp32": {},
        "stage 3": {"zero": {"stage": 3}},
        "streamed": {"zero": STREAMED},
        "streamed from files": {
            "zero": STREAMED
            | {
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": tempfile.mkdtemp(),
                    "max_in_cpu": 0,
                }
            }
        },
        "kernel injection": {"replace_with_kernel_inject": True},
        "CUDA graph": {"enable_cuda_graph": True},
    }
    if importlib.util.find_spec("torchao"):
        ways["int8"] = {"dtype": "int8"}
        ways["int8, streamed"] = {"dtype": "int8", "zero": STREAMED}
    for name, settings in ways.items():
        with case(f"init_inference, {name}") as result:
            engine = xds.init_inference(copy.deepcopy(model), {"dtype": "fp32", **settings})
            found = [greedy(engine), greedy(engine)]
            share = min(float((one == wanted).float().mean()) for one in found)
            result(share > (0.8 if "int8" in name else 0.999), f"{share:.3f} of the tokens")
            engine.destroy()
    for dtype in ("bf16", "fp16"):
        with case(f"init_inference, {dtype}") as result:
            engine = xds.init_inference(copy.deepcopy(model), dtype=dtype)
            found = engine(prompt()).logits.float().cpu()
            gap = float((found - model.eval()(prompt().cpu()).logits.detach()).abs().max())
            result(gap < 0.05, f"logits {gap:.1e}", gap)
            engine.destroy()
    with case("init_inference, streamed: memory of the device") as result:
        width, layers = (64, 16) if IS_TINY else (2048, 16)
        blocks = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        common.release()
        before = common.allocated()
        engine = xds.init_inference(nn.Sequential(*blocks), dtype="fp32", zero=STREAMED)
        if IS_CUDA:
            torch.cuda.reset_peak_memory_stats()
        engine(torch.ones(1, width, device=DEVICE))
        peak = torch.cuda.max_memory_allocated() - before if IS_CUDA else 0
        units = peak / (4 * width**2)
        result(units < 3.1, f"{units:.2f} units of {layers}", units)
        engine.destroy()


def sections() -> dict[str, dict[str, Any]]:
    """Sections of a config that change what a model computes."""
    weights = {"enabled": True, "quantize_weight_in_forward": True}
    groups = {"all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["mlp"]}}
    rows = {"all": {"params": {"dense_ratio": 0.5}, "modules": ["gate_proj"]}}
    methods = {"enabled": True, "method": "l1", "schedule_offset": 1}
    compressed = {
        "8-bit weights": {
            "weight_quantization": {"shared_parameters": weights, "different_groups": groups}
        },
        "rows": {"row_pruning": {"shared_parameters": methods, "different_groups": rows}},
    }
    return {
        "layer drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 1.0}},
        "tiles": {"sequence": {"tiled_mlp": 4, "tiled_loss": 5}},
        **{name: {"compression_training": section} for name, section in compressed.items()},
        **{
            f"sparse attention, {mode}": {"sparse_attention": {"mode": mode, "block": 16}}
            for mode in ("fixed", "bigbird", "bslongformer", "local_sliding_window")[
                : 1 if IS_REHEARSED else 4
            ]
        },
    }


def losses_of(section: dict[str, Any], stage: int) -> list[float]:
    """Four steps of a new engine."""
    engine = xds.initialize(build("llama"), config("fp32", stage, **section))
    try:
        return train(engine, range(4))
    finally:
        engine.destroy()


def reference() -> None:
    """Print the losses of stage 0 with each section."""
    print(json.dumps({name: losses_of(section, 0) for name, section in sections().items()}))


def changed() -> None:
    """What changes the computation, against the same on the CPU, in fp32."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDS_BENCH_DEVICE": "cpu"}
    command = [sys.executable, __file__, "reference"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    wanted = json.loads(done.stdout.splitlines()[-2])
    for name, section in sections().items():
        for stage in (3,) if IS_REHEARSED else (0, 3):
            with case(f"{name}, stage {stage}") as result:
                gap = common.distance(losses_of(section, stage), wanted[name])
                result(gap < (1e-3 if "8-bit" in name else 5e-5), f"loss {gap:.1e}", gap)
    with case("sparse attention in bf16, with its gradients") as result:
        result(*_sparse_gap())


def _sparse_gap() -> tuple[bool, str, float]:
    """The op against masked dense attention: outputs and gradients."""
    from xds.ops.sparse_attention import Fixed, sparse_attention

    rule = Fixed(num_heads=4, block=64, num_local_blocks=4, attention="unidirectional")
    layout = rule.make_layout(1024)
    mask = layout.repeat_interleave(64, 1).repeat_interleave(64, 2).bool().to(DEVICE)
    mask = mask & torch.ones(1024, 1024, dtype=torch.bool, device=DEVICE).tril()
    inputs = [torch.randn(2, 4, 1024, 64, device=DEVICE) for _ in range(3)]
    narrow = [one.bfloat16().requires_grad_() for one in inputs]
    exact = [one.detach().float().requires_grad_() for one in narrow]
    found = sparse_attention(*narrow, layout.to(DEVICE), block=64, is_causal=True)
    wanted = nn.functional.scaled_dot_product_attention(*exact, attn_mask=mask)
    found.float().square().sum().backward()
    wanted.square().sum().backward()
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(narrow, exact, strict=True))]
    gap = max(float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)  # type: ignore[union-attr]
    return gap < 2e-2, f"{gap:.1e}", gap


# ---- times -----------------------------------------------------------------------------------


def seconds_of(ways: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each way, in turns; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name in list(ways) if turn % 2 else list(reversed(ways)):
            print(f"# {name}: timed", flush=True)
            common.synchronize()
            start = time.perf_counter()
            try:
                ways[name]()
            except Exception as error:
                traceback.print_exc()
                common.record(case=f"{name}, timed", ok=False, text=str(error)[:200])
                ways = {other: way for other, way in ways.items() if other != name}
                continue
            common.synchronize()
            if turn >= 0:
                found[name].append(time.perf_counter() - start)
        if common.left() < 10:
            break
    return {name: taken for name, taken in found.items() if taken}


def show(table: str, column: str, found: dict[str, list[float]], base: str, unit: float) -> None:
    """Medians, and medians of the ratios over `base`."""
    for name, taken in found.items():
        text = f"{statistics.median(taken) * unit:.2f}"
        if base in found:
            ratios = [a / b for a, b in zip(taken, found[base], strict=False)]
            text += f" ({statistics.median(ratios):.2f})"
        common.figure(table, name, column, text, seconds=taken)


def generation_times() -> None:
    """A Llama with 0.4 billion parameters in bf16: decoding by each way, and streamed weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    sizes |= {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16}
    if IS_TINY:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

    def draw() -> Any:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return LlamaForCausalLM(LlamaConfig(**sizes, **tokens)).to(torch.bfloat16)

    count = 4 if IS_TINY else 64
    inputs = torch.arange(8 * 32, device=DEVICE).view(8, 32)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(inputs), "do_sample": False}
    how |= {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    plain = draw().eval()
    ways: dict[str, Callable[[], Any]] = {"plain": lambda: plain.generate(inputs, **how)}
    for stage in (0, 3):
        trains = xds.initialize(draw(), config("bf16", stage))
        ways[f"engine, stage {stage}"] = lambda own=trains: own.generate(inputs, **how)  # type: ignore[misc]
    keys: dict[str, dict[str, Any]] = {
        "init_inference": {},
        "kernel injection": {"replace_with_kernel_inject": True},
        "CUDA graph": {"enable_cuda_graph": True},
        "streamed from the host": {"zero": STREAMED},
    }
    if importlib.util.find_spec("torchao"):
        keys["int8"] = {"dtype": "int8"}
    for name, settings in keys.items():
        with case(f"{name}, built") as result:
            infers = xds.init_inference(draw(), {"dtype": "bf16", **settings})
            ways[name] = lambda own=infers: own.generate(inputs, **how)  # type: ignore[misc]
            result(True)
    table = "Llama 0.4B, bf16, batch 8: ms a token (over plain)"
    with torch.no_grad():
        show(table, "", seconds_of(ways, 3), "plain", 1e3 / count)
    size_bytes = sum(param.nbytes for param in plain.parameters())
    common.figure(table, "bytes of the weights", "", f"{size_bytes / 1e9:.2f} GB")


def attention_times() -> None:
    """Sparse attention over dense, forward and backward; torch's flex_attention with the same layout."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from xds.ops.sparse_attention import BigBird, Fixed, sparse_attention

    length, heads, batch = (512, 2, 1) if IS_TINY else (8192, 16, 2)
    q, k, v = (
        torch.randn(batch, heads, length, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )

    def both(run: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: run().float().sum().backward()

    fused = torch.compile(flex_attention)
    rules = {
        "fixed": Fixed(heads, block=64, num_local_blocks=8, attention="unidirectional"),
        "bigbird": BigBird(heads, block=64, num_random_blocks=2),
    }
    for name, rule in rules.items():
        layout = rule.make_layout(length).to(DEVICE)
        causal = name == "fixed"
        seen = layout.tril() if causal else layout
        density = float(seen.float().mean()) * (2 if causal else 1)

        def allowed(b: Any, h: Any, i: Any, j: Any, layout: Any = layout, c: Any = causal) -> Any:
            inside = layout[h, i // 64, j // 64] > 0
            return inside & (i >= j) if c else inside

        ways = {
            "dense": both(
                lambda c=causal: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)  # type: ignore[misc]
            ),
            "sparse": both(
                lambda c=causal, own=layout: sparse_attention(q, k, v, own, block=64, is_causal=c)  # type: ignore[misc]
            ),
        }
        if IS_CUDA:
            mask = create_block_mask(allowed, None, heads, length, length, device=DEVICE)
            ways["flex_attention"] = both(lambda own=mask: fused(q, k, v, block_mask=own))  # type: ignore[misc]
        table = f"attention, {length} tokens, bf16, forward and backward: ms (over dense)"
        show(table, f"{name}, density {density:.2f}", seconds_of(ways), "dense", 1e3)


def dropping_times() -> None:
    """Step time with dropped blocks over that without, a GPT with 355 million parameters."""
    import timing

    race = timing.Race(timing.MEDIUM, timing.MANY)
    drop = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 1000.0}}
    for stage in (0, 3):
        race.add(f"xds {stage}", timing.xds, stage=stage)
    for name, each in list(race.contestants.items()):
        with case(f"{name}, drops blocks") as result:
            stage = int(name[-1])
            made = timing.Contestant(timing.xds, race.shape, race.batch, stage=stage, **drop)
            race.contestants[f"{name}, drops blocks"] = made
            result(True)
        del each
    for name, samples in race.run("xds 0", race.batch, 5, 8).items():
        text = f"{1e3 * statistics.median(samples['seconds']):.1f} ({samples['ratio']:.2f})"
        common.figure(
            "355M GPT, 27 % of the blocks dropped: ms (over all)", name, "", text, **samples
        )


GROUPS: dict[str, Callable[[], None]] = {
    **{"generation": generation, "inference": inference},
    **{"changed": changed, "reference": reference},
    **{"generation times": generation_times, "attention times": attention_times},
    "dropping times": dropping_times,
}

if __name__ == "__main__":
    logging.getLogger("xds").setLevel(logging.ERROR)
    GROUPS[sys.argv[1]]()
    print(json.dumps({"group": sys.argv[1]}))
