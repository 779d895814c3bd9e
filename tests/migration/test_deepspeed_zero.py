"""Tests of ZeRO in `xds.deepspeed`: parameters of stage 3, slices, copies, hooks, saves on rank 0."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import config, on_ranks, start, whole_values
from safetensors.torch import load_file, save_model
from torch import nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed import utils, zero
from xds.deepspeed.utils import groups

NUMEL = 15  # of the weight; two ranks have 8 elements each, one of them padding
X = torch.arange(5.0).view(1, 5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(5, 3)
        self.head = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


def train_once(engine: Any, x: torch.Tensor = X) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


# -- state_dict() of shards -------------------------------------------------------------------------------


def heard() -> list[str]:
    """The warnings of state_dict() from now on. A busy machine has others: a rank is slow."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: record.getMessage().startswith("state_dict()"))
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xds").addHandler(handler)
    return found


@on_ranks(2)
def test_ranks_that_write_nothing_may_ask_for_a_state_dict() -> None:
    """As stock scripts do on every rank: whole values are on rank 0 alone, and come from the engine."""
    engine = start(Model(), 3)
    names = dict(engine.module.named_parameters()).keys()
    found = engine.module.state_dict()
    assert found.keys() == engine.module_state_dict().keys() == names
    assert found["body.weight"].shape == (0,) and found["body.weight"].dtype == torch.float32
    assert engine.module.state_dict(keep_vars=True)["body.weight"] is engine.module.body.weight
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (dist.get_rank() > 0)


@on_ranks(2, processes=True)
def test_a_save_on_rank_0_does_not_end_the_run(tmp_path: Path) -> None:
    """As trainers that write files of their own do: nothing of it ends the run, or waits for other ranks."""
    engine = start(Model(), 3)
    said, is_first = heard(), dist.get_rank() == 0
    if is_first:
        found = engine.module.state_dict()
        assert len(found) == 4 and not said  # PEFT asks for the names
        torch.save(found, tmp_path / "a.bin")
        save_model(engine.module, tmp_path / "a.safetensors")
        copies = [value.clone().cpu() for value in copy.deepcopy(found).values()]
        assert {type(value) for value in copies} == {torch.Tensor}
        assert ["engine.save_16bit_model(folder)" in text for text in said] == [True], said
        loaded = torch.load(tmp_path / "a.bin", weights_only=True)
        assert {tuple(value.shape) for value in loaded.values()} == {(0,)}
        again = load_file(tmp_path / "a.safetensors")
        assert {name: value.shape for name, value in again.items()} == {
            name: value.shape for name, value in loaded.items()
        }
    # what the script has gathered just before is written whole
    whole = engine._zero3_consolidated_16bit_state_dict()
    if is_first:
        save_model(engine.module.body, tmp_path / "b.safetensors")
        assert load_file(tmp_path / "b.safetensors")["weight"].equal(whole["body.weight"])
    with zero.GatheredParameters([engine.module.body.weight], modifier_rank=0):
        if is_first:
            engine.module.body.weight.data.fill_(7)
    if is_first:  # not any more
        assert engine.module.state_dict()["body.weight"].shape == (0,)
    whole = engine._zero3_consolidated_16bit_state_dict()
    train_once(engine)
    if is_first:
        assert engine.module.state_dict()["body.weight"].shape == (0,) and len(whole) == 4
    whole = engine._zero3_consolidated_16bit_state_dict()
    del whole
    assert engine.module.state_dict()["body.weight"].shape == (0,)
    assert len(said) == is_first


# -- what parameters answer -------------------------------------------------------------------------------


