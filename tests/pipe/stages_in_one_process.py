"""Test helper: runs all stages of a cut model in one process, one after another, and hands flows over."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xds.pipe.cut.cutting import cut_model
from xds.pipe.cut.part import Flow, Part


@dataclass(frozen=True)
class Loop:
    """A placement: stage s is on rank s % num_ranks; with `is_v` the second half comes back."""

    num_ranks: int
    chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        rank = stage % self.num_ranks
        return self.num_ranks - 1 - rank if self.is_v and stage >= self.num_ranks else rank

    def chunk_of(self, stage: int) -> int:
        return stage // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def cut_all(model: nn.Module, blocks_of: Any, placement: Loop, **options: Any) -> list[Part]:
    """The part of every rank, each from a copy of `model`."""
    parts = []
    for rank in range(placement.num_ranks):
        copied = copy.deepcopy(model)
        parts.append(cut_model(copied, blocks_of(copied), placement, rank, **options))
    return parts


def sent(flow: Flow) -> Flow:
    """What arrives: copies, which are leaves of the receiver's graph."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in flow.leaves]
    return Flow(tuple(leaves), flow.spec)


def loss_of(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result[0] if isinstance(result, tuple) else result["loss"]


def train(parts: list[Part], placement: Loop, batches: list[Any]) -> list[float]:
    """Forward of all micro-batches, then backward of all; gradients are summed. Returns the losses."""
    runs: list[list[tuple[Flow | None, Any]]] = []
    for number, batch in enumerate(batches):
        arrived, stages = None, []
        for stage in range(placement.num_stages):
            output = parts[placement.rank_of(stage)].run(stage, batch, arrived, number)
            stages.append((arrived, output))
            arrived = sent(output) if isinstance(output, Flow) else None
        runs.append(stages)
    losses = []
    for number, stages in enumerate(runs):
        grads: list[Tensor | None] = []
        for stage in reversed(range(placement.num_stages)):
            part, (arrived, output) = parts[placement.rank_of(stage)], stages[stage]
            with part.recomputing(stage, number):
                if isinstance(output, Flow):
                    pairs = zip(output.leaves, grads, strict=True)
                    used = [(x, g) for x, g in pairs if x.requires_grad and g is not None]
                    torch.autograd.backward([x for x, _ in used], [g for _, g in used])
                else:
                    loss = loss_of(part.result(output, batches[number]))
                    losses.append(loss.item())
                    loss.backward()
            part.release(stage, number)
            grads = [leaf.grad for leaf in arrived.leaves] if arrived is not None else []
    return losses


def gradients(parts: list[Part]) -> dict[str, Tensor]:
    """The gradient of each parameter by its name in the whole model, summed over ranks that share it."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for param in part.module.parameters():
            if param.grad is not None:
                name = part.names[id(param)]
                found[name] = found[name] + param.grad if name in found else param.grad
    return found


def plain_training(
    model: nn.Module, call: Any, batches: list[Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients without a pipeline."""
    losses = []
    for batch in batches:
        loss = loss_of(call(model, batch))
        losses.append(loss.item())
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, grads
