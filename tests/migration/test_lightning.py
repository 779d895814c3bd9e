"""Lightning with DeepSpeedStrategy on two ranks by `xds --as-deepspeed`, and what it asks of the layer."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.runtime.activation_checkpointing import checkpointing
from xds.engine.deepspeed.library import activation_checkpointing as own

SCRIPT = Path(__file__).parent / "scripts" / "lightning_stock.py"


@pytest.mark.slow
def test_fabric_and_trainer_train_as_ddp_does_at_stages_1_to_3(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    start = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", "--as-deepspeed"]
    done = subprocess.run(
        [*start, str(SCRIPT)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("fabric", "trainer"):
        ddp, *stages = found[name]
        assert ddp[-1] < 0.7 * ddp[0]
        for losses in stages:
            assert losses == pytest.approx(ddp, rel=1e-5)
    assert found["threads"] == []  # 20 s after the end of the process group


def config_of(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
        **more,
    }


def classes() -> None:
    for kind in ("SGD", "Adagrad"):
        for precision in ("bf16", "fp32"):
            section = {"type": kind, "params": {"lr": 0.1}}
            config = config_of(optimizer=section, bf16={"enabled": precision == "bf16"})
            model = nn.Linear(4, 2)
            engine, optimizer, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            assert isinstance(optimizer.optimizer, getattr(torch.optim, kind))
            engine.destroy()


def test_sgd_and_adagrad_of_a_config_count_as_torchs() -> None:
    run_new_ranks(classes, 1)


def ends_with_the_group() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_of(watch={"heartbeat_seconds": 0.1})
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    (thread,) = [one for one in threading.enumerate() if one.name == "xds-watch"]
    dist.destroy_process_group()
    thread.join(60)
    assert not thread.is_alive()
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # the helper ends one


def test_the_watcher_ends_with_the_process_group() -> None:
    run_new_ranks(ends_with_the_group, 2)


def test_checkpoints_in_host_memory_are_accepted_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "_settings", own._Settings())
    own.warning_once.cache_clear()
    checkpointing.configure(None, checkpoint_in_cpu=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            weight = torch.ones(3, requires_grad=True)
            checkpointing.checkpoint(torch.exp, weight).sum().backward()
    assert len([one for one in caplog.messages if "checkpoint_in_cpu" in one]) == 1
