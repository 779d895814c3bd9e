"""What every part has: the device, records for the table, and small trainings with their plain PyTorch twin.

The variables are set by main.py. Without them a part runs on the GPU, and prints its records.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]
from gpt import GPT, Shape  # noqa: E402  (tied embeddings, fused attention)

DEVICE = os.environ.get("XDS_BENCH_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
IS_TINY = os.environ.get("XDS_BENCH_TINY") == "1"
IS_REHEARSED = IS_TINY and not IS_CUDA  # --dry-run: one case of each kind
IS_NATIVE = os.environ.get("XDS_BENCH_NATIVE", "1") == "1"  # 0: the kernels did not load
RECORDS = os.environ.get("XDS_BENCH_RECORDS", "")
OUT = os.environ.get("XDS_BENCH_OUT", ".")
END = float(os.environ.get("XDS_BENCH_END", time.time() + 600))


def left() -> float:
    """Seconds until this part is ended."""
    return END - time.time()


def synchronize() -> None:
    """Wait for the device."""
    if IS_CUDA:
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes of tensors on the device; 0 on a CPU."""
    return int(torch.cuda.memory_allocated()) if IS_CUDA else 0


def release() -> None:
    """Return what nobody holds to the device."""
    gc.collect()
    if IS_CUDA:
        torch.cuda.empty_cache()


# ---- records ---------------------------------------------------------------------------------


def record(**entry: Any) -> None:
    """Keep one line for the table and the JSON. It survives what happens to this process later."""
    line = json.dumps(entry)
    if not RECORDS:
        print(line, flush=True)
        return
    with open(RECORDS, "a") as file:
        file.write(line + "\n")


def figure(table: str, row: str, column: str, text: str, **samples: Any) -> None:
    """A cell of the table."""
    record(table=table, row=row, column=column, text=text, **samples)


@contextlib.contextmanager
def case(
    name: str, *, keeps_right: bool = True, ends_with: int = 0
) -> Iterator[Callable[..., None]]:
    """A case that is right or wrong: call what this gives with that and a text. An error is a wrong case.

    distance: how far the result is from the expected one; the table shows the largest.
    keeps_right: False: only a wrong case is kept, as on ranks after the first.
    ends_with: the code with which an error ends this process; 0: it goes on.
    """
    print(f"# {name}", flush=True)  # a process that dies here is said to have died in this case
    start, found = time.perf_counter(), {"ok": False, "text": "no result"}

    def result(ok: bool, text: str = "", distance: float | None = None) -> None:
        found.update(ok=bool(ok), text=text, distance=distance)

    try:
        yield result
    except Exception as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)[-2:]
        where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
        first = (str(error).strip() or "no message").splitlines()[0]
        found = {"ok": False, "text": f"{type(error).__name__}: {first[:220]} ({where})"}
        found["raised"] = True
    if keeps_right or not found["ok"]:
        record(case=name, seconds=round(time.perf_counter() - start, 2), **found)
    if found.get("raised") and ends_with:
        os._exit(ends_with)
    release()


# ---- small trainings -------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = Shape(2, 32, 2, 16, 64) if IS_TINY else Shape(4, 256, 4, 128, 512)
SEQUENCES = 8  # of a micro-batch
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-3, (0.9, 0.95), weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, 1e-3, weight_decay=0.01),
    "SGD": lambda params: torch.optim.SGD(params, 1e-2, 0.9, weight_decay=0.01, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-2),
}
# relative distances of losses, and of norms and parameters
TOLERANCE = {"fp32": (2e-5, 1e-4), "bf16": (2e-2, 1e-1), "fp16": (2e-2, 1e-1)}
TOLERANCE |= {"compiled fp32": (1e-3, 2e-2), "compiled bf16": (2e-2, 1e-1)}


@dataclass(frozen=True)
class Run:
    """Loss and norm of each step, and the parameters at the end, fp32 on the host."""

    losses: list[float]
    norms: list[float]
    params: list[Tensor]


