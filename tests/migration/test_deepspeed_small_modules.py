"""Tests of small modules of `xds.deepspeed`: elasticity, versions, debugging, logging, devices, mpu objects."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.elasticity import DSElasticAgent, elasticity_enabled
from xds.deepspeed.elasticity import compute_elastic_config as compute
from xds.deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from xds.deepspeed.elasticity.elasticity import ensure_immutable_elastic_config
from xds.deepspeed.git_version_info import version
from xds.deepspeed.start import _with_defaults as with_defaults
from xds.deepspeed.utils import bwc, debug, nvtx
from xds.deepspeed.utils import logging as their_logging
from xds.deepspeed.utils.init_on_device import OnDevice
from xds.deepspeed.utils.module_utils import recursive_getattr, recursive_setattr
from xds.deepspeed.utils.torch import required_torch_version

# -- elasticity -------------------------------------------------------------------------------------------


def elastic(**more: Any) -> dict[str, Any]:
    section = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17]}
    return {"elasticity": {**section, "min_gpus": 32, "max_gpus": 1500, "version": 0.1, **more}}


def test_an_elastic_config_has_deepspeeds_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, ranks = compute(elastic(), version)[:2]
    assert (batch, len(ranks)) == (9792, 23) and all(batch % one == 0 for one in ranks)
    assert compute(json.dumps(elastic()), version, world_size=64)[2:] == (17,)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute(elastic(), version, return_microbatch=True)[2:] == (17,)
    assert elasticity_enabled(elastic()) and not elasticity_enabled({})


def test_elastic_mistakes_have_deepspeeds_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="world size = 128"):
        compute(elastic(), version, world_size=128)
    with pytest.raises(ElasticityConfigError, match="set WORLD_SIZE"):
        compute(elastic(), version, return_microbatch=True)
    for wrong in (
        {"min_gpus": -1},
        {"micro_batch_sizes": 5},
        {"enabled": False},
        {"version": "0.3"},
    ):
        with pytest.raises(ElasticityError):
            compute(elastic(**wrong), version)
    with pytest.raises(ElasticityError, match="needs at least 0.3.8"):
        compute(elastic(), "0.2")
    with pytest.raises(ValueError, match="max-restarts"):
        DSElasticAgent()


def test_a_schedulers_section_must_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = elastic()["elasticity"]
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(here))
    ensure_immutable_elastic_config(here)
    assert ElasticityConfig(here).micro_batches == [8, 12, 16, 17]
    with pytest.raises(ElasticityConfigError, match="max_acceptable_batch_size is 9000 here"):
        ensure_immutable_elastic_config({**here, "max_train_batch_size": 9000})


# -- versions, devices and names --------------------------------------------------------------------------


def test_versions() -> None:
    assert version == deepspeed.__version__.partition("+")[0]
    assert set(deepspeed.git_version_info.installed_ops) == set(deepspeed.ops.__compatible_ops__)
    assert required_torch_version(min_version=1.8) and not required_torch_version(max_version="2.0")
    with pytest.raises(AssertionError, match="needs min_version or max_version"):
        required_torch_version()


def test_a_model_is_built_on_a_device_in_a_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(3, 2)
        numbers = torch.arange(3)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert numbers.dtype == torch.int64 and torch.get_default_dtype() == torch.float32
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_attributes_by_a_name_with_dots() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    recursive_setattr(model, "0.0.weight", nn.Parameter(torch.ones(2, 2)))
    assert recursive_getattr(model, "0.0.weight").shape == (2, 2)


@pytest.mark.parametrize("name", ["tensor_model_parallel", "slice_parallel", "model_parallel"])
def test_an_mpu_object_of_any_age_is_read(name: str) -> None:
    answers = {"rank": 3, "world_size": 8, "group": "those"}
    mpu = type("Mpu", (), {f"get_{name}_{k}": lambda self, v=v: v for k, v in answers.items()})()
    assert bwc.bwc_tensor_model_parallel_rank(mpu) == 3
    assert bwc.bwc_tensor_model_parallel_world_size(mpu) == 8
    assert bwc.bwc_tensor_model_parallel_group(mpu) == "those"


def test_an_mpu_object_without_slices_has_one_rank() -> None:
    for mpu in (None, object()):
        assert bwc.bwc_tensor_model_parallel_rank(mpu) == 0
        assert bwc.bwc_tensor_model_parallel_world_size(mpu) == 1
        assert bwc.bwc_pipeline_parallel_world_size(mpu) == 1
        assert bwc.bwc_tensor_model_parallel_group(mpu) is None


# -- debugging and logging --------------------------------------------------------------------------------


@nvtx.instrument_w_nvtx
def scaled(value: int, scale: int = 2) -> int:
    """Documented."""
    return value * scale


def test_a_range_of_the_profiler_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        calls: list[str] = []

        def range_push(self, name: str) -> None:
            self.calls.append(name)

        def range_pop(self) -> None:
            self.calls.append("end")

    monkeypatch.setattr(nvtx, "get_accelerator", Device)
    assert scaled(3) == 6 and Device.calls == ["scaled", "end"]
    with pytest.raises(TypeError):
        scaled()  # type: ignore[call-arg]
    assert Device.calls[2:] == ["scaled", "end"]
    assert scaled.__doc__ == "Documented." and pickle.loads(pickle.dumps(scaled)) is scaled


def test_parameters_have_names_in_messages(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    debug.debug_extract_module_and_param_names(model)
    weight = model[0].weight
    said = "name=0.weight id=none shape=torch.Size([1, 2]) device=cpu"
    assert debug.debug_param2name_id_shape_device(weight) == said
    assert debug.debug_module2name_class(model[0]) == "name=0 Linear"
    assert debug.debug_param2name(torch.ones(1)) == "unknown"
    debug.print_backward_tensors(model(torch.ones(1, 2)))
    debug.printflock("one", 2)
    assert "one 2" in capsys.readouterr().out


def test_a_system_without_file_locks_prints_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    debug.printflock("printed")
    assert "printed" in capsys.readouterr().out


def test_levels_and_messages_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = dist.get_rank() if dist.is_initialized() else -1  # an earlier test may have started it
    mine = logging.getLogger("mine of a test")
    their_logging.set_log_level_from_string("error", mine)
    assert mine.level == logging.ERROR
    assert their_logging.should_log_le("critical")
    with pytest.raises(ValueError, match="must be one of debug"):
        their_logging.get_log_level_from_string("loud")
    logger: Any = their_logging.logger
    with caplog.at_level(logging.INFO, logger="xds"):
        for _ in range(2):
            logger.warning_once("only once of this test")
            their_logging.log_dist_once("once too", ranks=[0])
    assert [record.getMessage() for record in caplog.records] == [
        "only once of this test",
        f"[Rank {rank}] once too",
    ]
    their_logging.print_dist("shown", [0])
    assert f"[Rank {rank}] shown" in capsys.readouterr().out
    their_logging.print_json_dist({"loss": 1}, [0], str(tmp_path / "one.json"))
    assert json.loads((tmp_path / "one.json").read_text()) == {"loss": 1, "rank": rank}


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
