"""A process with contestants that runs one step of one of them on each command.

    python worker.py CASE NUMEL THREADS native|deepspeed

Contestants of one process share their tensors, so pages and addresses are the same for all. Each line on stdin
names a contestant; the answer on stdout is the seconds of one step, as JSON. The first answer lists the
contestants. It imports nothing from this folder, because the interpreter of another library runs it as well.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
MOMENTUM, CLIP, LOSS_SCALE = 0.9, 1.0, 128.0
CHUNKS = (1 << 15, 1 << 16, 1 << 18)  # elements; the peers' pieces that stay in a cache

Step = Callable[[], object]


def tensors(numel: int, names: str) -> list[Tensor]:
    """fp32 [numel] each, values of both signs, second moments positive; every page is touched."""
    made = []
    for name in names.split():
        tensor = torch.empty(numel)
        block = torch.randn(min(numel, 1 << 20), generator=torch.Generator().manual_seed(len(made)))
        for piece in tensor.split(len(block)):
            piece.copy_(block[: len(piece)])
        made.append(tensor.abs_() if name in ("square", "sum") else tensor)
    return made


def narrow(wide: Tensor) -> Tensor:
    """The same in bf16."""
    return wide.bfloat16()


# ---- AdamW -----------------------------------------------------------------------------------


def adamw(numel: int) -> dict[str, Step]:
    """The fp32 step only."""
    param, grad, mean, square = tensors(numel, "param grad mean square")
    step = torch.ones(())

    def ours() -> None:
        step.add_(1)
        _adam(param, grad, mean, square, None, step, None, None)

    def fused() -> None:
        step.add_(1)
        _torch_fused(param, grad, mean, square, step, None, None)

    return {"xds": ours, "torch fused": fused}


def adamw_bf16(numel: int) -> dict[str, Step]:
    """bf16 gradient in, bf16 parameter out; with norm, overflow check, unscaling and clipping."""
    param, grad, mean, square = tensors(numel, "param grad mean square")
    half, out, wide = narrow(grad), narrow(param), grad
    step = torch.ones(())

    def ours() -> None:
        step.add_(1)
        norm = torch.ops.xds.square_sum(half).sqrt().float() / LOSS_SCALE
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0) / LOSS_SCALE
        found_inf = 1 - norm.isfinite().float()
        _adam(param, half, mean, square, out, step, scale, found_inf)

    def divisor(norm: Tensor) -> tuple[Tensor, Tensor]:
        """The divisor of the gradient for torch, and whether the step must be skipped."""
        norm = norm / LOSS_SCALE
        return LOSS_SCALE / (CLIP / (norm + 1e-6)).clamp(max=1.0), 1 - norm.isfinite().float()

    def whole() -> None:
        step.add_(1)
        wide.copy_(half)
        by, found_inf = divisor(torch.linalg.vector_norm(wide))
        _torch_fused(param, wide, mean, square, step, by, found_inf)
        out.copy_(param)

    def chunked(chunk: int) -> Step:
        buffer = torch.empty(chunk)
        pieces = [
            tuple(
                t.narrow(0, start, min(chunk, numel - start))
                for t in (param, half, mean, square, out)
            )
            for start in range(0, numel, chunk)
        ]
        norms = torch.empty(len(pieces))
        spots = norms.unbind()

        def run() -> None:
            step.add_(1)
            for (_, g, *_), spot in zip(pieces, spots, strict=True):
                torch.linalg.vector_norm(buffer[: len(g)].copy_(g), out=spot)
            by, found_inf = divisor(torch.linalg.vector_norm(norms))
            for p, g, m, v, o in pieces:
                short = buffer[: len(g)].copy_(g)
                _torch_fused(p, short, m, v, step, by, found_inf)
                o.copy_(p)

        return run

    steps: dict[str, Step] = {"xds": ours, "torch whole": whole}
    return steps | {f"torch in pieces of {chunk >> 10}K": chunked(chunk) for chunk in CHUNKS}


def _adam(param: Tensor, *rest: Any) -> None:
    torch.ops.xds.adam_(param, *rest, LR, BETA1, BETA2, EPS, DECAY, True, True)


def _torch_fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, *rest: Any) -> None:
    by, found_inf = rest
    torch._fused_adamw_(
        [p],
        [g],
        [m],
        [v],
        [],
        [step],
        lr=LR,
        beta1=BETA1,
        beta2=BETA2,
        weight_decay=DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
        grad_scale=by,
        found_inf=found_inf,
    )


# ---- other optimizers, fp32 ------------------------------------------------------------------


def in_pieces(step: Callable[..., None], full: list[Tensor], scratch: int) -> dict[str, Step]:
    """torch without a fused kernel: over the whole tensor, and in pieces that stay in a cache.

    `step(*piece, *buffers)` gets `scratch` buffers as long as the piece.
    """

    def run(chunk: int) -> Step:
        buffers = [torch.empty(min(chunk, full[0].numel())) for _ in range(scratch)]
        pieces = list(zip(*(tensor.split(chunk) for tensor in full), strict=True))

        def go() -> None:
            for piece in pieces:
                step(*piece, *(buffer[: len(piece[0])] for buffer in buffers))

        return go

    steps = {f"torch in pieces of {chunk >> 10}K": run(chunk) for chunk in CHUNKS}
    return steps | {"torch whole": run(full[0].numel())}


def lion(numel: int) -> dict[str, Step]:
    """torch has no Lion: its plain ops."""
    param, grad, mean = tensors(numel, "param grad mean")

    def plain(p: Tensor, g: Tensor, m: Tensor, direction: Tensor) -> None:
        torch.lerp(m, g, 1 - BETA1, out=direction).sign_()
        p.mul_(1 - LR * DECAY).add_(direction, alpha=-LR)
        m.lerp_(g, 1 - BETA2)

    def ours() -> None:
        torch.ops.xds.lion_(param, grad, mean, None, None, None, LR, BETA1, BETA2, DECAY)

    return {"xds": ours, **in_pieces(plain, [param, grad, mean], 1)}


def adagrad(numel: int) -> dict[str, Step]:
    """torch's fused Adagrad."""
    param, grad, total = tensors(numel, "param grad sum")
    step = torch.ones(())

    def ours() -> None:
        step.add_(1)
        rates = (LR, 0.0, 1e-10, DECAY)
        torch.ops.xds.adagrad_(param, grad, total, None, step, None, None, *rates)

    def fused() -> None:
        step.add_(1)
        rates = {"lr": LR, "lr_decay": 0.0, "weight_decay": DECAY, "eps": 1e-10}
        torch._fused_adagrad_([param], [grad], [total], [step], maximize=False, **rates)

    return {"xds": ours, "torch fused": fused}


