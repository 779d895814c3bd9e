"""Tests of ZeRO in `xds.deepspeed`: configs, answers of parameters at stage 3, slices, tiles, leaves."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from safetensors.torch import load_file, save_model
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed import utils, zero

NUMEL = 15  # of the weight; two ranks have 8 elements each, one of them padding

# -- configs ----------------------------------------------------------------------------------------------


# -- what parameters answer -------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.head = nn.Linear(3, 2)
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x)).square().mean()
        return found


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def engine_of(stage: int, model: nn.Module | None = None) -> Any:
    torch.manual_seed(3)
    model = model or Model()
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(stage)
    )[0]


def train_once(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 5)))
    engine.step()


def heard() -> list[str]:
    """The warnings of state_dict() from now on. A busy machine has others: a rank is slow."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: record.getMessage().startswith("state_dict()"))
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xds").addHandler(handler)
    return found


def ask_for_a_state_dict() -> None:
    """As stock scripts do on every rank: whole values are on rank 0 alone, and come from the engine."""
    engine = engine_of(3, Model())
    names = dict(engine.module.named_parameters()).keys()
    found = engine.module.state_dict()
    assert found.keys() == engine.module_state_dict().keys() == names
    assert found["body.weight"].shape == (0,) and found["body.weight"].dtype == torch.float32
    assert engine.module.state_dict(keep_vars=True)["body.weight"] is engine.module.body.weight
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (dist.get_rank() > 0)


def test_ranks_that_write_nothing_may_ask_for_a_state_dict() -> None:
    run_processes(ask_for_a_state_dict, 2)


