"""Tests of the results of `xds.deepspeed.initialize`: methods, values and refusals, at every precision."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from xds.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from xds.deepspeed.ops.lamb import FusedLamb
from xds.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from xds.engine.deepspeed.params import estimate
from xds.ops.optim.adam import Adam
from xds.ops.optim.lamb import Lamb
from xds.ops.optim.lion import Lion

DATA = TensorDataset(torch.arange(64.0).view(16, 4) / 64)


def config_of(stage: int = 0, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    return {**base, **more}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))


def start(stage: int = 0, **more: Any) -> Any:
    model = build()
    config = config_of(stage, **more)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def train(engine: Any, steps: int = 1, size: float = 1.0) -> None:
    dtype = engine.get_data_types()[0]
    for number in range(steps * engine.gradient_accumulation_steps()):
        batch = torch.full((2, 4), 0.1 * (number + 1), dtype=dtype)
        engine.backward(engine(batch).float().square().mean() * size)
        engine.step()


# -- four results -----------------------------------------------------------------------------------------


def results() -> None:
    model = build()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=Namespace(deepspeed_config=config_of(1), local_rank=0),
        model=model,
        model_parameters=(p for p in model.parameters() if p.requires_grad),
        training_data=DATA,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.module is model
    assert optimizer is engine.optimizer
    assert len(loader) == 16 // 2 // dist.get_world_size() and loader is engine.training_dataloader
    assert scheduler is engine.lr_scheduler and scheduler.optimizer is engine.basic_optimizer
    train(engine)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert deepspeed.initialize(model=build(), config=config_of(1))[2:] == (None, None)
    engine.lr_scheduler = None  # goes to the engine, which steps no schedule from now on
    train(engine)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_initialize_gives_engine_optimizer_dataloader_and_scheduler() -> None:
    run_processes(results, 2)


def an_optimizer_object_and_its_parameters() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, same, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model.parameters(),
        config_params=config_of(),
    )
    assert same is optimizer  # fp32 at stage 0: torch schedules take it
    engine.destroy()


def test_an_optimizer_object_wins_over_model_parameters() -> None:
    run_processes(an_optimizer_object_and_its_parameters, 1)


# -- clipping ---------------------------------------------------------------------------------------------


def clipping() -> None:
    assert start()[0].gradient_clipping() == 1.0
    assert start(gradient_clipping=0.0)[0].gradient_clipping() == 0.0
    config = xds.Config.load(config_of())
    assert deepspeed.initialize(model=build(), config=config)[0].gradient_clipping() == 0.0
    # and it is used: SGD moves no further than lr times the norm it clips to
    engine, *_ = start(optimizer={"type": "SGD", "params": {"lr": 1.0}})
    before = torch.cat([p.detach().flatten().clone() for p in engine.module.parameters()])
    train(engine, size=1e4)
    after = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    assert engine.get_global_grad_norm() > 10
    assert (after - before).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_gradients_are_clipped_at_deepspeeds_default_unless_the_config_says_otherwise() -> None:
    run_processes(clipping, 1)


# -- optimizers -------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "FusedAdam": (
        lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    ),
    "FusedAdam L2": (
        lambda p: FusedAdam(p, 1e-2, adam_w_mode=False, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    ),
    "DeepSpeedCPUAdam": (
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, betas=(0.8, 0.9)),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.0),
    ),
    "DeepSpeedCPUAdagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, lr=1e-2),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
    ),
}


def step_all(stage: int) -> None:
    for ours, plain in OPTIMIZERS.values():
        step_with(ours, plain, stage)


def step_with(ours: Any, plain: Any, stage: int) -> None:
    model, reference = build(), build()
    optimizer = ours(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config_of(stage, gradient_clipping=0.0)
    )
    assert engine.basic_optimizer is optimizer
    train(engine, steps=3)
    other = plain(reference.parameters())
    for number in range(6):
        batch = torch.full((2, 4), 0.1 * (number + 1))
        (reference(batch).square().mean() / 2).backward()
        if number % 2:
            other.step()
            other.zero_grad()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_by_deepspeeds_name_steps_like_torchs(stage: int) -> None:
    run_processes(step_all, 2, stage)


def lion_and_lamb() -> None:
    for make in (FusedLion, DeepSpeedCPULion, FusedLamb):
        model = build()
        before = model[0].weight.detach().clone()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make(model.parameters(), lr=1e-2), config=config_of(2)
        )
        train(engine)
        moved = (model[0].weight - before).abs()
        assert moved.max() > 0
        if make is not FusedLamb:
            assert moved.max().item() == pytest.approx(1e-2)  # a sign times the learning rate


def test_lion_and_lamb_step_in_the_engine() -> None:
    run_processes(lion_and_lamb, 2)


@pytest.mark.parametrize("make", [Adam, Lion, Lamb])
def test_an_optimizer_of_shards_refuses_to_be_stepped_alone(make: Any) -> None:
    model = build()
    optimizer = make(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(xds.UsageError, match="cannot be stepped alone; pass it to initialize"):
        optimizer.step()


def test_arguments_of_optimizers_that_nothing_honours_are_refused() -> None:
    params = list(build().parameters())
    for make in (FusedAdam, DeepSpeedCPUAdam, FusedLamb, DeepSpeedCPUAdagrad):
        with pytest.raises(xds.UsageError, match="amsgrad=True"):
            make(params, amsgrad=True)
    with pytest.raises(xds.UsageError, match="max_grad_norm=1.0.*gradient_clipping"):
        FusedLamb(params, max_grad_norm=1.0)


# -- questions --------------------------------------------------------------------------------------------


def questions() -> None:
    engine, optimizer, *_ = start(3, fp16={"enabled": True, "initial_scale_power": 4})
    assert engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_gradients()
    assert engine.zero_optimization_partition_weights()
    assert engine.dynamic_loss_scale() and engine.loss_scale() == 0
    assert optimizer.cur_scale == optimizer.loss_scale == engine.initial_dynamic_scale() == 16
    assert engine.get_data_types() == (torch.float16, torch.float32)
    world_size = dist.get_world_size()
    assert engine.get_batch_info() == (4 * world_size, 2, 2)
    assert engine.get_type() == ["Adam"] and engine.optimizer_name() == "adamw"
    assert engine.scheduler_name() is None and engine.steps_per_print() is None
    assert engine.global_rank == engine.get_data_parallel_rank() == dist.get_rank()
    assert (engine.mpu, engine.mp_world_size, engine.dp_world_size) == (None, 1, world_size)
    assert engine.wall_clock_breakdown() is False and engine.zero_cpu_offload() is False
    train(engine, steps=2)
    assert engine.global_steps == 2 and engine.was_step_applied() and not optimizer.overflow
    train(engine, size=1e30)
    assert optimizer.overflow and not engine.was_step_applied() and engine.skipped_steps == 1
    assert engine.eval() is engine and not engine.training
    assert engine.train() is engine and engine.training
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(2, 4).half()).float().sum())
    engine.empty_partition_cache()
    optimizer.zero_grad()  # left in by many scripts, and harmless
    assert engine.optimizer.state_dict()["param_groups"]


def test_the_engine_answers_deepspeeds_questions() -> None:
    run_processes(questions, 2)


def refusals() -> dict[str, str]:
    engine, optimizer, *_ = start(1)
    said = {}
    for name in ("buffered_allreduce_fallback", "_exec_schedule", "client_optimizer"):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"engine.{name} is not covered") as caught:
            getattr(engine, name)
        said[name] = str(caught.value)
    for name in ("fp32_groups_flat", "override_loss_scale"):
        with pytest.raises(xds.UsageError, match=f"optimizer.{name} is not covered"):
            getattr(optimizer, name)
    with pytest.raises(xds.UsageError, match=r"engine.step\(lr_kwargs=\{'epoch': 1\}\)"):
        engine.step({"epoch": 1})
    with pytest.raises(AttributeError, match="neither xds.Engine nor Sequential has"):
        _ = engine.nonsense
    return said


def test_what_the_engine_lacks_it_says_in_a_sentence() -> None:
    assert "engine.no_sync()" in run_processes(refusals, 1)[0]["buffered_allreduce_fallback"]


# -- data -------------------------------------------------------------------------------------------------


def loaders() -> list[float]:
    engine, *_ = start()
    loader = engine.deepspeed_io(DATA, route="eval")
    mine = [value for (batch,) in loader for value in (batch[:, 0] * 16).tolist()]
    assert len(engine.deepspeed_io(DATA, batch_size=4)) == 2
    sampler = torch.utils.data.SequentialSampler(DATA)
    assert len(engine.deepspeed_io(DATA, data_sampler=sampler)) == 8
    return mine


def test_deepspeed_io_deals_a_dataset_out_over_the_ranks() -> None:
    assert run_processes(loaders, 2) == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]


# -- weights and checkpoints ------------------------------------------------------------------------------


def weights(stage: int, folder: str) -> None:
    engine, *_ = start(stage, bf16={"enabled": True})
    train(engine)
    assert engine.save_16bit_model(folder, "weights.bin")
    saved = torch.load(os.path.join(folder, "weights.bin"), weights_only=True)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            assert torch.equal(saved[name], param)
    consolidated = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert (consolidated is None) == (dist.get_rank() > 0)
    assert list(engine.module_state_dict()) == list(build().state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_are_saved_in_the_dtype_that_computes(stage: int, tmp_path: Path) -> None:
    run_processes(weights, 2, stage, str(tmp_path))


def resume(folder: str) -> None:
    engine, *_ = start(2)
    train(engine, steps=2)
    engine.save_checkpoint(folder, tag=7, client_state={"epoch": 3})
    before = [p.detach().clone() for p in engine.module.parameters()]
    train(engine)
    path, client_state = engine.load_checkpoint(folder, 7)
    assert path is not None and path.endswith("7")
    assert client_state["epoch"] == 3 and client_state["global_samples"] == engine.global_samples
    assert client_state["ds_version"].startswith("xds ")
    assert engine.global_steps == 2
    for found, wanted in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(found, wanted)


def test_checkpoints_take_deepspeeds_arguments(tmp_path: Path) -> None:
    run_processes(resume, 2, str(tmp_path))


# -- construction and groups ------------------------------------------------------------------------------


def construction() -> None:
    plain = build()
    with deepspeed.zero.Init(
        config_dict_or_path=config_of(3), remote_device="cpu", pin_memory=True, mpu=None
    ):
        model = build()
    engine, *_ = deepspeed.initialize(model=model, config=config_of(3))
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(found), wanted)
    train(engine)
    whole = deepspeed.utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    assert whole.shape == (8, 4)
    groups = deepspeed.utils.groups
    assert groups._get_data_parallel_world_size() == 2
    assert groups.get_model_parallel_world_size() == 1
    total = torch.ones(1)
    deepspeed.comm.all_reduce(total)
    assert total.item() == 2


def test_a_model_is_built_in_slices_and_read_whole() -> None:
    run_processes(construction, 2)


class Mpu:
    """Like Megatron's, of a job whose ranks are all data-parallel, or half of them."""

    def __init__(self, model_parallel_size: int) -> None:
        self.size = model_parallel_size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD


