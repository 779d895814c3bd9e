"""What training would reserve on a GPU over what it allocates, from a trace on the stand-in. Prints a table.

    python benchmarks/gpu_memory/fragmentation.py

Width, tokens and vocabulary are an eighth of the real ones, so weights and activations take 1/64 of
their bytes; the allocator gets every size times 64. Attention keeps what a fused kernel keeps.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:] = [path for path in sys.path if path]  # the root has an offload/, too
sys.path[:0] = [str(path) for path in (HERE, HERE.parent / "gpu", TESTS / "rehearsal", TESTS)]

SHRINK = 8
SIZES = {"350M": (24, 1024, 16, 8), "1.3B": (24, 2048, 16, 4)}  # layers, width, heads, sequences
STEPS = 4


def trace(size: str, config: dict[str, Any], *, varies: bool, recomputes: bool) -> list[str]:
    """Allocations of some steps. varies: every other batch is shorter."""
    import torch
    import torch.nn.functional as F

    from gpt import Shape, build, draw  # isort: skip

    layers, width, heads, sequences = SIZES[size]
    context, vocabulary = 2048 // SHRINK, 50304 // SHRINK
    F.scaled_dot_product_attention = _Fused.apply
    ops = torch.ops.host_cuda
    ops.log_memory(True)
    ops.take_log()
    shape = Shape(layers, width // SHRINK, heads, context, vocabulary)
    model = build(shape, torch.device("cuda"), torch.bfloat16, recomputes=recomputes and not config)
    if recomputes:
        config = config and config | {"activation_checkpointing": {}}
    step_once, end = _xds(model, config) if config else _plain(model)
    log: list[str] = []
    for step in range(STEPS):
        tokens = sequences * context
        batch = draw(shape, tokens, torch.device("cuda"))
        if varies and step % 2:
            batch = batch[:, : context * 5 // 8].contiguous()
        step_once(batch)
        del batch
        log += [line for line in ops.take_log() if line.startswith(("alloc ", "free ", "empty "))]
    end()
    ops.log_memory(False)
    return log


def _xds(model: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    import xds

    engine = xds.initialize(model, config)

    def step(batch: Any) -> None:
        engine.backward(engine(batch))
        engine.step()

    return step, engine.destroy


def _plain(model: Any) -> tuple[Any, Any]:
    """A bf16 model with fp32 masters and gradients, as in benchmarks/gpu."""
    import torch

    params = list(model.parameters())
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    for param, master in zip(params, masters, strict=True):
        param.grad, master.grad = torch.zeros_like(param), torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        model(batch).backward()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                master.grad.copy_(param.grad)
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                param.grad.zero_()

    return step, lambda: None


def _fused_class() -> Any:
    import torch

    class Fused(torch.autograd.Function):
        """Keeps queries, keys, values, the output and a number for each query, as a fused kernel does."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
            out = v * 1.0
            ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            q, k, v, *_ = ctx.saved_tensors
            return torch.empty_like(q).zero_(), torch.empty_like(k).zero_(), grad * 1.0, None

    return Fused


class _Fused:
    @staticmethod
    def apply(q: Any, k: Any, v: Any, *, is_causal: bool = False) -> Any:
        return _fused_class().apply(q, k, v)


def main() -> None:
    """The table."""
    from device_ranks import stop_ranks

    # the ranks import `trace` from here
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    print(
        "| model, 2 ranks, bf16 | allocated, GB | reserved | smallest device | the same with two pools |"
    )
    print("|---|---|---|---|---|")
    for size in sys.argv[1:] or SIZES:
        for recomputes in (False, True):
            for varies in (False, True):
                for stage in (None, 0, 2, 3):
                    row(size, stage, varies=varies, recomputes=recomputes)
    stop_ranks()


def row(size: str, stage: int | None, *, varies: bool, recomputes: bool) -> None:
    """One line; stage None: a plain loop."""
    import fragmentation
    from caching_allocator import replay, smallest_device
    from device_ranks import ranks

    config = {
        "train_micro_batch_size_per_gpu": SIZES[size][3],
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "stage3_max_reuse_distance": 50_000_000 // SHRINK**2,
        },
    }
    options = {"varies": varies, "recomputes": recomputes}
    run = partial(fragmentation.trace, size, {} if stage is None else config, **options)
    log = ranks(2, kernels=True).run(run)[0]
    peaks = replay(log, SHRINK**2)
    devices = [smallest_device(log, SHRINK**2, pools=pools) for pools in (False, True)]
    name = "plain" if stage is None else f"stage {stage}"
    how = ", recomputed" * recomputes + ", two lengths" * varies
    most = peaks.most_allocated
    ratios = [num_bytes / most for num_bytes in (peaks.most_reserved, *devices)]
    print(
        f"| {size} {name}{how} | {most / 1e9:.2f} | {' | '.join(f'{one:.3f}' for one in ratios)} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
