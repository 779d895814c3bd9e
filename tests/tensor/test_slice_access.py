"""Full tensors of sliced layers: read, written and edited as if nothing were cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_checkpoints import Cut, engine_of, samples
from torch import nn

import xds
from xds import zero

NAMES = ("blocks.1.up.weight", "blocks.1.up.bias", "blocks.2.down.weight", "blocks.0.norm.weight")


def loss_of(engine: Any) -> torch.Tensor:
    pairs = samples()[:2]
    loss: torch.Tensor = engine(*(torch.stack(side) for side in zip(*pairs, strict=True)))
    return loss


def accesses(cut: Cut) -> dict[str, Any]:
    """What every access finds on this rank, before and after edits."""
    engine = engine_of(cut, 3, gradient_accumulation_steps=1, scheduler=None)
    named = dict(engine.module.named_parameters())
    params = [named[name] for name in NAMES]
    found: dict[str, Any] = {}
    engine.backward(loss_of(engine))
    found["grads"] = [zero.get_full_grad(param) for param in params]
    engine.step()
    found["values"] = [zero.get_full_param(param) for param in params]
    found["moments"] = [zero.get_full_optimizer_state(param, "exp_avg") for param in params]
    for param, value in zip(params, found["values"], strict=True):
        zero.set_full_param(param, 2 * value)
        zero.set_full_optimizer_state(param, value + 1, "exp_avg")
    found["set"] = [zero.get_full_param(param) for param in params]
    found["set moments"] = [zero.get_full_optimizer_state(param, "exp_avg") for param in params]
    with pytest.raises(
        xds.UsageError, match=r"value has shape \(1,\), but the parameter has \(38, 13\)"
    ):
        zero.set_full_param(params[0], torch.ones(1))
    with zero.GatheredParameters(params):
        found["gathered"] = [param.detach().clone() for param in params]
        if cut.tensor > 1:
            with pytest.raises(xds.UsageError, match="forward needs the slice"):
                loss_of(engine)
            assert engine.module.blocks[1].up.state_dict()["weight"].shape == (38, 13)
    if cut.tensor > 1:
        with pytest.raises(
            xds.UsageError, match=r"are (sharded|cut into slices) \(.*full_state_dict"
        ):
            engine.module.state_dict()
    with zero.GatheredParameters(params, modifier_rank=cut.world_size - 1), torch.no_grad():
        for param in params:
            param.fill_(torch.distributed.get_rank())
    found["modified"] = [zero.get_full_param(param) for param in params]
    for param, value in zip(params, found["values"], strict=True):
        zero.set_full_param(param, value)
    found["loss"] = loss_of(engine).item()
    engine.destroy()
    return found


def test_full_tensors_of_slices_are_those_of_one_rank() -> None:
    cut = Cut(1, 2, 3, tensor=2)
    wanted = run_ranks(accesses, 1, Cut(1, 1, 0))[0]
    for rank, found in enumerate(run_ranks(accesses, cut.world_size, cut)):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        for key in wanted.keys() - {"loss"}:
            values = wanted[key]
            if key == "modified":
                values = [torch.full_like(value, cut.world_size - 1.0) for value in values]
            for one, value in zip(found[key], values, strict=True):
                assert one.shape == value.shape
                torch.testing.assert_close(one, value, rtol=1e-5, atol=1e-5, msg=f"{rank} {key}")


def from_meta(cut: Cut, weights: dict[str, Any] | None) -> dict[str, Any]:
    """The whole model's values, after building it on the meta device."""
    from pipeline_checkpoints import config_of

    torch.manual_seed(11)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    plan = {"0": "colwise", "1": "rowwise"}
    config = config_of(cut) | {"tensor_parallel": {"tp_size": cut.tensor, "plan": plan}}
    engine = xds.initialize(model, config, weights=weights)
    found: dict[str, Any] = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def test_slices_are_built_from_meta() -> None:
    stage = 3
    torch.manual_seed(11)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).state_dict()
    given = copy.deepcopy(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).state_dict())
    for weights in (None, given):
        wanted = plain if weights is None else given
        for found in run_ranks(from_meta, 2, Cut(1, 1, stage, tensor=2), weights):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(found[name], value), name


class Tied(nn.Module):
    """Blocks between an embedding and a head with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def frozen_accesses(stage: int, name: str, section: dict[str, Any]) -> list[bool]:
    """Accesses of the frozen parameter `name`, and whether each finds what it should."""
    torch.manual_seed(0)
    model = Tied()
    param: Any = model.get_parameter(name)
    param.requires_grad_(False)
    want = param.detach().clone()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **section,
    }
    engine = xds.initialize(model, config)
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    param = named[name] if name in named else named["head.weight"]
    found = [zero.get_full_param(param).equal(want)]
    with zero.GatheredParameters(param):
        found.append(param.equal(want))
    with zero.GatheredParameters(param, modifier_rank=1), torch.no_grad():
        if engine.global_rank == 1:
            param.mul_(2)
    found.append(zero.get_full_param(param).equal(2 * want))
    with zero.GatheredParameters(param):
        zero.set_full_param(param, 4 * want)
        found.append(param.equal(4 * want))
    found.append(zero.get_full_param(param).equal(4 * want))
    engine.destroy()
    return found


def test_frozen_weights_of_slices_and_of_two_stages_are_read_and_written() -> None:
    plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
    slices = {"tensor_parallel": {"tp_size": 2, "plan": plan}}
    for stage in (0, 3):
        found = run_ranks(frozen_accesses, 2, stage, "blocks.1.0.weight", slices)
        assert found == [[True] * 5] * 2
        found = run_ranks(frozen_accesses, 2, stage, "embed.weight", {"pipeline": {"stages": 2}})
        assert found == [[True] * 5] * 2