class SmallGPT(GPT):
    """With the output layer as a module, which pipelines place; it shares the weight of the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T + 1] token numbers to the mean loss, [] fp32."""
        x = self.tokens(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def model(seed: int = 1, shape: Shape = SMALL) -> SmallGPT:
    """The small GPT, fp32 on the host: the same numbers for every device."""
    torch.manual_seed(seed)
    return SmallGPT(shape)


def batches(count: int) -> list[Tensor]:
    """Tokens of `count` micro-batches: four sequences, with every tenth token replaced."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randint(SMALL.vocabulary, (4, SMALL.context + 1), generator=generator)
    found = []
    for _ in range(count):
        chosen = whole[torch.randint(4, (SEQUENCES,), generator=generator)]
        noise = torch.randint(SMALL.vocabulary, chosen.shape, generator=generator)
        is_noise = torch.rand(chosen.shape, generator=generator) < 0.1
        found.append(torch.where(is_noise, noise, chosen))
    return found


@functools.cache
def plain(precision: str, accumulation: int = 1, optimizer: str = "AdamW", steps: int = 6) -> Run:
    """The same training in plain PyTorch: a model in `precision`, and fp32 masters beside it."""
    narrow = model().to(DEVICE, DTYPES[precision])
    params = list(narrow.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in model().to(DEVICE).parameters()]
    chosen = OPTIMIZERS[optimizer](masters)
    scale = 2.0**8 if precision == "fp16" else 1.0
    data, losses, norms = batches(steps * accumulation), [], []
    for step in range(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        total = 0.0
        for tokens in data[step * accumulation : (step + 1) * accumulation]:
            loss = narrow(tokens.to(DEVICE))
            (loss * (scale / accumulation)).backward()
            for param, master in zip(params, masters, strict=True):
                master.grad += param.grad.float() / scale
                param.grad = None
            total += float(loss.detach()) / accumulation
        norms.append(float(nn.utils.clip_grad_norm_(masters, 1.0)))
        chosen.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        losses.append(total)
    return Run(losses, norms, [master.detach().cpu() for master in masters])


def config(
    precision: str, stage: int, accumulation: int = 1, *, zero: Any = None, **more: Any
) -> dict[str, Any]:
    """A config of the engine that trains as `plain` does; `more` replaces sections."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, **(zero or {})},
    }
    if precision == "bf16":
        found["bf16"] = {"enabled": True}
    if precision == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if not IS_NATIVE:
        found["ops"] = {"native": False}
    return found | more


def train(engine: Any, accumulation: int = 1, steps: int = 6, first: int = 0) -> Run:
    """Train an engine on the batches of `plain`, from step `first` on."""
    data, losses, norms = batches((first + steps) * accumulation), [], []
    for step in range(first, first + steps):
        total = 0.0
        for tokens in data[step * accumulation : (step + 1) * accumulation]:
            loss = engine(tokens.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        losses.append(total)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return Run(losses, norms, masters_of(engine))


def masters_of(engine: Any) -> list[Tensor]:
    """The whole fp32 parameters, on the host. A collective."""
    import xds

    found = [xds.zero.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return [param.detach().float().cpu() for param in found]


def trained(settings: dict[str, Any], accumulation: int = 1) -> Run:
    """Six steps of a new engine."""
    import xds

    engine = xds.initialize(model(), settings)
    try:
        return train(engine, accumulation)
    finally:
        engine.destroy()


def distance(found: list[float], wanted: list[float]) -> float:
    """The largest relative distance of two lists."""
    gaps = (abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, wanted, strict=True))
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def param_distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest distance of a parameter over its norm; values below 6e-3 count as that."""
    gaps = [
        (a - b).norm() / (b.norm() + 6e-3 * b.numel() ** 0.5)
        for a, b in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(gaps).max())


def compare(result: Callable[..., None], precision: str, found: Run, wanted: Run) -> None:
    """The result of a case: how far a training is from the wanted one."""
    of_loss, of_rest = TOLERANCE[precision]
    loss, norm = distance(found.losses, wanted.losses), distance(found.norms, wanted.norms)
    param = param_distance(found.params, wanted.params) if found.params else 0.0
    is_near = loss < of_loss and norm < of_rest and param < of_rest
    text = f"loss {loss:.1e} norm {norm:.1e} parameters {param:.1e}"
    if not is_near:
        text += f"; losses {_short(found.losses)}, plain {_short(wanted.losses)}"
    result(is_near, text, loss)


def _short(numbers: list[float]) -> str:
    return " ".join(f"{number:.4g}" for number in numbers)
