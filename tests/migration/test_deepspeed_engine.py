"""Tests of the results of `xds.deepspeed.initialize`: methods, values and refusals, at every precision."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import config, on_ranks, start, whole_values
from torch import nn
from torch.utils.data import SequentialSampler, TensorDataset

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.pipe import PipelineModule
from xds.deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from xds.engine.deepspeed.missing import MISSING_METHODS, NotCovered
from xds.engine.deepspeed.params import estimate
from xds.engine.deepspeed.training.values import _ANSWERS, _ATTRIBUTES, _CHECKED, _GIVEN

DATA = TensorDataset(torch.arange(64.0).view(16, 4) / 64)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))


def engine_of(stage: int = 0, precision: str = "fp32", **changes: Any) -> Any:
    return start(build(), stage, precision, accumulation=2, **changes)


def train(engine: Any, steps: int = 1, size: float = 1.0) -> None:
    dtype = engine.get_data_types()[0]
    for number in range(steps * engine.gradient_accumulation_steps()):
        batch = torch.full((2, 4), 0.1 * (number + 1), dtype=dtype)
        engine.backward(engine(batch).float().square().mean() * size)
        engine.step()


# -- initialize -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_initialize_gives_engine_optimizer_dataloader_and_scheduler() -> None:
    model = build()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=Namespace(deepspeed_config=config(1, accumulation=2), local_rank=0),
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
    assert deepspeed.initialize(model=build(), config=config(1))[2:] == (None, None)
    engine.lr_scheduler = None  # goes to the engine, which steps no schedule from now on
    train(engine)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)

    model = build()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizer": own, "model_parameters": model.parameters()}
    same = deepspeed.initialize(model=model, config_params=config(), **given)[1]
    assert same is own  # fp32 at stage 0: torch schedules take it


@on_ranks(1)
def test_gradients_are_clipped_at_deepspeeds_default_unless_the_config_says_otherwise() -> None:
    plain = config()
    del plain["gradient_clipping"]
    for given, expected in ((plain, 1.0), (config(), 0.0), (xds.Config.load(plain), 0.0)):
        engine = deepspeed.initialize(model=build(), config=given)[0]
        assert engine.gradient_clipping() == expected
    # and it is used: SGD moves no further than lr times the norm it clips to
    plain["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    engine = deepspeed.initialize(model=build(), config=plain)[0]
    before = torch.cat([p.flatten() for p in whole_values(engine)])
    train(engine, size=1e4)
    after = torch.cat([p.flatten() for p in whole_values(engine)])
    assert engine.get_global_grad_norm() > 10
    assert (after - before).norm().item() == pytest.approx(1.0, rel=1e-4)


class Mpu:
    """Like Megatron's, of a job whose ranks are all data-parallel, or half of them."""

    def __init__(self, model_parallel_size: int) -> None:
        self.size = model_parallel_size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


@on_ranks(2)
def test_an_mpu_may_name_the_ranks_that_share_slices() -> None:
    slices = {"tensor_parallel": {"autotp_size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}
    losses = []
    for mpu in (Mpu(2), Mpu(1), None):
        engine, *_ = deepspeed.initialize(model=build(), config=config(1) | slices, mpu=mpu)
        losses.append(engine(torch.ones(2, 4)).mean().item())
    assert losses == [losses[0]] * 3


@on_ranks(1)
def test_calls_that_cannot_work_are_refused_before_anything_is_done() -> None:
    both = {"model": build(), "config": config(1)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"config": config()}, "needs the torch.nn.Module to train"),
        ({"model": build()}, "got none of them: pass config= or --deepspeed_config"),
        (both | {"config_params": config()}, "got config and config_params"),
        (both | {"args": Namespace(deepspeed_config="a")}, "got config and args.deepspeed_config"),
        (both | {"mpu": Mpu(2)}, "mpu with a model-parallel size of 2"),
        (both | {"mesh_param": (1, 2)}, "must be their number"),
    ]
    for arguments, said in wrong:
        with pytest.raises(xds.UsageError, match=said):
            deepspeed.initialize(**arguments)
    engine, *_ = deepspeed.initialize(**both, mpu=Mpu(1), mesh_param=(1, 1))
    assert engine.data_parallel_group is None  # one rank: nothing to share
    for arguments, said in (
        ({"remote_device": "nvme"}, "set offload_param.device"),
        ({"zero_quantized_weights": True}, r"zero.Init\(zero_quantized_weights=...\)"),
    ):
        with pytest.raises(xds.UsageError, match=said):
            deepspeed.zero.Init(**arguments)
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        engine_of(train_batch_sise=4)
    assert deepspeed.DeepSpeedConfigError is xds.ConfigError


