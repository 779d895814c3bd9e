"""Tests of small modules of `xds.deepspeed`: devices, idle keys, grids, checkpointing, lazy weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm_ranks import warm

import xds.deepspeed as deepspeed
from xds.deepspeed import checkpointing
from xds.deepspeed.pipe import PipelineModule
from xds.deepspeed.utils import zero_to_fp32
from xds.deepspeed.utils.init_on_device import OnDevice
from xds.engine.deepspeed.start import _with_defaults as with_defaults
from xds.utils.errors import UsageError


def test_a_model_is_built_on_a_device_in_a_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(3, 2)
        numbers = torch.arange(3)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert numbers.dtype == torch.int64 and torch.get_default_dtype() == torch.float32
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_what_has_no_effect_in_a_config_is_one_line_for_all_engines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL writes the key with a dot, for its second engine."""
    monkeypatch.setenv("RANK", "0")
    zero = {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": 5e8}
    config = {"train_batch_size": 1, "zero_optimization": zero}
    config["zero_optimization.reduce_bucket_size"] = 1024
    with caplog.at_level(logging.INFO, "xds"):
        for _ in range(2):
            with_defaults(config)
    dots, idle = (record.getMessage() for record in caplog.records)
    assert "(zero_optimization.reduce_bucket_size); TRL writes them" in dots
    assert idle.startswith("config: 2 keys have no effect (zero_optimization.sub_group_size, ")


def places() -> tuple[Any, ...]:
    deepspeed.init_distributed()
    model = PipelineModule([nn.Linear(1, 1), nn.Linear(1, 1)], num_stages=2)
    grid = model.mpu()
    stage = grid.get_pipeline_model_parallel_rank(), grid.get_pipeline_model_parallel_world_size()
    tensor = grid.get_tensor_model_parallel_rank(), grid.get_tensor_model_parallel_world_size()
    return dist.get_world_size(grid.get_pipe_parallel_group()), stage, tensor


def test_grids_have_groups() -> None:
    assert warm(2).run(places) == [(2, (rank, 2), (0, 1)) for rank in range(2)]


def test_detached_tensors_ask_for_gradients_as_before() -> None:
    x = torch.ones(1, requires_grad=True)
    found, number, frozen = checkpointing.detach_variable((x * 2, 3, torch.ones(1)))
    assert found.is_leaf and found.requires_grad and number == 3 and not frozen.requires_grad
    assert checkpointing.detach_variable((x,), device="meta")[0].is_meta
    with pytest.raises(UsageError, match="pass a tuple"):
        checkpointing.detach_variable([x])


def test_a_new_seed_changes_the_tracked_state_alone() -> None:
    before = torch.get_rng_state()
    try:
        checkpointing.model_parallel_cuda_manual_seed(7)
        outside = torch.get_rng_state()
        draws = []
        for seed in (1, 2, 1):
            checkpointing.model_parallel_reconfigure_tp_seed(seed)
            with checkpointing.get_cuda_rng_tracker().fork():
                draws.append(float(torch.rand(())))
        assert draws[0] == draws[2] != draws[1] and torch.equal(torch.get_rng_state(), outside)
        checkpointing.get_cuda_rng_tracker().reset()
        with pytest.raises(ValueError, match="there is no such state"):
            checkpointing.model_parallel_reconfigure_tp_seed(1)
    finally:
        torch.set_rng_state(before)


def test_a_universal_checkpoint_of_deepspeed_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "t_universal/zero/0.weight").mkdir(parents=True)
    torch.save({}, tmp_path / "t_universal/mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("t_universal")
    with pytest.raises(UsageError, match="universal checkpoint of DeepSpeed.* --tag ITS_TAG"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_lazy_weights_are_read_one_by_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    engine.save_checkpoint(tmp_path)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()

    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert lazy.keys() == expected.keys() and lazy["0.weight"] is lazy["1.weight"]
    assert lazy["0.weight"].shape == (4, 4) and lazy["0.weight"].numel() == 16
    assert all(torch.equal(one.contiguous(), expected[name]) for name, one in lazy.items())