def sgd(numel: int) -> dict[str, Step]:
    """torch's fused SGD with momentum."""
    param, grad, momentum = tensors(numel, "param grad momentum")
    step = torch.full((), 2.0)

    def ours() -> None:
        step.add_(1)
        rates = (LR, MOMENTUM, 0.0, DECAY, False)
        torch.ops.xds.sgd_(param, grad, momentum, None, step, None, None, *rates)

    def fused() -> None:
        rates = {"lr": LR, "momentum": MOMENTUM, "dampening": 0.0, "weight_decay": DECAY}
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_([param], [grad], [momentum], **rates, **flags)

    return {"xds": ours, "torch fused": fused}


def lamb(numel: int) -> dict[str, Step]:
    """torch has no LAMB: its plain ops; 200 parameters of one length, the peer's pieces are parameters."""
    param, grad, mean, square, direction = tensors(numel, "param grad mean square direction")
    length = -(-numel // 200)
    bounds = torch.tensor([*range(0, numel, length), numel])
    norms = torch.empty(len(bounds) - 1, 2, dtype=torch.float64)
    step = torch.ones(())

    def ours() -> None:
        step.add_(1)
        moments = (BETA1, BETA2, 1e-6, DECAY, True)
        states = (param, grad, mean, square, direction, norms, bounds, step, None, None)
        torch.ops.xds.lamb_direction_(*states, *moments)
        root = norms.sqrt()
        rates = (LR * root[:, 0] / root[:, 1]).float()
        torch.ops.xds.lamb_apply_(param, direction, None, bounds, rates, None)

    def plain(p: Tensor, g: Tensor, m: Tensor, v: Tensor, buffer: Tensor) -> None:
        first, second = 1 - BETA1**step, 1 - BETA2**step
        m.lerp_(g, 1 - BETA1)
        v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        torch.sqrt(v, out=buffer).div_(second.sqrt()).add_(1e-6)
        torch.div(m, buffer, out=buffer).div_(first).add_(p, alpha=DECAY)
        ratio = torch.linalg.vector_norm(p) / torch.linalg.vector_norm(buffer)
        p.addcmul_(buffer, ratio, value=-LR)

    def composed() -> None:
        step.add_(1)
        for piece in pieces:
            plain(*piece, buffer[: len(piece[0])])

    pieces = list(zip(*(t.split(length) for t in (param, grad, mean, square)), strict=True))
    buffer = torch.empty(length)
    return {"xds": ours, "torch a parameter": composed}


CASES = {  # the contestants, the module of its ops, and the ops that need a native kernel
    "adamw": (adamw, ("adam",), ("adam_",)),
    "adamw_bf16": (adamw_bf16, ("adam", "square_sum"), ("adam_", "square_sum")),
    "lion": (lion, ("lion",), ("lion_",)),
    "adagrad": (adagrad, ("adagrad",), ("adagrad_",)),
    "sgd": (sgd, ("sgd",), ("sgd_",)),
    "lamb": (lamb, ("lamb",), ("lamb_direction_", "lamb_apply_")),
}


# ---- who is here -----------------------------------------------------------------------------


def native(case: str, numel: int) -> tuple[dict[str, Step], dict[str, Any]]:
    """xds and torch; without the native library, torch alone and the reason."""
    build, modules, ops = CASES[case]
    reason = ""
    try:
        from xds.ops.libraries import load

        for module in modules:
            importlib.import_module(f"xds.ops.kernels.{module}")
        load("cpu", require=True)
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if missing := [op for op in ops if not has(f"xds::{op}", "CPU")]:
            reason = f"no native {', '.join(missing)}"
    except Exception as error:  # the peers can be measured in any case
        reason = str(error).split("\n")[0]
    steps = build(numel)
    if reason:
        del steps["xds"]
    return steps, {"xds": reason, "torch": torch.__version__}


def deepspeed(case: str, numel: int) -> tuple[dict[str, Step], dict[str, Any]]:
    """DeepSpeedCPUAdam as DeepSpeed builds it: with its own JIT, -O3 -march=native -fopenmp."""
    from importlib.metadata import version

    from deepspeed.ops.adam import DeepSpeedCPUAdam

    start = time.perf_counter()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()
    build_seconds = time.perf_counter() - start
    param, grad, mean, square = tensors(numel, "param grad mean square")
    held = torch.nn.Parameter(param)
    held.grad = grad
    rates: dict[str, Any] = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
    optimizer = DeepSpeedCPUAdam([held], **rates, adamw_mode=True)
    optimizer.state[held] = {"step": 1, "exp_avg": mean, "exp_avg_sq": square}
    about = {"deepspeed": version("deepspeed"), "torch": torch.__version__}
    return {"deepspeed": optimizer.step}, about | {"build_seconds": round(build_seconds, 1)}


def main() -> None:
    """Run commands until stdin ends."""
    case, numel, threads, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a peer's logs go to stderr
    with torch.no_grad(), contextlib.suppress(BrokenPipeError):
        steps, about = (native if kind == "native" else deepspeed)(case, numel)
        answers.write(json.dumps({"contestants": list(steps), **about}) + "\n")
        for line in sys.stdin:
            step = steps[line.strip()]
            start = time.perf_counter()
            step()
            answers.write(f"{time.perf_counter() - start:.9f}\n")


if __name__ == "__main__":
    main()
