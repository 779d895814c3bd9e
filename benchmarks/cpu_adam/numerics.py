"""Claim: a thousand AdamW steps stay within 2e-6 of float64; every instruction set gives the same bits.

Three parts: the error of xds's AdamW and torch's fused and foreach AdamW against the same steps in float64; a
digest of the output of every CPU op, in a separate process for each XDS_CPU_ISA; and the casts of every fp32
pattern to bf16 and fp16, compared with torch's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from harness import Row, finish  # noqa: E402

MUST = 2e-6
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
INSTRUCTION_SETS = ("avx512", "avx2", "baseline")
LENGTHS = (
    1,
    15,
    16,
    17,
    1000,
    70001,
)  # partial vectors, and more elements than one thread processes
MODULES = ("adam", "lion", "adagrad", "sgd", "lamb", "square_sum")
OPS = ("adam_", "lion_", "adagrad_", "sgd_", "lamb_direction_", "lamb_apply_", "square_sum")


def load_ops() -> None:
    """Define the ops and register the native kernels."""
    from xds.ops.libraries import load

    for module in MODULES:
        importlib.import_module(f"xds.ops.kernels.{module}")
    load("cpu", require=True)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if missing := [op for op in OPS if not has(f"xds::{op}", "CPU")]:
        raise SystemExit(f"the CPU library has no {', '.join(missing)}")


# ---- a thousand steps ------------------------------------------------------------------------


def gradients(numel: int, steps: int) -> Iterator[Tensor]:
    """fp32 [numel] per step: noise around a mean, with a separate magnitude for every element."""
    generator = torch.Generator().manual_seed(5)
    size = torch.empty(numel).log_normal_(-6, 2, generator=generator)
    mean = torch.randn(numel, generator=generator) * 0.3
    for _ in range(steps):
        yield (torch.randn(numel, generator=generator) + mean) * size


def start(numel: int) -> Tensor:
    """fp32 [numel], with the values of an initialised layer."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(6)) * 0.02


def exact(numel: int, grads: Iterator[Tensor]) -> Tensor:
    """The formula in float64, with fp32 gradients."""
    param = start(numel).double()
    mean, square = torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        wide = grad.double()
        param *= 1 - LR * DECAY
        mean = BETA1 * mean + (1 - BETA1) * wide
        square = BETA2 * square + (1 - BETA2) * wide * wide
        root = (square / (1 - BETA2**step)).sqrt() + EPS
        param -= LR * (mean / (1 - BETA1**step)) / root
    return param


def ours(numel: int, grads: Iterator[Tensor]) -> Tensor:
    """The native op."""
    param = start(numel)
    mean, square = torch.zeros_like(param), torch.zeros_like(param)
    step = torch.zeros(())
    for grad in grads:
        step += 1
        rates = (LR, BETA1, BETA2, EPS, DECAY, True, True)
        torch.ops.xds.adam_(param, grad, mean, square, None, step, None, None, *rates)
    return param


def torch_adamw(numel: int, grads: Iterator[Tensor], **how: bool) -> Tensor:
    """torch.optim.AdamW, fused or foreach."""
    param = torch.nn.Parameter(start(numel))
    rates: dict[str, Any] = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
    optimizer = torch.optim.AdamW([param], **rates, **how)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach()


def errors(numel: int, steps: int) -> Iterator[Row]:
    """The error relative to float64: in the 2-norm, and the largest deviation over the largest parameter."""
    truth = exact(numel, gradients(numel, steps))
    found = {
        "xds": ours(numel, gradients(numel, steps)),
        "torch fused": torch_adamw(numel, gradients(numel, steps), fused=True),
        "torch foreach": torch_adamw(numel, gradients(numel, steps), foreach=True),
    }
    for name, param in found.items():
        off = (param.double() - truth).abs()
        measures = {"2-norm": off.norm() / truth.norm(), "largest": off.max() / truth.abs().max()}
        for measure, value in measures.items():
            row = Row(f"error of {name}, {measure}", float(value) * 1e6, unit="e-6")
            row.must = MUST * 1e6 if name == "xds" else None
            row.note = f"{steps} steps, {numel} parameters"
            yield row


# ---- instruction sets --------------------------------------------------------------------------