def save_on_rank_0(folder: str) -> None:
    """As trainers that write files of their own do: nothing of it ends the run, or waits for other ranks."""
    engine = engine_of(3, Model())
    said = heard()
    if dist.get_rank() == 0:
        found = engine.module.state_dict()
        assert len(found) == 4 and not said  # PEFT asks for the names
        torch.save(found, f"{folder}/a.bin")
        save_model(engine.module, f"{folder}/a.safetensors")
        copies = [value.clone().cpu() for value in copy.deepcopy(found).values()]
        assert {type(value) for value in copies} == {torch.Tensor}
        assert ["engine.save_16bit_model(folder)" in text for text in said] == [True], said
        loaded = torch.load(f"{folder}/a.bin", weights_only=True)
        assert {tuple(value.shape) for value in loaded.values()} == {(0,)}
        assert {
            name: value.shape for name, value in load_file(f"{folder}/a.safetensors").items()
        } == {name: value.shape for name, value in loaded.items()}
    # what the script has gathered just before is written whole
    whole = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        save_model(engine.module.body, f"{folder}/b.safetensors")
        assert load_file(f"{folder}/b.safetensors")["weight"].equal(whole["body.weight"])
    with deepspeed.zero.GatheredParameters([engine.module.body.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.body.weight.data.fill_(7)
    if dist.get_rank() == 0:  # not any more
        assert engine.module.state_dict()["body.weight"].shape == (0,)
    whole = engine._zero3_consolidated_16bit_state_dict()
    train_once(engine)
    if dist.get_rank() == 0:
        assert engine.module.state_dict()["body.weight"].shape == (0,) and len(whole) == 4
    whole = engine._zero3_consolidated_16bit_state_dict()
    del whole
    assert engine.module.state_dict()["body.weight"].shape == (0,)
    engine.save_checkpoint(folder)
    assert len(said) == (dist.get_rank() == 0)


def test_a_save_on_rank_0_does_not_end_the_run(tmp_path: Path) -> None:
    run_processes(save_on_rank_0, 2, str(tmp_path))


def answers() -> None:
    other = nn.Parameter(torch.zeros(2))
    config = config_of(3) | {"train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    # required keys that the Trainer fills after the model is built
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    torch.manual_seed(3)
    with zero.Init(config_dict_or_path=config), zero.Init(config_dict_or_path=config):
        model = Model()
    weight = model.body.weight
    assert zero.is_zero_param(weight) and weight.ds_shape == (3, 5) and weight.ds_numel == NUMEL
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    read_slice(weight)
    engine = engine_of(3, model)
    assert len({param.ds_id for param in model.parameters()}) == 4
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE and not weight.ds_persist
    read_slice(weight)
    with zero.GatheredParameters(weight):
        assert weight.ds_status == zero.ZeroParamStatus.AVAILABLE
    weight.all_gather()
    assert weight.ds_status == zero.ZeroParamStatus.AVAILABLE and weight.isfinite().all()
    weight.data.fill_(2.0)
    weight.partition(has_been_updated=True)
    assert utils.safe_get_full_fp32_param(weight).eq(2.0).all()
    weight.ds_tensor.data = torch.full((8,), float(dist.get_rank()))
    weight.ds_tensor.mul_(3.0)
    own = weight.ds_tensor.clone()
    weight.ds_tensor.data.copy_(own + 1.0)
    weight.ds_tensor.data.sub_(1.0)
    expected = [0.0] * 8 + [3.0] * 7
    assert utils.safe_get_full_fp32_param(weight).flatten().tolist() == expected
    assert dist.get_world_size(weight.ds_process_group) == 2
    engine.destroy()
    assert not hasattr(weight, "ds_id") and not hasattr(other, "ds_id")
    assert not vars(weight)


def read_slice(weight: Any) -> None:
    own = weight.ds_tensor
    assert own.shape == (8,) and own.ds_numel == weight.partition_numel() == 8
    assert "8 elements" in repr(own)
    whole = utils.safe_get_full_fp32_param(weight).flatten()
    padded = torch.cat([whole, whole.new_zeros(1)])
    rank = dist.get_rank()
    assert torch.equal(own.clone(), padded[8 * rank : 8 * rank + 8])


def test_parameters_of_stage_3_answer_and_no_others_do() -> None:
    run_processes(answers, 2)


def one_rank() -> None:
    with zero.Init():
        inner = nn.Linear(2, 2)
    outer = nn.Linear(2, 2)
    assert inner.weight.ds_status == zero.ZeroParamStatus.AVAILABLE
    assert inner.weight.ds_numel == 4 and torch.equal(
        inner.weight.ds_tensor, inner.weight.flatten()
    )
    assert not hasattr(outer.weight, "ds_id") and not hasattr(nn.Parameter, "ds_id")
    engine = engine_of(1)
    assert not any(zero.is_zero_param(param) for param in engine.module.parameters())
    with pytest.raises(AssertionError, match="sharded at stage 3"):
        utils.safe_get_local_fp32_param(engine.module.body.weight)


def test_one_rank_answers_too_and_lower_stages_do_not() -> None:
    run_processes(one_rank, 1)


def states(stage: int) -> None:
    engine = engine_of(stage)
    body, frozen = engine.module.body.weight, engine.module.head.weight
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(1, 5)))
        grad = utils.safe_get_full_grad(body)
        utils.safe_set_full_grad(body, 2 * grad)
        assert torch.equal(utils.safe_get_full_grad(body), 2 * grad)
        if stage == 3:
            own = torch.arange(8.0) + 8 * dist.get_rank()
            utils.safe_set_local_grad(body, own)
            assert utils.safe_get_full_grad(body).flatten().tolist() == list(range(NUMEL))
            assert utils.safe_get_local_grad(body)[-1] == (7.0 if dist.get_rank() == 0 else 0.0)
        engine.step()
        assert utils.safe_get_full_optimizer_state(body, "exp_avg").any()
        for read in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad):
            assert read(frozen) is None
        assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    if stage == 3:
        local_states(body, frozen)
    engine.destroy()
    assert utils.safe_get_full_fp32_param(body) is None


def local_states(body: Any, frozen: Any) -> None:
    own = torch.full((8,), 1.0 + dist.get_rank())
    utils.safe_set_local_fp32_param(body, own)
    utils.safe_set_local_optimizer_state(body, own, "exp_avg_sq")
    for found in (
        utils.safe_get_full_fp32_param(body),
        utils.safe_get_full_optimizer_state(body, "exp_avg_sq"),
    ):
        assert found.flatten().tolist() == [1.0] * 8 + [2.0] * 7
    assert utils.safe_get_local_optimizer_state(body, "exp_avg_sq")[:7].eq(own[:7]).all()
    assert utils.safe_get_local_fp32_param(frozen) is None
    with pytest.raises(ValueError, match="value has 7 elements, and needs the 8"):
        utils.safe_set_local_fp32_param(body, own[:7])


@pytest.mark.parametrize("stage", [1, 3])
def test_states_are_read_and_written_whole_and_in_slices(stage: int) -> None:
    run_processes(states, 2, stage)


# -- leaves -----------------------------------------------------------------------------------------------