def wrong_calls() -> None:
    model, config = build(), config_of(1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"config": config}, "needs the torch.nn.Module to train"),
        ({"model": model}, "got none of them: pass config= or --deepspeed_config"),
        (
            {"model": model, "config": config, "config_params": config},
            "got config and config_params",
        ),
        (
            {"model": model, "config": config, "args": Namespace(deepspeed_config="ds.json")},
            "got config and args.deepspeed_config",
        ),
        ({"model": model, "config": config, "mpu": Mpu(2)}, "mpu with a model-parallel size of 2"),
        (
            {"model": model, "config": config, "mesh_param": (1, 2)},
            "must be their number",
        ),
    ]
    for arguments, said in wrong:
        with pytest.raises(xds.UsageError, match=said):
            deepspeed.initialize(**arguments)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=Mpu(1), mesh_param=(1, 1))
    assert engine.data_parallel_group is None  # one rank: nothing to share
    for arguments, said in (
        ({"remote_device": "nvme"}, "set offload_param.device"),
        ({"zero_quantized_weights": True}, r"zero.Init\(zero_quantized_weights=...\)"),
    ):
        with pytest.raises(xds.UsageError, match=said):
            deepspeed.zero.Init(**arguments)


def test_calls_that_cannot_work_are_refused_before_anything_is_done() -> None:
    run_processes(wrong_calls, 1)


