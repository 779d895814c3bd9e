"""Tests of `deepspeed.monitor`: sections by DeepSpeed's names, and who writes what where."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import run_ranks

import xds
from xds.deepspeed.monitor.comet import CometMonitor
from xds.deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from xds.deepspeed.monitor.csv_monitor import csvMonitor
from xds.deepspeed.monitor.monitor import Monitor, MonitorMaster
from xds.deepspeed.monitor.tensorboard import TensorBoardMonitor
from xds.deepspeed.monitor.wandb import WandbMonitor


def test_sections_have_the_keys_and_defaults_of_the_config() -> None:
    found = get_monitor_config({"train_batch_size": 2, "wandb": {"group": "g", "team": "t"}})
    assert not found.enabled and (found.wandb.group, found.wandb.team) == ("g", "t")
    assert found.tensorboard == DeepSpeedMonitorConfig().tensorboard
    one = WandbMonitor(found.wandb)
    assert (one.enabled, one.group, one.project) == (False, "g", found.wandb.project)
    assert isinstance(one, Monitor)
    for kind, section in ((TensorBoardMonitor, found.tensorboard), (CometMonitor, found.comet)):
        assert not kind(section).enabled
    with pytest.raises(ValueError, match="comet.samples_log_interval"):
        get_monitor_config({"comet": {"samples_log_interval": -1}})


def write(folder: str) -> None:
    section = {"enabled": True, "output_path": folder, "job_name": "job"}
    master = MonitorMaster(get_monitor_config({"csv_monitor": section}))
    assert master.enabled and (master.csv_monitor is not None) == (
        torch.distributed.get_rank() == 0
    )
    master.write_events([("Train/loss", torch.tensor(0.5), 8), ("Train/lr", 1e-3, 8)])
    alone = csvMonitor(master.monitor_config.csv_monitor)
    assert (alone.enabled, alone.output_path, alone.job_name) == (True, folder, "job")
    alone.write_events([("Train/loss", 0.25, 16)])


def test_rank_0_writes_the_events(tmp_path: Path) -> None:
    run_ranks(write, 2, str(tmp_path))
    lines = (tmp_path / "job" / "Train_loss.csv").read_text().splitlines()
    assert lines == ["step,loss", "8,0.5", "16,0.25"]


def test_comet_starts_an_experiment_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock()
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=start))
    given: dict[str, Any] = {"enabled": True, "project": "p", "experiment_name": "mine"}
    monitor = CometMonitor(get_monitor_config({"comet": given}).comet)
    assert start.call_args.kwargs["project"] == "p" and monitor.experiment is start.return_value
    monitor.experiment.set_name.assert_called_once_with("mine")
    monitor.write_events([("loss", 1.0, 1), ("loss", 2.0, 2)])
    assert monitor.experiment.log_metric.call_count == 1 and monitor.samples_log_interval == 100


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    section = {"enabled": True, "output_path": str(tmp_path / "file")}
    with pytest.raises(xds.UsageError, match="csv_monitor.output_path"):
        csvMonitor(get_monitor_config({"csv_monitor": section}).csv_monitor)
