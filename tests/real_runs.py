"""Test helper: five steps of a real model, through an engine and in one process of plain PyTorch.

A `Plan` defines how to build a model, its batches and its loss. A run returns the loss averaged over ranks, the
gradient norm, and the parameters after the last step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_models import batch, build, part_of
from torch import Tensor, nn

import xds

STEPS, SAMPLES, CLIP, LR, DECAY = 5, 4, 1.0, 3e-3, 0.1
WORLD_SIZE = 2
STAGES = (0, 1, 2, 3)
KERNELS = "bf16, kernels"  # the update by native ops: rounded elsewhere than torch's, in the last digit of fp32
EVERY_CASE = (
    *((stage, precision) for stage in STAGES for precision in ("fp32", "bf16")),
    (3, KERNELS),  # test_matrix.py compares the stages with kernels
)
FP32_ENDS = ((0, "fp32"), (3, "fp32"))  # what only stage 3 can break
# relative, of losses and gradient norms, in each of five steps; seen: 4e-7 in fp32, 3e-4 in bf16
FP32_TOLERANCE = 5e-6
BF16_TOLERANCE = 2e-3  # against plain PyTorch in bf16: a parameter may round the other way
KERNELS_TOLERANCE = (
    2**-7
)  # a parameter that rounds the other way shows in the last bit of a bf16 loss
BF16_LOSS_TOLERANCE = 2e-2  # against plain fp32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, KERNELS: torch.bfloat16}


def _loss(model: Any, inputs: Any) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


@dataclass(frozen=True)
class Plan:
    """name, variant: what to build. config, zero: more of the engine's. loss: of an engine or a plain model.

    plain_inputs: what plain PyTorch gets besides. by_parts: plain PyTorch also takes the ranks' parts one by
    one, where the loss of a batch is not the mean of its parts' losses.
    """

    name: str
    variant: str = "plain"
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Tensor] = _loss
    plain_inputs: dict[str, Any] = field(default_factory=dict)
    by_parts: bool = False
    cases: tuple[tuple[int, str], ...] = EVERY_CASE


def config_of(plan: Plan, stage: int, precision: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // WORLD_SIZE,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
            **plan.zero,
        },
        **plan.config,
    }
    if precision != "fp32":
        config["bf16"] = {"enabled": True}
        config["ops"] = {"native": precision == KERNELS}
    return config


def engine_run(plan: Plan, stage: int, precision: str) -> dict[str, Any]:
    """On every rank: the same results on all of them."""
    model = build(plan.name, plan.variant)
    engine = xds.initialize(model, config_of(plan, stage, precision))
    losses, norms = [], []
    for step in range(STEPS):
        inputs = batch(plan.name, step, SAMPLES, DTYPES[precision])
        loss = plan.loss(engine, part_of(inputs, dist.get_rank(), WORLD_SIZE))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD_SIZE)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return {"losses": losses, "norms": norms, "params": values_of(model)}


def engine_runs(plans: list[Plan]) -> list[dict[tuple[int, str], Any]]:
    """Every case of every plan, in one pair of processes: loading transformers takes seconds."""
    logging.getLogger("xds").setLevel(logging.ERROR)
    found: list[dict[tuple[int, str], Any]] = [{} for _ in plans]
    for with_kernels in (False, True):  # a process that has loaded them keeps them
        for plan, runs in zip(plans, found, strict=True):
            for stage, precision in plan.cases:
                if (precision == KERNELS) == with_kernels:
                    runs[stage, precision] = engine_run(plan, stage, precision)
    return found


def plain_run(plan: Plan, precision: str, *, rounds_sums: bool = False) -> dict[str, Any]:
    """`_plain_run` on one thread, as the ranks: more would sum in another order, and bf16 shows it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _plain_run(plan, precision, rounds_sums=rounds_sums)
    finally:
        torch.set_num_threads(threads)


def _plain_run(plan: Plan, precision: str, *, rounds_sums: bool) -> dict[str, Any]:
    """One process, torch.optim.AdamW, the batches of all ranks.

    In fp32 the whole batch at once, unless `plan.by_parts`. In bf16 parameters and gradients are bf16, each
    rank's part gives its own; their sum and what the optimizer updates are fp32. With `rounds_sums` the sum
    is rounded to bf16, as stage 0 sends it.
    """
    model = build(plan.name, plan.variant)
    dtype = DTYPES[precision]
    for param in model.parameters():
        param.data = param.data.to(dtype)
    params = [param for param in model.parameters() if param.requires_grad]
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=DECAY)
    parts = WORLD_SIZE if precision != "fp32" or plan.by_parts else 1
    losses, norms = [], []
    for step in range(STEPS):
        inputs = batch(plan.name, step, SAMPLES, dtype)
        total = 0.0
        sums = [torch.zeros_like(master) for master in masters]
        for part in range(parts):
            loss = plan.loss(model, part_of(inputs, part, parts) | plan.plain_inputs)
            loss.backward()
            total += loss.item() / parts
            add_gradients(sums, params)
        for master, summed in zip(masters, sums, strict=True):
            master.grad = (summed.to(dtype).float() if rounds_sums else summed) / parts
        norms.append(nn.utils.clip_grad_norm_(masters, CLIP).item())
        optimizer.step()
        for master, param in zip(masters, params, strict=True):
            param.data.copy_(master.data)
        losses.append(total)
    return {"losses": losses, "norms": norms, "params": values_of(model)}


def add_gradients(sums: list[Tensor], params: list[nn.Parameter]) -> None:
    for summed, param in zip(sums, params, strict=True):
        if param.grad is not None:
            summed += param.grad
            param.grad = None


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().float().clone() for name, param in model.named_parameters()}


def check_fp32(runs: dict[tuple[int, str], Any], plain: dict[str, Any]) -> None:
    """Near plain PyTorch, and the stages bit-equal to one another."""
    check_curves(runs[0, "fp32"], plain, FP32_TOLERANCE)
    for (_, precision), run in runs.items():
        if precision == "fp32":
            check_same(runs[0, "fp32"], run)


def check_bf16(runs: dict[tuple[int, str], Any], plan: Plan, fp32: dict[str, Any]) -> None:
    """Near plain bf16 with fp32 masters, nearer fp32 than 2 %, stages 1 to 3 bit-equal to one another."""
    check_curves(runs[0, "bf16"], plain_run(plan, "bf16", rounds_sums=True), BF16_TOLERANCE)
    check_curves(runs[1, "bf16"], plain_run(plan, "bf16"), BF16_TOLERANCE)
    for stage in (2, 3):
        check_same(runs[1, "bf16"], runs[stage, "bf16"])
    check_curves(runs[3, KERNELS], plain_run(plan, "bf16"), KERNELS_TOLERANCE)
    for stage in STAGES:
        got = runs[stage, "bf16"]["losses"]
        assert got == pytest.approx(fp32["losses"], rel=BF16_LOSS_TOLERANCE), stage


def check_curves(got: dict[str, Any], plain: dict[str, Any], tolerance: float) -> None:
    assert got["losses"] == pytest.approx(plain["losses"], rel=tolerance)
    assert got["norms"] == pytest.approx(plain["norms"], rel=tolerance)


def check_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["losses"] == two["losses"]
    assert one["norms"] == two["norms"]
    for name, value in one["params"].items():
        assert torch.equal(value, two["params"][name]), name
