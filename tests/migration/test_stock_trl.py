"""Tests of what TRL and PEFT do with an engine: generation, copies, reference models, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from torch import nn

import xds
import xds.deepspeed as deepspeed

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def built() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))


def outputs(engine: Any) -> torch.Tensor:
    found: torch.Tensor = engine(torch.arange(5.0).view(1, 5))
    return found


# -- the engine is a module ---------------------------------------------------------------------------------


def test_an_engine_is_a_module_with_the_model_as_its_child() -> None:
    model = built()
    engine = deepspeed.initialize(model=model, config=config_of(1, **ADAM))[0]
    assert isinstance(engine, nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)
    names = [f"module.{name}" for name in model.state_dict()]
    assert [name for name, _ in engine.named_parameters()] == names
    outer = nn.ModuleDict({"reward": engine})
    outer.eval()
    assert not model.training and not engine.training and outer["reward"] is engine
    assert [name for name, _ in outer.named_parameters()] == [f"reward.{name}" for name in names]
    assert list(outer.state_dict()) == [f"reward.{name}" for name in names]
    torch.testing.assert_close(engine.forward(torch.ones(1, 5)), model(torch.ones(1, 5)))


def test_a_load_leaves_random_generators_alone(tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=built(), config=config_of(1, **ADAM))[0]
    engine.save_checkpoint(tmp_path, "a")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert engine.load_checkpoint(tmp_path, "a")[0] is not None
    assert torch.equal(torch.get_rng_state(), before)


# -- stage 3 ------------------------------------------------------------------------------------------------


def take_off_and_put_back() -> None:
    engine = deepspeed.initialize(model=built(), config=config_of(3, **ADAM))[0]
    before = outputs(engine).detach()
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        held = engine.optimizer.parameter_offload
        external = [param for _, param in held.module.ds_external_parameters()]
        for param in [*held.module.parameters(recurse=True), *external]:
            param.ds_active_sub_modules.clear()
        for hook in held.forward_hooks + held.backward_hooks:
            hook.remove()
        held.forward_hooks, held.backward_hooks = [], []
        torch.testing.assert_close(engine.module(torch.arange(5.0).view(1, 5)).detach(), before)
        held._register_deepspeed_module(held.module)
    engine.backward(outputs(engine).square().sum())
    engine.step()
    assert not torch.equal(outputs(engine), before)


def test_hooks_are_taken_off_for_generation_and_put_back() -> None:
    run_processes(take_off_and_put_back, 2)


def copy_a_layer() -> None:
    expected = built()
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=config_of(3, **ADAM)):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    twin = copy.deepcopy(model[1])
    assert torch.equal(twin.weight, expected[1].weight) and not hasattr(twin.weight, "ds_id")
    model[1] = twin  # as PEFT puts it in for modules_to_save
    engine = deepspeed.initialize(model=model, config=config_of(3, **ADAM))[0]
    torch.testing.assert_close(outputs(engine), expected(torch.arange(5.0).view(1, 5)))
    shared = copy.deepcopy([model[0], model[0].weight])
    assert shared[0].weight is shared[1] and torch.equal(shared[1], expected[0].weight)


def test_a_copy_of_a_sharded_layer_is_whole() -> None:
    run_processes(copy_a_layer, 2)


def merge_and_take_out(strict: bool) -> None:
    torch.manual_seed(3)
    config = config_of(3, **ADAM)
    config["zero_optimization"]["enable_sanity_checks"] = strict
    model = built()
    engine = deepspeed.initialize(model=model, config=config)[0]
    before = outputs(engine).detach()

    def merge() -> None:
        with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
            model[0].weight += 1.0

    if strict:
        with pytest.raises(RuntimeError, match=r"in-place modification: 0\.weight"):
            merge()
    else:
        merge()
    torch.testing.assert_close(outputs(engine).detach(), before)


@pytest.mark.parametrize("strict", [False, True])
def test_an_edit_of_gathered_parameters_is_dropped_unless_the_config_refuses_it(
    strict: bool,
) -> None:
    run_processes(merge_and_take_out, 2, strict)


# -- an engine that only infers, of a model that is trained afterwards --------------------------------------


def score_then_train(stage: int) -> None:
    expected = built()
    model = built()
    scorer = deepspeed.initialize(model=model, config=config_of(stage))[0]
    assert scorer.optimizer is None and all(param.requires_grad for param in model.parameters())
    scores = outputs(scorer)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected(torch.arange(5.0).view(1, 5)))
    with pytest.raises(xds.UsageError, match="only infers"):
        scorer.backward(scores.sum())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    config = config_of(stage, gradient_clipping=0.0, zero_allow_untested_optimizer=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(outputs(engine).sum())
    engine.step()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    outputs(expected).sum().backward()
    plain.step()
    torch.testing.assert_close(outputs(engine).detach(), outputs(expected).detach())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_can_be_trained_after_it_has_scored(stage: int) -> None:
    run_processes(score_then_train, 2, stage)


# -- a set of parameters, whose order is that of addresses --------------------------------------------------


def initialize_missing() -> None:
    with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
        model = built()
    for value in (
        2.0,
        3.0,
    ):  # transformers' _initialize_missing_keys, then a script on the engine's
        params = list(model.parameters())
        in_some_order = params if dist.get_rank() == 0 else params[::-1]
        with deepspeed.zero.GatheredParameters(in_some_order, modifier_rank=0):
            if dist.get_rank() == 0:
                for number, param in enumerate(params):
                    param.data.fill_(value + number)
        with deepspeed.zero.GatheredParameters(in_some_order):
            assert [float(param.detach().max()) for param in params] == [
                value + n for n in range(4)
            ]
        if value == 2.0:
            deepspeed.initialize(model=model, config=config_of(3, **ADAM))


def test_ranks_may_list_gathered_parameters_in_their_own_order() -> None:
    run_processes(initialize_missing, 2)


# -- adapters -----------------------------------------------------------------------------------------------


def train_an_adapter(folder: str) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    config = config_of(3, gradient_clipping=0.0, **ADAM)
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=config):
        base = LlamaForCausalLM(llama)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, lora)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    tokens = torch.arange(6).view(1, 6) + dist.get_rank()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    whole = engine._zero3_consolidated_16bit_state_dict()
    model.save_pretrained(folder, state_dict=whole, is_main_process=dist.get_rank() == 0)
    trained = engine(input_ids=tokens, labels=tokens).loss
    dist.barrier()
    torch.manual_seed(3)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM(llama), folder)
    torch.testing.assert_close(loaded(input_ids=tokens, labels=tokens).loss, trained)


@pytest.mark.contract
@pytest.mark.filterwarnings("default")  # the packages warn about themselves
def test_an_adapter_with_whole_layers_trains_and_is_saved_at_stage_3(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_processes(train_an_adapter, 2, str(tmp_path))
