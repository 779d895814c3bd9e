"""Test helper: the tiny model in shard groups with replicas (MiCS), beside plain PyTorch in one process."""

from __future__ import annotations

from typing import Any

import torch
from models import build, micro_batch
from placed_ranks import placed
from runs import config, mean_over_ranks
from runs import plain as plain_steps
from torch import Tensor

import xds

RANKS, SAMPLES, STEPS, CLIP, LR = 4, 8, 3, 0.5, 3e-3


def config_of(
    stage: int, size: int, precision: str = "fp32", accumulation: int = 1, **zero: Any
) -> dict[str, Any]:
    """size: of a shard group; 0: no MiCS."""
    if size:
        zero["mics_shard_size"] = size
    params = {"lr": LR, "weight_decay": 0.1}
    samples = SAMPLES // RANKS
    return config(
        stage,
        precision,
        samples=samples,
        accumulation=accumulation,
        params=params,
        clip=CLIP,
        zero=zero,
    )


def plain(feature: str, accumulation: int, steps: int = STEPS) -> dict[str, Any]:
    """Loss, norm and final values of plain PyTorch in fp32, on the batches of all ranks."""
    model = build("plain" if feature.startswith("compiled") else feature)

    def parts(step: int) -> list[Any]:
        batches = [micro_batch(step, at, SAMPLES) for at in range(accumulation)]
        return [(part, rank) for tokens in batches for rank, part in enumerate(tokens.chunk(RANKS))]

    found = plain_steps(model, steps, parts, clip=CLIP, zeros=True, lr=LR, weight_decay=0.1)
    losses, norms = (list(each) for each in zip(*found, strict=True))
    return {"losses": losses, "norms": norms, "params": values_of(model)}


def values_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("_orig_mod."): param.detach().float().clone()
        for name, param in model.named_parameters()
    }


def a_step(engine: Any, step: int, accumulation: int = 1) -> float:
    """Train this rank's part of the batch; the mean loss of all ranks."""
    total, rank = 0.0, engine.global_rank
    for micro_step in range(accumulation):
        part = micro_batch(step, micro_step, SAMPLES).chunk(RANKS)[rank]
        loss = engine(part, rank)
        engine.backward(loss)
        engine.step()
        total += loss.item() / accumulation
    return mean_over_ranks(total)


def train(
    given: dict[str, Any], feature: str = "plain", steps: int = STEPS, places: Any = None
) -> dict[str, Any]:
    """The same on this rank of an engine, and the bytes it sent in the last step. places: of `placed`."""
    with placed(places or [0] * RANKS):
        engine = xds.initialize(build(feature), given)
    losses, norms = [], []
    before: dict[str, int] = {}
    opened = engine._parts.opened
    for group in opened:
        group.set_hosts(places or [0] * RANKS)
    for step in range(steps):
        before, across = engine.bytes_sent(), _across(opened)
        losses.append(a_step(engine, step, given["gradient_accumulation_steps"]))
        norms.append(engine.get_global_grad_norm())
    sent = {kind: size - before.get(kind, 0) for kind, size in engine.bytes_sent().items()}
    sent_across = {kind: size - across.get(kind, 0) for kind, size in _across(opened).items()}
    held = engine.memory_plan()
    grads = engine._sharded.reduction.order
    sizes = [(flat.layout.numel, flat.layout.shard_numel) for flat in grads]
    whole = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "params": values_of(engine.module),
        "masters": whole,
        "sent": sent,
        "across": sent_across,
        "held": held,
        "sizes": sizes,
    }


def _across(opened: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in opened:
        for kind, size in group.sent_across_bytes.items():
            found[kind] = found.get(kind, 0) + size
    return found


def train_each(*configs: Any) -> list[Any]:
    return [train(*(one if isinstance(one, tuple) else (one,))) for one in configs]


def same_bits(one: Any, two: Any) -> None:
    """Losses, norms and values of two runs."""
    assert one["losses"] == two["losses"] and one["norms"] == two["norms"]
    for key in ("params", "masters"):
        assert one[key].keys() == two[key].keys()
        for name, value in one[key].items():
            assert torch.equal(value, two[key][name]), name


def check_near(found: Any, wanted: Any, tolerance: float) -> None:
    for key in ("losses", "norms"):
        for one, two in zip(found[key], wanted[key], strict=True):
            assert abs(one - two) <= tolerance * abs(two), (key, one, two)
    for name, value in wanted["params"].items():
        scale = value.norm().clamp(min=1e-3)
        assert (found["params"][name] - value).norm() <= tolerance * scale, name