@pytest.mark.parametrize(
    "arguments, environment, said",
    [
        ({"dist_init_required": False}, {}, "dist_init_required = False, but torch.distributed"),
        (
            {},
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE = 4, but OMPI_COMM_WORLD_RANK is not",
        ),
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
    assert not dist.is_initialized()
    with pytest.raises(xds.UsageError, match=said):
        deepspeed.init_distributed(**arguments)
    assert not dist.is_initialized()


# -- questions and refusals -------------------------------------------------------------------------------


@on_ranks(2)
def test_the_engine_answers_deepspeeds_questions() -> None:
    engine = engine_of(3, fp16={"enabled": True, "initial_scale_power": 4})
    optimizer = engine.optimizer
    assert engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_gradients()
    assert engine.zero_optimization_partition_weights()
    assert engine.dynamic_loss_scale() and engine.loss_scale() == 0
    assert optimizer.cur_scale == optimizer.loss_scale == engine.initial_dynamic_scale() == 16
    assert engine.get_data_types() == (torch.float16, torch.float32)
    assert engine.get_batch_info() == (8, 2, 2)
    assert engine.get_type() == ["Adam"] and engine.optimizer_name() == "adamw"
    assert engine.scheduler_name() is None and engine.steps_per_print() is None
    assert engine.global_rank == engine.get_data_parallel_rank() == dist.get_rank()
    assert (engine.mpu, engine.mp_world_size, engine.dp_world_size) == (None, 1, 2)
    assert engine.wall_clock_breakdown() is False and engine.zero_cpu_offload() is False
    train(engine, steps=2)
    assert engine.global_steps == 2 and engine.was_step_applied() and not optimizer.overflow
    train(engine, size=1e30)
    assert optimizer.overflow and not engine.was_step_applied() and engine.skipped_steps == 1
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(2, 4).half()).float().sum())
    engine.empty_partition_cache()
    optimizer.zero_grad()  # left in by many scripts, and harmless
    assert engine.optimizer.state_dict()["param_groups"]