@pytest.mark.parametrize(
    "arguments, environment, said",
    [
        (
            {"dist_init_required": False},
            {},
            "dist_init_required = False, but torch.distributed is not",
        ),
        ({}, {"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE = 4, but WORLD_SIZE is not set"),
        ({"dist_backend": "nccl"}, {}, '"nccl" needs a GPU'),
    ],
)
def test_a_process_group_that_cannot_be_made_is_refused(
    arguments: dict[str, Any],
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "nccl" in arguments.values() and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if dist.is_initialized():  # another test of this process has made the group of one
        dist.destroy_process_group()
    with pytest.raises(xds.UsageError, match=said):
        deepspeed.init_distributed(**arguments)
    assert not dist.is_initialized()


def test_a_process_group_is_made_as_the_script_says(tmp_path: Path) -> None:
    code = (
        "from datetime import timedelta\nimport xds.deepspeed as deepspeed\n"
        "deepspeed.init_distributed('gloo', timeout=timedelta(seconds=50), rank=0, world_size=1,\n"
        f"    init_method='file://{tmp_path}/meet')\n"
        "deepspeed.init_distributed('gloo')\n"
        "assert deepspeed.comm.get_world_size() == 1\n"
        "assert deepspeed.comm.get_world_group().size() == 1\n"
        "deepspeed.comm.destroy_process_group()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# -- estimates --------------------------------------------------------------------------------------------


def held_and_estimated(stage: int, **kinds: bool) -> tuple[int, int]:
    """Bytes on the device; kinds: of `estimate.Offload`."""
    offload = {f"offload_{kind.removesuffix('s')}": {"device": "cpu"} for kind in kinds}
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    sizes = estimate.measure(model)
    config = config_of(stage, bf16={"enabled": True}, gradient_accumulation_steps=1)
    config["zero_optimization"] = {"stage": stage, "stage3_max_reuse_distance": 0, **offload}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(2, 1024, dtype=torch.bfloat16)).float().mean())
    engine.step()
    plan, choice = engine.memory_plan(), estimate.Offload(**kinds)
    if kinds:
        host = estimate.host_bytes(*sizes, (2, 1), 1.0, True, choice)
        assert 2 * plan["host"] == pytest.approx(host, rel=0.03)
    return sum(plan.values()) - plan["host"], estimate.rank_bytes(stage, 2, *sizes, choice)


def test_at_stage_2_the_estimate_is_what_the_engine_holds() -> None:
    for held, estimated in run_processes(held_and_estimated, 2, 2):
        assert held == pytest.approx(estimated, rel=0.03)


def both_kinds() -> tuple[int, int]:
    return held_and_estimated(3, optimizer=True, params=True)


def optimizer_alone() -> tuple[int, int]:
    return held_and_estimated(2, optimizer=True)


def test_with_offload_the_estimate_covers_what_the_engine_holds() -> None:
    for function in (both_kinds, optimizer_alone):
        for held, estimated in run_processes(function, 2):
            assert 0.6 * estimated < held <= estimated


def test_at_stage_3_the_estimate_covers_what_is_gathered_in_between() -> None:
    for held, estimated in run_processes(held_and_estimated, 2, 3):
        assert 0.9 * estimated < held <= estimated


# -- leaf modules and recomputation -----------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_a_leaf_module_inside_of_a_block_needs_no_mark(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.ModuleDict({"experts": Experts()}) for _ in range(2)))
    found = deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    assert found == [model[0]["experts"], model[1]["experts"]]
    assert found == deepspeed.utils.set_z3_leaf_modules(model, ["Experts"])
    assert not caplog.records
    with pytest.raises(xds.UsageError, match="has no module of class .*Conv2d"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d])
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []


