"""Test helper: calls of a pipeline's engine beside train_batch, on each rank of warm ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import xds
from xds.pipe import LayerSpec, PipelineModule

WIDTH = 6


def config(schedule: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"stages": 2, "schedule": schedule},
    }


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def layers(count: int = 4) -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)]


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(2, WIDTH, generator=generator), "y": torch.zeros(2, WIDTH)}
        for _ in range(count)
    ]


def pair(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


def calls(schedule: str) -> dict[str, Any]:
    """What the calls return on this rank. Only the first stage passes an iterator."""
    model = PipelineModule(layers(), loss_fn=squared, seed_layers=True)
    engine = xds.initialize(model, config(schedule))
    engine.set_batch_fn(pair)
    reads = engine.stage_id == 0

    def some(count: int) -> Any:
        return iter(batches(count)) if reads else None

    loss, outputs = engine.eval_batch(some(3), 3, return_logits=True)
    nothing, again = engine.eval_batch(some(3), 3, return_logits=True, compute_loss=False)
    found = {
        "place": (engine.stage_id, engine.num_stages),
        "ends": (engine.is_first_stage(), engine.is_last_stage()),
        "loss": loss.item(),
        "outputs": outputs,
        "same": nothing is None and str(again) == str(outputs),
        "each": engine.eval_batch(some(3), 3, reduce_output=None),
        "trained": engine.train_batch(some(4)).item(),
    }
    engine.destroy()
    return found


def plain() -> tuple[list[Tensor], list[Tensor]]:
    """Losses and outputs of the four micro-batches in one process."""
    model = PipelineModule(layers(), num_stages=1, loss_fn=squared, seed_layers=True)
    with torch.no_grad():
        outputs = [model(batch["x"]) for batch in batches(4)]
    return [squared(out, torch.zeros(2, WIDTH)) for out in outputs], outputs