@on_ranks(2, processes=True)
def test_parameters_of_stage_3_answer_and_no_others_do() -> None:
    given = config(3) | {"train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    # required keys that the Trainer fills after the model is built
    given["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    with zero.Init(config_dict_or_path=given), zero.Init(config_dict_or_path=given):
        model = Model()
    weight: Any = model.body.weight
    assert zero.is_zero_param(weight) and weight.ds_shape == (3, 5) and weight.ds_numel == NUMEL
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    read_slice(weight)
    engine = start(model, 3)
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
    assert not vars(weight) and not hasattr(nn.Parameter(torch.zeros(2)), "ds_id")


def read_slice(weight: Any) -> None:
    own = weight.ds_tensor
    assert own.shape == (8,) and own.ds_numel == weight.partition_numel() == 8
    assert "8 elements" in repr(own)
    whole = utils.safe_get_full_fp32_param(weight).flatten()
    padded = torch.cat([whole, whole.new_zeros(1)])
    rank = dist.get_rank()
    assert torch.equal(own.clone(), padded[8 * rank : 8 * rank + 8])


@on_ranks(1, processes=True)
def test_one_rank_answers_too_and_lower_stages_do_not() -> None:
    with zero.Init():
        inner: Any = nn.Linear(2, 2)
    outer = nn.Linear(2, 2)
    assert inner.weight.ds_status == zero.ZeroParamStatus.AVAILABLE
    assert inner.weight.ds_numel == 4
    assert torch.equal(inner.weight.ds_tensor, inner.weight.flatten())
    assert not hasattr(outer.weight, "ds_id") and not hasattr(nn.Parameter, "ds_id")
    engine = start(Model(), 1)
    assert not any(zero.is_zero_param(param) for param in engine.module.parameters())
    with pytest.raises(AssertionError, match="sharded at stage 3"):
        utils.safe_get_local_fp32_param(engine.module.body.weight)
    # where the launcher started several, one rank is not the whole model
    os.environ["WORLD_SIZE"] = "8"
    with pytest.raises(ValueError, match="WORLD_SIZE=8.*init_distributed"):
        zero.Init()
    zero.Init(data_parallel_group=dist.group.WORLD)
    os.environ["WORLD_SIZE"] = "1"
    zero.Init()


def test_clipping_needs_the_norm_that_a_config_leaves_out() -> None:
    given: dict[str, Any] = {"train_batch_size": 1, "gradient_clipping": 1.0}
    given["zero_optimization"] = {"stage": 2, "compute_grad_norm": False}
    with pytest.raises(xds.ConfigError, match="requires gradient_clipping=0"):
        xds.Config.load(given)
    given["zero_optimization"]["stage"] = 3  # DeepSpeed ignores it there
    assert xds.Config.load(given).zero_optimization.shows_grad_norm


# -- states, whole and in slices --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_states_are_read_and_written_whole_and_in_slices(stage: int) -> None:
    engine = start(Model(), stage)
    body, frozen = engine.module.body.weight, engine.module.head.weight
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(1, 5)).square().mean())
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


# -- what TRL and PEFT do ---------------------------------------------------------------------------------


def built() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))


@on_ranks(2)
def test_hooks_are_taken_off_for_generation_and_put_back() -> None:
    """Libraries count them, and ask for the order of the units."""
    engine = start(built(), 3)
    before = engine(X).detach()
    held = engine.optimizer.parameter_offload
    coordinator = held.get_param_coordinator()
    assert held.forward_hooks and held.backward_hooks and coordinator.is_complete_trace()
    with zero.GatheredParameters(engine.parameters()):
        external = [param for _, param in held.module.ds_external_parameters()]
        for param in [*held.module.parameters(recurse=True), *external]:
            param.ds_active_sub_modules.clear()
        for hook in held.forward_hooks + held.backward_hooks:
            hook.remove()
        held.forward_hooks, held.backward_hooks = [], []
        sent = engine.bytes_sent()
        with torch.no_grad():
            for _ in range(5):
                torch.testing.assert_close(engine.module(X), before)
        assert engine.bytes_sent() == sent  # each unit was gathered once
        assert engine.module.state_dict()["0.weight"].isfinite().all()
        held._register_deepspeed_module(held.module)
    held._remove_module_hooks()  # as TRL does
    assert engine.optimizer.parameter_offload.forward_hooks == []
    held._register_deepspeed_module(held.module)
    assert held.forward_hooks and held is engine.optimizer.parameter_offload
    assert coordinator.is_invalid_trace()  # the order of the forward before does not count
    engine.backward(engine(X).square().sum())
    assert not coordinator.is_invalid_trace() and not coordinator.is_record_trace()
    engine.step()
    assert not torch.equal(engine(X), before)


@on_ranks(2, processes=True)
def test_a_copy_of_a_sharded_layer_is_whole() -> None:
    expected = built()
    torch.manual_seed(3)
    with zero.Init(config_dict_or_path=config(3)):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    twin = copy.deepcopy(model[1])
    assert torch.equal(twin.weight, expected[1].weight) and not hasattr(twin.weight, "ds_id")
    model[1] = twin  # as PEFT puts it in for modules_to_save
    engine = start(model, 3)
    torch.testing.assert_close(engine(X), expected(X))
    shared = copy.deepcopy([model[0], model[0].weight])
    assert shared[0].weight is shared[1] and torch.equal(shared[1], expected[0].weight)


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_an_edit_of_gathered_parameters_is_dropped_unless_the_config_refuses_it(
    strict: bool,
) -> None:
    model = built()
    engine = start(model, 3, zero={"enable_sanity_checks": strict})
    before = engine(X).detach()

    def merge() -> None:
        with zero.GatheredParameters(list(model.parameters())), torch.no_grad():
            model[0].weight += 1.0

    if strict:
        with pytest.raises(RuntimeError, match=r"in-place modification: 0\.weight"):
            merge()
    else:
        merge()
    torch.testing.assert_close(engine(X).detach(), before)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_model_can_be_trained_after_it_has_scored(stage: int) -> None:
    expected, model = built(), built()
    given = config(stage)
    del given["optimizer"]
    scorer = deepspeed.initialize(model=model, config=given)[0]
    assert scorer.optimizer is None and all(param.requires_grad for param in model.parameters())
    scores = scorer(X)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected(X))
    with pytest.raises(xds.UsageError, match="only infers"):
        scorer.backward(scores.sum())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = start(model, stage, optimizer=optimizer, zero_allow_untested_optimizer=True)
    engine.backward(engine(X).sum())
    engine.step()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(X).sum().backward()
    plain.step()
    torch.testing.assert_close(engine(X).detach(), expected(X).detach())