class SpecialExperts(Experts):
    pass


def test_leaf_modules_are_found_by_their_base_class() -> None:
    from xds.deepspeed.utils import (
        get_z3_leaf_modules,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )

    special = SpecialExperts()
    model = nn.Sequential(special, nn.Linear(4, 4))
    assert not z3_leaf_module(special)
    assert set_z3_leaf_modules(model, [Experts]) == [special]
    assert set_z3_leaf_modules(model, [nn.Linear, "SpecialExperts"])[0] is special
    assert set_z3_leaf_modules(model, ["Experts"], raise_if_not_found=False) == []  # by name: exact
    assert z3_leaf_module(special) and z3_leaf_module(model[1]) and not z3_leaf_module(model)
    assert unset_z3_leaf_modules(model, [nn.Linear]) == [*special.each, model[1]]
    assert get_z3_leaf_modules(model) == [special]


def test_a_wrong_config_is_caught_by_deepspeeds_name() -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        start(train_batch_sise=4)
    from xds.deepspeed.runtime.config import DeepSpeedConfigError

    assert DeepSpeedConfigError is xds.ConfigError


class WithTimers(nn.Module):
    """Has attributes whose names DeepSpeed's engine has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.timers = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.timers(self.layer(x))


def inner_names() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 6}
    engine, *_ = start(2, fp16=fp16, gradient_clipping=0.0)
    optimizer = engine.optimizer
    assert optimizer.loss_scaler.cur_scale == optimizer.loss_scale == 64
    assert optimizer.dynamic_loss_scale and not optimizer.custom_loss_scaler
    assert optimizer.optimizer is engine.basic_optimizer and optimizer._global_grad_norm == 0.0
    loss = engine(torch.ones(2, 4).half()).float().mean()
    optimizer.backward(loss * 0.25, retain_graph=True)  # not divided by the accumulation steps
    engine.step()
    engine.backward(loss * 0.5)
    engine.step()
    assert engine.was_step_applied() and optimizer._global_grad_norm > 0
    assert not engine.pld_enabled()
    for name in ("flops_profiler", "loaded_checkpoint_tag", "timers", "training_data"):
        assert not hasattr(engine, name)
        with pytest.raises(xds.UsageError, match=f"engine.{name} is not covered by xds.deepspeed"):
            getattr(engine, name)
    engine.destroy()
    adagrad, *_ = start(optimizer={"type": "Adagrad", "params": {}})
    assert adagrad.get_mom() == [0.0]
    adagrad.destroy()
    model = WithTimers()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of()
    )
    assert engine.timers is model.timers
    engine.destroy()


def test_what_scripts_read_of_the_engine_and_its_optimizer() -> None:
    run_processes(inner_names, 1)


def test_a_leaf_module_that_would_be_cut_is_told_how_to_stay_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleDict({"experts": Experts()})
    deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    assert '"zero_optimization": {"units": ["Experts"]}' in caplog.text


def test_checkpoint_recomputes_and_gives_the_same_gradients() -> None:
    layer, calls = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    deepspeed.checkpointing.configure(None, num_checkpoints=2)
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.checkpoint(layer, torch.ones(2, 4)).sum().backward()
    assert len(calls) == 2
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))