def digest() -> str:
    """The digest of the output of every CPU op, for many lengths, dtypes and unaligned starts."""
    load_ops()
    ops = torch.ops.xds
    found = hashlib.sha256()
    generator = torch.Generator().manual_seed(9)

    def noise(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = torch.empty(numel + 3).log_normal_(-4, 6, generator=generator)
        return (torch.randn(numel + 3, generator=generator) * size).to(dtype)[3:]

    def keep(*tensors: Tensor) -> None:
        for tensor in tensors:
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())

    scale, step = torch.tensor(0.37), torch.tensor(3.0)
    for numel in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            grad, out = noise(numel, dtype), torch.empty(numel, dtype=dtype)
            for state in (torch.float32, torch.bfloat16):
                for flag in (True, False):
                    param, mean = noise(numel), noise(numel, state)
                    square = noise(numel, state).abs()
                    rates = (LR, BETA1, BETA2, EPS, DECAY, flag, flag)
                    ops.adam_(param, grad, mean, square, out, step, scale, None, *rates)
                    keep(param, mean, square, out)
                    ops.adagrad_(param, grad, square, out, step, scale, None, LR, 0.1, EPS, DECAY)
                    keep(param, square, out)
                    rates = (LR, BETA1, 0.1, DECAY, flag)
                    ops.sgd_(param, grad, mean, out, step, scale, None, *rates)
                    keep(param, mean, out)
                ops.lion_(param, grad, mean, out, scale, None, LR, BETA1, BETA2, DECAY)
                keep(param, mean, out)
                bounds = torch.tensor([0, numel // 3, numel])
                norms = torch.empty(2, 2, dtype=torch.float64)
                direction = torch.empty(numel)
                states = (param, grad, mean, square.abs_(), direction, norms, bounds, step, scale)
                ops.lamb_direction_(*states, None, BETA1, BETA2, EPS, DECAY, True)
                ops.lamb_apply_(param, direction, out, bounds, torch.tensor([0.1, 0.2]), None)
                keep(param, mean, square, direction, norms, out)
            keep(ops.square_sum(grad))
    return found.hexdigest()


def same_bits() -> Row:
    """Run one process for each instruction set; all digests must be equal."""
    digests = {}
    for name in INSTRUCTION_SETS:
        environment = os.environ | {"XDS_CPU_ISA": name}
        command = [sys.executable, str(HERE / "numerics.py"), "--digest"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        digests[name] = ran.stdout.strip() or f"failed: {ran.stderr.strip().splitlines()[-1]}"
    differ = len(set(digests.values())) - 1
    note = ", ".join(
        f"{name} {value[: 60 if ' ' in value else 12]}" for name, value in digests.items()
    )
    return Row("instruction sets that differ", float(differ), must=0.0, unit="", note=note)


# ---- casts -------------------------------------------------------------------------------------


def cast_mistakes(dtype: torch.dtype, stride: int) -> Row:
    """fp32 patterns whose cast by `lamb_apply_` with rate 0 is not torch's; NaN must stay NaN."""
    block, wrong, seen = 1 << 22, 0, 0
    zeros, rates, bounds = torch.zeros(block), torch.zeros(1), torch.tensor([0, block])
    out = torch.empty(block, dtype=dtype)
    for first in range(-(1 << 31), 1 << 31, block * stride):
        patterns = torch.arange(first, first + block * stride, stride, dtype=torch.int64)
        param = patterns.to(torch.int32).view(torch.float32)
        right = param.to(dtype)
        torch.ops.xds.lamb_apply_(param, zeros, out, bounds, rates, None)
        differ = out.view(torch.int16) != right.view(torch.int16)
        wrong += int((differ & ~(out.isnan() & right.isnan())).sum())
        seen += block
    name = str(dtype).removeprefix("torch.")
    row = Row(f"fp32 patterns cast wrongly to {name}", float(wrong), must=0.0, unit="")
    row.note = f"{seen} patterns, against torch's rounding to nearest even"
    return row


def main() -> int:
    """Run the three parts; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numel", type=int, default=100_003)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stride", type=int, default=1, help="of the patterns cast; odd; 1 is all")
    parser.add_argument("--quick", action="store_true", help="fewer patterns; keeps nothing")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digest:
        print(digest())
        return 0
    load_ops()
    torch.set_num_threads(1)
    stride = 1021 if options.quick else options.stride
    rows = list(errors(options.numel, options.steps))
    rows += [same_bits(), *(cast_mistakes(d, stride) for d in (torch.bfloat16, torch.float16))]
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
