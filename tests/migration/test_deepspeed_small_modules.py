"""Tests of small modules of `xds.deepspeed`: logging, devices."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xds.deepspeed.utils import logging as their_logging
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