@on_ranks(1)
def test_what_the_engine_reads_from_its_config() -> None:
    engine = engine_of(2)
    for name in (*_CHECKED, *_GIVEN, *_ANSWERS):
        getattr(engine, name)()
    for name, value in _ATTRIBUTES.items():
        assert getattr(engine, name) == value, name
    assert engine.zero_reduce_bucket_size() == engine.zero_allgather_bucket_size() == 500_000_000
    assert engine.zero_sub_group_size() == 1_000_000_000
    assert engine.postscale_gradients() is True and engine.gradient_predivide_factor() == 1.0
    assert engine.zero_use_cpu_optimizer() is False
    assert engine.dynamic_loss_scale_args()["init_scale"] == 65536
    assert engine.communication_data_type == torch.float32 and not engine.pld_enabled()
    assert engine.dist_backend == dist.get_backend() and engine.pipeline_parallelism is False
    assert list(engine.param_names.values())[:2] == ["0.weight", "0.bias"]
    assert engine.collate_fn is None and engine.inside_no_sync_ctxt is False
    checks = engine.checkpoint_tag_validation_enabled, engine.checkpoint_tag_validation_fail
    assert [check() for check in checks] == [True, False]
    zero = {"reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 7}
    engine = engine_of(3, "bf16", zero=zero, checkpoint={"tag_validation": "Fail"})
    assert engine.zero_reduce_bucket_size() == 1000 and engine.zero_sub_group_size() == 7
    assert engine.zero_use_cpu_optimizer() is True
    assert engine.communication_data_type == torch.bfloat16
    assert engine.checkpoint_tag_validation_fail() is True
    engine.losses = 3
    assert engine.losses == 3


class WithTimers(nn.Module):
    """Has attributes whose names DeepSpeed's engine has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.timers = nn.Identity()


@on_ranks(1)
def test_what_the_engine_lacks_it_says_in_a_sentence() -> None:
    engine = engine_of(1)
    for name in MISSING_METHODS:
        assert not hasattr(engine, name), name
    hidden = ("buffered_allreduce_fallback", "_exec_schedule", "client_optimizer", "timers")
    for name in (*hidden, "flops_profiler", "loaded_checkpoint_tag", "training_data"):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"engine.{name} is not covered by xds.deepspeed"):
            getattr(engine, name)
    said = r"engine\.clip_fp32_gradients is not covered .* gradient_clipping"
    with pytest.raises(NotCovered, match=said):
        engine.clip_fp32_gradients()
    with pytest.raises(AttributeError, match=r"engine\.no_sync\(\)"):
        _ = engine.buffered_allreduce_fallback
    for name in ("fp32_groups_flat", "override_loss_scale"):
        with pytest.raises(xds.UsageError, match=f"optimizer.{name} is not covered"):
            getattr(engine.optimizer, name)
    with pytest.raises(xds.UsageError, match=r"engine.step\(lr_kwargs=\{'epoch': 1\}\)"):
        engine.step({"epoch": 1})
    with pytest.raises(AttributeError, match="neither xds.Engine nor Sequential has"):
        _ = engine.nonsense
    model = WithTimers()
    assert start(model).timers is model.timers


@on_ranks(1)
def test_what_scripts_read_of_the_engine_and_its_optimizer() -> None:
    engine = engine_of(2, fp16={"enabled": True, "initial_scale_power": 6})
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
    assert engine_of(kind="Adagrad").get_mom() == [0.0]
    # without an optimizer in the config it infers
    for stage in (0, 3):
        given = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
        engine, optimizer, *_ = deepspeed.initialize(model=build(), config=given)
        loss = engine(torch.ones(1, 4)).sum()
        assert optimizer is None and not loss.requires_grad
        with pytest.raises(AssertionError, match="only infers"):
            engine.backward(loss)


@on_ranks(1)
def test_no_sync_refuses_and_the_optimizer_tells_its_loss_scale() -> None:
    with pytest.raises(AssertionError, match="incompatible.*coalesce_grad_reduction"):
        engine_of(2).no_sync()
    engine = engine_of(1)
    with engine.no_sync():
        engine.backward(engine(torch.ones(1, 4)).sum())
        with pytest.raises(AssertionError, match="reentry is unsupported"):
            engine.no_sync()
        with pytest.raises(AssertionError, match="illegal to call Engine.step"):
            engine.step()
    optimizer = engine_of(0, "fp16").optimizer
    assert optimizer.dynamic_loss_scale and optimizer.cur_scale == 256
    optimizer = engine_of(0, "bf16").optimizer
    assert not optimizer.dynamic_loss_scale and optimizer.cur_scale == 1
    assert optimizer.low_precision_dtype == torch.bfloat16


@on_ranks(2)
def test_a_pipeline_module_knows_its_stage_before_initialize() -> None:
    model = PipelineModule([nn.Linear(4, 4) for _ in range(8)], num_stages=2)
    rank = dist.get_rank()
    assert model.stage_id == rank and model.parts == [0, 4, 8]
    assert (model._local_start, model._local_stop) == (4 * rank, 4 * rank + 4)


# -- data, weights, checkpoints ---------------------------------------------------------------------------


@on_ranks(2)
def test_deepspeed_io_deals_a_dataset_out_over_the_ranks() -> None:
    engine = engine_of()
    loader = engine.deepspeed_io(DATA, route="eval")
    mine = [value for (batch,) in loader for value in (batch[:, 0] * 16).tolist()]
    assert mine == [*range(dist.get_rank(), 16, 2)]
    assert len(engine.deepspeed_io(DATA, batch_size=4)) == 2
    assert len(engine.deepspeed_io(DATA, data_sampler=SequentialSampler(DATA))) == 8


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_whole_weights_are_saved_in_the_dtype_that_computes_and_checkpoints_come_back(
    stage: int, tmp_path: Path
) -> None:
    engine = engine_of(stage, "bf16")
    train(engine)
    assert engine.save_16bit_model(tmp_path, "weights.bin")
    saved = torch.load(os.path.join(tmp_path, "weights.bin"), weights_only=True)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    before = whole_values(engine)
    assert all(torch.equal(*pair) for pair in zip(saved.values(), before, strict=True))
    consolidated = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert (consolidated is None) == (dist.get_rank() > 0)
    assert list(engine.module_state_dict()) == list(build().state_dict())

    engine.save_checkpoint(tmp_path, tag=7, client_state={"epoch": 3})
    train(engine)
    numbers = torch.get_rng_state()
    path, client_state = engine.load_checkpoint(tmp_path, 7)
    assert torch.equal(torch.get_rng_state(), numbers)  # random generators are left alone
    assert path is not None and path.endswith("7")
    assert client_state["epoch"] == 3 and client_state["global_samples"] == engine.global_samples
    assert client_state["ds_version"].startswith("xds ")
    assert engine.global_steps == 1
    assert all(torch.equal(*pair) for pair in zip(whole_values(engine), before, strict=True))


@on_ranks(2, processes=True)
def test_a_model_is_built_in_slices_and_read_whole() -> None:
    plain = build()
    given = {"remote_device": "cpu", "pin_memory": True, "mpu": None}
    with deepspeed.zero.Init(config_dict_or_path=config(3), **given):
        model = build()
    engine = start(model, 3)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(found), wanted)
    train(engine)
    whole = deepspeed.utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    assert whole.shape == (8, 4)
    groups = deepspeed.utils.groups
    assert groups._get_data_parallel_world_size() == 2
    assert groups.get_model_parallel_world_size() == 1


# -- estimates --------------------------------------------------------------------------------------------


def held_and_estimated(stage: int, **kinds: bool) -> tuple[int, int]:
    """Bytes on the device; kinds: of `estimate.Offload`."""
    offload = {f"offload_{kind.removesuffix('s')}": {"device": "cpu"} for kind in kinds}
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    sizes = estimate.measure(model)
    section = {"stage": stage, "stage3_max_reuse_distance": 0, **offload}
    engine = start(model, stage, "bf16", zero_optimization=section)
    engine.backward(engine(torch.ones(2, 1024, dtype=torch.bfloat16)).float().mean())
    engine.step()
    plan, choice = engine.memory_plan(), estimate.Offload(**kinds)
    if kinds:
        host = estimate.host_bytes(*sizes, (2, 1), 1.0, True, choice)
        assert 2 * plan["host"] == pytest.approx(host, rel=0.03)
    return sum(plan.values()) - plan["host"], estimate.rank_bytes(stage, 2, *sizes, choice)


@on_ranks(2)
def test_an_estimate_covers_what_the_engine_holds() -> None:
    held, estimated = held_and_estimated(2)
    assert held == pytest.approx(estimated, rel=0.03)
    for stage, kinds, least in (
        (3, {}, 0.9),  # what is gathered in between
        (3, {"optimizer": True, "params": True}, 0.6),
        (2, {"optimizer": True}, 0.6),
    ):
        held, estimated = held_and_estimated(stage, **kinds)
        assert least * estimated < held <= estimated


# -- leaf modules -----------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class SpecialExperts(Experts):
    pass


def test_leaf_modules_are_found_by_class_and_told_how_to_stay_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = nn.Sequential(*(nn.ModuleDict({"experts": Experts()}) for _ in range(2)))
    found = set_z3_leaf_modules(inside, [Experts])
    assert found == [inside[0]["experts"], inside[1]["experts"]]
    assert found == set_z3_leaf_modules(inside, ["Experts"])
    assert not caplog.records  # inside of a block it needs no mark
    with pytest.raises(xds.UsageError, match="has no module of class .*Conv2d"):
        set_z3_leaf_modules(inside, [nn.Conv2d])
    assert set_z3_leaf_modules(inside, [nn.Conv2d], raise_if_not_found=False) == []

    special = SpecialExperts()
    model = nn.Sequential(special, nn.Linear(4, 4))
    assert not z3_leaf_module(special)
    assert set_z3_leaf_modules(model, [Experts]) == [special]
    assert set_z3_leaf_modules(model, [nn.Linear, "SpecialExperts"])[0] is special
    assert set_z3_leaf_modules(model, ["Experts"], raise_if_not_found=False) == []  # by name: exact
    assert z3_leaf_module(special) and z3_leaf_module(model[1]) and not z3_leaf_module(model)
    assert special._z3_leaf
    assert unset_z3_leaf_modules(model, [nn.Linear]) == [*special.each, model[1]]
    assert get_z3_leaf_modules(model) == [special]
    set_z3_leaf_modules(nn.ModuleDict({"experts": Experts()}), [Experts])
    assert '"zero_optimization": {"units": ["Experts"]}' in caplog.text
