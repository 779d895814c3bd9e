"""Configs and training steps that tests share.

A test that needs another config changes this one: `config(3, "bf16", clip=1.0, zero={"overlap_comm": True})`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

PRECISIONS: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def config(
    stage: int = 0,
    precision: str = "fp32",
    *,
    samples: int = 2,
    accumulation: int = 1,
    optimizer: str = "AdamW",
    params: Mapping[str, Any] | None = None,
    clip: float | None = None,
    zero: Mapping[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """A config whose units are as small as the modules, so that a tiny model has several.

    `samples`: of a micro-batch and rank. `params`: of the optimizer, beside a rate of 0.01. `zero`: more keys
    of `zero_optimization`. `sections`: further keys of the config; they replace those above.
    """
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, **(params or {})}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
            **(zero or {}),
        },
        **PRECISIONS[precision],
        **sections,
    }
    if clip is not None:
        found["gradient_clipping"] = clip
    return found


class Step(NamedTuple):
    """What one optimizer step showed. `loss`: the mean of its micro-batches on this rank."""

    loss: float
    norm: float


def train(
    engine: Any,
    steps: Iterable[int] | int,
    batch: Callable[[int, int], Any],
    loss_of: Callable[[Any], Tensor] = lambda output: output,
) -> list[Step]:
    """Train the numbers of steps in `steps`; `batch(step, micro_step)` is this rank's input of the model."""
    found = []
    for step in range(steps) if isinstance(steps, int) else steps:
        losses = []
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = loss_of(_call(engine, batch(step, micro_step)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(Step(sum(losses) / len(losses), engine.get_global_grad_norm()))
    return found


def plain(
    model: nn.Module,
    steps: int,
    parts: Callable[[int], Sequence[Any]],
    loss_of: Callable[[Any], Tensor] = lambda output: output,
    *,
    optimizer: str = "AdamW",
    clip: float | None = None,
    zeros: bool = False,
    **params: Any,
) -> list[Step]:
    """The same in plain PyTorch in one process.

    `parts(step)`: the inputs of all ranks and micro-batches of a step. `zeros`: parameters that no part uses
    get zeros, as in an engine. `params`: of the optimizer, beside a rate of 0.01.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    updates = getattr(torch.optim, optimizer)(trained, **{"lr": 1e-2, **params})
    found = []
    for step in range(steps):
        for param in trained if zeros else ():
            param.grad = torch.zeros_like(param)
        inputs, total = parts(step), 0.0
        for given in inputs:
            loss = loss_of(_call(model, given))
            (loss / len(inputs)).backward()
            total += loss.item() / len(inputs)
        norm = nn.utils.clip_grad_norm_(trained, clip or float("inf"))
        updates.step()
        updates.zero_grad()
        found.append(Step(total, norm.item()))
    return found


def _call(model: Any, given: Any) -> Any:
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, tuple) else model(given)


def of_rank(whole: Tensor) -> Tensor:
    """This rank's share of the samples of a batch of all ranks."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def mean_over_ranks(value: float | Tensor) -> float:
    """Collective. The mean of a number of each rank, such as its loss."""
    total = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def differing(
    tried: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 0
) -> list[str]:
    """Names of the tensors that differ by more than `atol`, and those that one side lacks."""
    return [
        name
        for name in sorted({*tried, *expected})
        if name not in tried
        or name not in expected
        or tried[name].shape != expected[name].shape
        or not torch.allclose(tried[name].double(), expected[name].double(), rtol=0, atol=atol)
    ]
