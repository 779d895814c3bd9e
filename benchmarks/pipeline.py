"""Compare the time of a training step in two pipeline stages with torch's 1F1B and with DeepSpeed.

    python benchmarks/pipeline.py [--only PATTERN] [--rounds N] [--quick]

Contestants of one comparison run in the same two processes and alternate. A row is the median of the ratios
of neighbouring turns. Their losses must agree; otherwise the row is invalid.

    layers   embedding, block 0 ... 3 │ block 4 ... 7, head      the same cut for all

All use AdamW with the same settings and clip the global gradient norm at 1.0. Other libraries run as released.
"""

from __future__ import annotations

import fnmatch
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "step_time")]
from harness import (  # noqa: E402
    Plan,
    RankFailed,
    Row,
    Skip,
    Watch,
    alternate,
    comparison_parser,
    finish,
    print_rows,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)
from model import GPT, make_batches, make_model  # noqa: E402

FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 1e-2  # relative, of the last turn's loss
COMPUTE = "compute"
COUNT = 8  # micro-batches


@dataclass(frozen=True)
class Comparison:
    """Two contestants that alternate."""

    ours: str
    peer: str
    must: float
    bf16: bool = False
    size: str = "40M"
    plan: Plan = field(default_factory=lambda: Plan(rounds=9, block=1))

    @property
    def name(self) -> str:
        """Of the row."""
        return f"step, {self.size} {'bf16' if self.bf16 else 'fp32'}: {self.ours} / {self.peer}"


COMPARISONS = [
    Comparison(*contest, bf16=bf16)
    for bf16 in (False, True)
    for contest in (("xds-0", "torch", 1.02), ("xds-1", "deepspeed-1", 0.90))
]


def time_contestants(_: int, __: int, comparison: Comparison) -> dict[str, Any]:
    """One rank's part: build all contestants, alternate them."""
    plan = comparison.plan
    num_steps = plan.warmup + plan.rounds * plan.block
    windows = make_batches(comparison.size, 0, num_steps * COUNT)
    batches = [(window[:, :-1], window[:, 1:]) for window in windows]
    steps: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    busy: dict[str, list[float]] = {}
    for name in (comparison.peer, COMPUTE, comparison.ours):
        try:
            step = build(name, comparison.size, COUNT, comparison.bf16)
        except Skip as reason:
            skipped[name] = str(reason)
            continue
        busy[name] = []
        steps[name] = partial(_counted_step, step, batches, busy[name])
    seconds, losses = alternate(steps, plan)
    cpu = {name: found[plan.warmup :] for name, found in busy.items()}
    return {"seconds": seconds, "losses": losses, "skipped": skipped, "cpu": cpu}


def _counted_step(step: Any, batches: list[Any], busy: list[float], index: int) -> Any:
    """Run step `index`, and add the seconds of processor time that it took to `busy`."""
    start = time.process_time()
    loss = step(batches[index * COUNT :][:COUNT])
    busy.append(time.process_time() - start)
    return loss


def row_of(comparison: Comparison) -> Row:
    """Run a comparison."""
    row = Row(comparison.name, must=comparison.must)
    ours, peer = comparison.ours, comparison.peer
    try:
        with Watch() as watch:
            ranks = run_ranks(time_contestants, 2, comparison)
    except RankFailed as error:
        print(error, flush=True)
        row.void = f"FAIL ({str(error).strip().splitlines()[-1]})"
        return row
    row.others_busy = watch.others
    seconds = slowest([rank["seconds"] for rank in ranks])
    if peer not in seconds:
        row.void = f"SKIP ({ranks[0]['skipped'][peer]})"
        return row
    measured = ratio_row(row.name, seconds[ours], seconds[peer])
    row.value, row.low, row.high = measured.value, measured.low, measured.high
    row.samples = {name: seconds[name] for name in (ours, peer, COMPUTE)}
    compute = ratio_row("", seconds[COMPUTE], seconds[peer]).value
    cpu = slowest([rank["cpu"] for rank in ranks])
    row.samples |= {f"{name}, processor": cpu[name] for name in (ours, peer, COMPUTE)}
    processor = statistics.median(cpu[ours]) / statistics.median(cpu[peer])
    row.note = (
        f"{_ms(seconds[ours])} / {_ms(seconds[peer])} ms; compute alone {compute:.3f}x; processor time of the "
        f"busier rank {processor:.3f}x ({_ms(cpu[ours])} / {_ms(cpu[peer])} ms)"
    )
    losses = ranks[-1]["losses"]  # of the last stage
    block = comparison.plan.block
    a, b = (statistics.fmean(losses[name][-block:]) for name in (ours, peer))
    if not abs(a - b) <= (BF16_TOLERANCE if comparison.bf16 else FP32_TOLERANCE) * abs(b):
        row.void = f"VOID (loss {a:.6f}, {peer} {b:.6f})"
    return row


def _ms(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e3:.1f}"


# ---- the contestants: each builds its part of one GPT and returns a step function ----------------

