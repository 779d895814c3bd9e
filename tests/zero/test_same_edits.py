"""Writes to whole parameters that only some ranks made are refused on all ranks, before they are mixed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds

WRITTEN = r"^0\.weight was written on some ranks only: rank 0 and rank 1 have different values; "
OLD, OWN = WRITTEN + "it has its old values again", WRITTEN + "each rank still has its own values"


def engine_of(stage: int, precision: str = "fp32") -> xds.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    zero = {"stage3_param_persistence_threshold": 10**6}  # weights stay gathered
    settings = config(stage, precision, optimizer="SGD", params={"lr": 0.1}, zero=zero)
    return xds.initialize(model, settings)


def step(engine: xds.Engine) -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(engine.global_rank))
    engine.backward(engine(x.to(engine.module[0].weight.dtype)).float().square().mean())
    engine.step()


def fill(weight: Tensor) -> None:
    weight.fill_(2.0)


def assign(weight: Tensor) -> None:
    weight.data = torch.full_like(weight, 2.0)


def one_element(weight: Tensor) -> None:
    weight[-1, -1] = 2.0


def many_times(weight: Tensor) -> None:
    for _ in range(128):
        weight.fill_(2.0)


def values(engine: xds.Engine) -> Tensor:
    return engine.full_state_dict(rank0_only=False)["0.weight"]


def on_one_rank(stage: int, edit: Callable[[Tensor], None], precision: str, of: int) -> None:
    engine = engine_of(stage, precision)
    weight = engine.module[0].weight
    step(engine)
    before = values(engine)
    with torch.no_grad():
        if engine.global_rank == of:
            edit(weight)
    with pytest.raises(xds.UsageError, match=OLD if stage == 3 else OWN):
        step(engine)
    if stage == 3:
        assert torch.equal(values(engine), before) and torch.equal(weight.float(), before.float())
    else:  # it is refused until the ranks have the same values
        with pytest.raises(xds.UsageError, match=OWN):
            step(engine)
        xds.zero.set_full_param(weight, before)
    assert engine.global_steps == 1
    step(engine)
    assert not torch.equal(values(engine), before)
    engine.destroy()


def each_edit_on_one_rank(stage: int) -> None:
    for edit in (fill, assign, one_element, many_times):
        on_one_rank(stage, edit, "fp32", 0)
    on_one_rank(stage, one_element, "bf16", 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_write_on_one_rank(stage: int) -> None:
    run_ranks(each_edit_on_one_rank, 2, stage)


def on_every_rank(stage: int) -> None:
    engine = engine_of(stage)
    weight = engine.module[0].weight
    for edit in (fill, assign, one_element):
        with torch.no_grad():
            edit(weight)
            wanted = weight.detach().clone()
        step(engine)
        assert torch.allclose(values(engine), wanted, atol=0.1)
    with torch.no_grad():  # one rank writes more often than the other, but the same values
        for _ in range(1 + engine.global_rank):
            fill(weight)
    step(engine)
    with xds.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        if engine.global_rank == 1:
            weight.fill_(5.0)
    step(engine)
    assert torch.allclose(values(engine), torch.tensor(5.0), atol=0.5)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_values_on_every_rank(stage: int) -> None:
    run_ranks(on_every_rank, 2, stage)


def before_clipping(stage: int) -> None:
    engine = engine_of(stage)
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    norm = engine.clip_grad_norm(1.0)
    if engine.global_rank == 0:
        with torch.no_grad():
            engine.module[0].weight.mul_(2.0)
    with pytest.raises(xds.UsageError, match=OLD):
        engine.clip_grad_norm(1.0)
    assert engine.clip_grad_norm(1.0) == norm  # the gradients were kept
    engine.step()
    engine.destroy()


def test_clip_grad_norm_keeps_the_gradients() -> None:
    run_ranks(before_clipping, 2, 3)


def control_bytes(stage: int) -> float:
    """Bytes of the small messages of a step without writes."""
    engine = engine_of(stage)
    step(engine)
    before = engine.bytes_sent()["control"]
    step(engine)
    sent = engine.bytes_sent()["control"] - before
    engine.destroy()
    return sent


def test_it_costs_no_message() -> None:
    """The flag travels with the norm, 8 bytes each; at stage 0 on a device alone, in one byte."""
    for stage in (0, 3):
        assert all(0 < sent <= 16 for sent in run_ranks(control_bytes, 2, stage))
