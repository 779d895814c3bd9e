"""Tests of the deepspeed layer's pipelines with few micro-batches, and of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_processes
from torch import nn

import xds.deepspeed as deepspeed
from xds import ConfigError
from xds.deepspeed.pipe import LayerSpec, PipelineModule

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}
BATCH = (torch.linspace(-1, 1, 8).view(2, 4), torch.tensor([0, 2]))


def layers() -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]


def start(seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    net = PipelineModule(
        layers(), num_stages=2, loss_fn=nn.CrossEntropyLoss(), seed_layers=True, base_seed=seed
    )
    config = {**CONFIG, **more}
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    return [engine.train_batch(iter([BATCH])).item() for _ in range(steps)]


def plain(steps: int) -> list[float]:
    """The same in one process."""
    net = nn.Sequential()
    for index, layer in enumerate(layers()):
        torch.manual_seed(1 + index)
        net.append(layer.build())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_num_steps=10)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(BATCH[0]), BATCH[1])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _one_micro_batch(folder: str) -> Any:
    engine = start(1)
    assert engine._engine.config.pipeline.schedule == "gpipe"
    losses = train(engine, 3)
    engine.save_checkpoint(folder)
    again = start(9)
    again.load_checkpoint(folder)
    assert again.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
    for one, two in zip(engine.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    more = train(engine, 2)
    assert more == train(again, 2)
    with pytest.raises(ConfigError, match="needs at least 2 micro-batches"):
        start(1, pipeline={"schedule": "1f1b"})
    return losses + more


def test_a_step_may_have_fewer_micro_batches_than_stages(tmp_path: Path) -> None:
    expected = plain(5)
    for losses in run_processes(_one_micro_batch, 2, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-5)


def _enough() -> str:
    steps = {"gradient_accumulation_steps": 2, "train_batch_size": 4}
    return str(start(1, **steps)._engine.config.pipeline.schedule)


def test_with_enough_micro_batches_the_schedule_is_1f1b() -> None:
    assert run_processes(_enough, 2) == ["1f1b", "1f1b"]


def _reads_data() -> list[Any]:
    data = [(torch.full((4,), float(at)), torch.tensor(at % 4)) for at in range(8)]
    net = PipelineModule(layers(), num_stages=2, loss_fn=nn.CrossEntropyLoss())
    engine = deepspeed.initialize(model=net, config=CONFIG, training_data=data)[0]
    for _ in range(2):
        engine.train_batch()
    return [batch[0][:, 0].tolist() for batch in engine.training_dataloader]


def test_a_pipeline_reads_its_data_in_order() -> None:
    assert run_processes(_reads_data, 2)[0] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