@on_ranks(2, processes=True)
def test_ranks_may_list_gathered_parameters_in_their_own_order() -> None:
    """A set of parameters, whose order is that of addresses."""
    with zero.Init(config_dict_or_path=config(3)):
        model = built()
    # transformers' _initialize_missing_keys, then a script on the engine's
    for value in (2.0, 3.0):
        params = list(model.parameters())
        in_some_order = params if dist.get_rank() == 0 else params[::-1]
        with zero.GatheredParameters(in_some_order, modifier_rank=0):
            if dist.get_rank() == 0:
                for number, param in enumerate(params):
                    param.data.fill_(value + number)
        with zero.GatheredParameters(in_some_order):
            found = [float(param.detach().max()) for param in params]
        assert found == [value + number for number in range(4)]
        if value == 2.0:
            start(model, 3)


@pytest.mark.contract
@pytest.mark.filterwarnings("default")  # the packages warn about themselves
@on_ranks(2, processes=True)
def test_an_adapter_with_whole_layers_trains_and_is_saved_at_stage_3(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    torch.manual_seed(3)
    with zero.Init(config_dict_or_path=config(3)):
        base = transformers.LlamaForCausalLM(llama)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(base, lora)
    engine = start(model, 3)
    tokens = torch.arange(6).view(1, 6) + dist.get_rank()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    whole = engine._zero3_consolidated_16bit_state_dict()
    model.save_pretrained(tmp_path, state_dict=whole, is_main_process=dist.get_rank() == 0)
    trained = engine(input_ids=tokens, labels=tokens).loss
    dist.barrier()
    torch.manual_seed(3)
    loaded = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(llama), tmp_path)
    torch.testing.assert_close(loaded(input_ids=tokens, labels=tokens).loss, trained)


# -- a second engine of a model ---------------------------------------------------------------------------


def batch(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * seed + rank))


def train_twice(model: nn.Module, stage: int, seed: int) -> Any:
    """Two steps of a new engine of `model`."""
    engine = start(model, stage, kind="SGD", params={"lr": 0.1})
    for step in range(2):
        train_once(engine, batch(seed + step, dist.get_rank()))
    return engine


@on_ranks(2, processes=True)
def test_a_second_engine_goes_on_with_the_values_of_the_first() -> None:
    import gc
    import weakref

    gc.freeze()  # each collection looks at what follows
    expected = built()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for seed in (0, 1, 5, 6):
        for rank in range(2):
            (expected(batch(seed, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for how, stage in (
        *(("kept", 3), ("dropped", 0), ("dropped", 3), ("destroyed", 0), ("destroyed", 3)),
        *(("mid-step", 0), ("mid-step", 3)),
    ):
        model = built()
        engine = train_twice(model, stage, 0)
        first = weakref.ref(engine._engine)
        if how == "destroyed":
            engine.destroy()
        if how == "mid-step":
            engine.backward(engine(batch(9, dist.get_rank())).square().mean())
        if how != "kept":
            del engine
            gc.collect()
        second = train_twice(model, stage, 5)
        for value, wanted in zip(whole_values(second), expected.parameters(), strict=True):
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-5, atol=1e-6)
        gc.collect()
        # the first engine is gone, and with it what it held
        assert how == "kept" or first() is None, (how, stage)
        second.destroy()
    gc.unfreeze()


@on_ranks(2)
def test_copies_of_a_trained_model_do_not_hold_its_engine(tmp_path: Path) -> None:
    model = built()
    engine = train_twice(model, 1, 0)
    path = tmp_path / str(dist.get_rank())
    torch.save(model, path)
    for other in (copy.deepcopy(model), torch.load(path, weights_only=False)):
        assert other.state_dict().keys() == model.state_dict().keys()
        other.load_state_dict(model.state_dict())
        train_twice(other, 1, 5).destroy()
    engine.destroy()
    assert not model._load_state_dict_post_hooks


@on_ranks(2)
def test_groups_are_those_of_the_newest_engine_that_trains() -> None:
    """What `deepspeed.utils.groups` says while other engines come and go."""
    import gc

    given = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    found = []
    first = deepspeed.initialize(model=built(), config=given, mesh_param=(1, 2))[0]
    for is_destroyed in (True, False):
        second = deepspeed.initialize(model=built(), config=given)[0]
        found.append(groups._get_sequence_parallel_world_size())
        if is_destroyed:
            second.destroy()
            found.append(groups._get_sequence_parallel_world_size())
        del second
        gc.collect()
        found.append(groups._get_sequence_parallel_world_size())
    first.destroy()
    assert found == [1, 2, 2, 1, 2]