Batch = tuple[Tensor, Tensor]  # bytes [1, tokens], the bytes after them [1, tokens]
Step = Callable[[Sequence[Batch]], Tensor]

STAGES = 2
CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Embedding(nn.Module):
    """The tokens' and positions' embeddings of a GPT."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.token, self.position = gpt.token, gpt.position

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, tokens, width]"""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """The last norm and the logits of a GPT."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, vocabulary] fp32"""
        return self.head(self.norm(x)).float()


def layers_of(size: str) -> list[nn.Module]:
    """The GPT `size` of benchmarks/step_time as a list; the same weights at each call."""
    gpt = make_model(size)
    assert isinstance(gpt, GPT)
    return [Embedding(gpt), *gpt.blocks, Head(gpt)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(name: str, size: str, count: int, bf16: bool) -> Step:
    """The contestant called `name`, ready for steps of `count` micro-batches.

    Raises:
        Skip: it cannot run here.
    """
    kind, _, stage = name.partition("-")
    layers = layers_of(size)
    if kind == "torch":
        return _torch(layers, count, bf16)
    if kind == "deepspeed":
        return _deepspeed(layers, count, bf16, int(stage))
    if kind == "compute":
        return _compute(layers, bf16)
    return _xds(layers, count, bf16, int(stage))


def _own(layers: list[nn.Module]) -> nn.Sequential:
    """This rank's half."""
    half = len(layers) // STAGES
    return nn.Sequential(*layers[dist.get_rank() * half :][:half])


def _json(count: int, bf16: bool, stage: int) -> dict[str, Any]:
    """The part of the config that xds and DeepSpeed share."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW | {"betas": list(ADAMW["betas"])}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
    }


def _xds(layers: list[nn.Module], count: int, bf16: bool, stage: int) -> Step:
    import xds
    from xds.pipe.module import PipelineModule

    model = PipelineModule(layers, loss_fn=loss_of, partition_method="uniform")
    engine = xds.initialize(model, _json(count, bf16, stage) | {"pipeline": {"stages": STAGES}})
    return lambda batches: engine.train_batch(iter(batches))  # type: ignore[no-any-return]


def _deepspeed(layers: list[nn.Module], count: int, bf16: bool, stage: int) -> Step:
    try:
        import deepspeed
        from deepspeed.pipe import PipelineModule
    except ImportError as error:
        raise Skip("deepspeed is not installed (step_time/requirements.txt)") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    model = PipelineModule(layers, num_stages=STAGES, loss_fn=loss_of, partition_method="uniform")
    config = _json(count, bf16, stage) | {"steps_per_print": 10**9}
    config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}  # its own is not compiled
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters()], config=config
    )
    return lambda batches: engine.train_batch(iter(batches))  # type: ignore[no-any-return]


def _torch(layers: list[nn.Module], count: int, autocast: bool) -> Step:
    """torch's 1F1B. The loss is known to the last stage only."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    own, rank = _own(layers), dist.get_rank()
    parameters = list(own.parameters())
    stage = PipelineStage(own, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

    def step(batches: Sequence[Batch]) -> Tensor:
        losses: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if rank == 0:
                schedule.step(torch.cat([tokens for tokens, _ in batches]))
            else:
                targets = torch.cat([targets for _, targets in batches])
                schedule.step(target=targets, losses=losses, return_outputs=False)
        norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square)  # the norm spans the stages
        nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def _compute(layers: list[nn.Module], bf16: bool) -> Step:
    """Forward and backward of this rank's half alone: no messages, no waiting and no update."""
    own, is_first = _own(layers), dist.get_rank() == 0
    own = own.bfloat16() if bf16 else own
    width = layers[1].norm_1.weight.numel()  # type: ignore[union-attr, operator]
    dtype = torch.bfloat16 if bf16 else torch.float32

    def step(batches: Sequence[Batch]) -> Tensor:
        loss = torch.zeros(())
        for tokens, targets in batches:
            if is_first:
                hidden = own(tokens)
                hidden.backward(torch.ones_like(hidden))
            else:
                arrived = torch.ones(*tokens.shape, width, dtype=dtype, requires_grad=True)
                loss = loss_of(own(arrived), targets)
                loss.backward()
        own.zero_grad()
        return loss

    return step


def main() -> int:
    """Run the chosen comparisons; 1 if a row misses its target."""
    parser = comparison_parser(__doc__ or "", example="*torch", quick="11M, torch, 3 rounds")
    options = parser.parse_args()
    rows = []
    for comparison in COMPARISONS:
        chosen = comparison
        if options.quick:
            if comparison.bf16 or comparison.peer != "torch":
                continue
            chosen = replace(comparison, size="11M", plan=Plan(rounds=3, block=1))
        if options.rounds:
            chosen = replace(chosen, plan=replace(chosen.plan, rounds=options.rounds))
        if fnmatch.fnmatch(chosen.name, options.only):
            wait_until_quiet(options.patience)
            rows.append(row_of(chosen))
            print_rows(rows[-1:])
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
