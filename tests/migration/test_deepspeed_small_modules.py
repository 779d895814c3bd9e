"""Tests of small modules of `xds.deepspeed`: logging, devices."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from xds.deepspeed.utils.init_on_device import OnDevice
from xds.engine.deepspeed.start import _with_defaults as with_defaults

# -- versions, devices and names --------------------------------------------------------------------------


def test_a_model_is_built_on_a_device_in_a_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(3, 2)
        numbers = torch.arange(3)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert numbers.dtype == torch.int64 and torch.get_default_dtype() == torch.float32
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"


# -- debugging and logging --------------------------------------------------------------------------------


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
