"""Ranks with different configs or models get one short sentence about what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from torch import nn

import xds

LR = {"type": "AdamW", "params": {"lr": 1e-2}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}


def engine_of(own: dict[str, Any], *, is_frozen: bool = False, **more: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(not is_frozen)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": LR, **own}
    return xds.initialize(model, config, **more)


def message(by_rank: list[dict[str, Any]], frozen_on_rank_1: bool = False) -> str:
    rank = dist.get_rank()
    with pytest.raises(xds.UsageError) as caught:
        engine_of(by_rank[rank], is_frozen=frozen_on_rank_1 and rank == 1)
    return str(caught.value)


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **more}}


OWN: list[tuple[dict[str, Any], str]] = [  # of rank 1, and what is said
    (zero(stage=1), "zero_optimization.stage = 0 on rank 0 and 1 on rank 1;"),
    (
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-2}}},
        'optimizer.type = "AdamW" on rank 0 and "Lion" on rank 1;',
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {**LR["params"], "betas": [0.5, 0.9]}}},
        "optimizer.params.betas = not given on rank 0 and [0.5, 0.9] on rank 1;",
    ),
    ({"gradient_clipping": 1.0}, "gradient_clipping = 0.0 on rank 0 and 1.0 on rank 1;"),
    ({"scheduler": WARMUP}, 'scheduler.type = not given on rank 0 and "WarmupLR" on rank 1;'),
    ({"bf16": {"enabled": True}}, "bf16.enabled = false on rank 0 and true on rank 1;"),
    ({"train_batch_size": 3}, "train_batch_size = 2 on rank 0 and 3 on rank 1"),  # 3 / 2 ranks
    ({"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size = 1 on rank 0 and 2 on rank 1;"),
    ({"watch": {"enabled": False}}, "watch.enabled = true on rank 0 and false on rank 1;"),
]


def messages() -> None:
    for own, found in OWN:
        said = message([{}, own])
        assert said.startswith("rank 1 has another config than rank 0: ")
        assert found in said and len(said) < 600, said
        assert said.endswith("; pass the same config on every rank")
    said = message([zero()] * 2, True)
    assert "another model than rank 0: parameter 1.weight float32[4, 4] (frozen) on rank 1" in said
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=[0.1, 0.2][dist.get_rank()])
    with pytest.raises(xds.UsageError, match="optimizer=, group 0, lr = 0.1 on rank 0 and 0.2 on"):
        xds.initialize(model, {"train_micro_batch_size_per_gpu": 1}, optimizer=optimizer)


def test_what_differs_is_named_with_the_values_of_all_ranks() -> None:
    run_ranks(messages, 2)


def test_many_ranks_and_many_keys_are_one_short_sentence() -> None:
    by_rank = [{}, {"gradient_clipping": 1.0}, {}, {"gradient_clipping": 1.0, **zero(stage=3)}]
    for said in run_ranks(message, 4, by_rank):
        assert "gradient_clipping = 0.0 on ranks 0, 2 and 1.0 on ranks 1, 3; " in said
        assert "zero_optimization.stage = 0 on ranks 0, 1, 2 and 3 on rank 3;" in said


def train_with(by_rank: list[dict[str, Any]]) -> None:
    engine = engine_of(by_rank[dist.get_rank()])
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()


def test_what_concerns_one_node_or_rank_0_alone_may_differ(tmp_path: Any) -> None:
    of_rank_0 = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    folders = [{"checkpoint": {"preemption_save_dir": str(tmp_path / name)}} for name in "ab"]
    prints: dict[str, Any] = {
        **{"steps_per_print": 1, "wall_clock_breakdown": True, "memory_breakdown": True},
        "comms_logger": {"verbose": True},
        "data_efficiency": {"data_sampling": {"dynamic_batching": {"verbose": True}}},
    }
    run_processes(train_with, 2, [{**of_rank_0, **prints, **folders[0]}, folders[1]])


def refusals(folder: str) -> list[str]:
    """Rank 1 alone cannot use its arguments."""
    is_wrong = dist.get_rank() == 1

    def fails(optimizer: Any) -> Any:
        if is_wrong:
            raise ValueError("no schedule")
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    weights = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": LR}
    calls: list[dict[str, Any]] = [
        {"config": f"{folder}/none.json" if is_wrong else config},
        {"config": {"train_micro_batch_size_per_gpu": -1} if is_wrong else config},
        {"config": config, "lr_scheduler": 3 if is_wrong else None},
        {"config": config, "lr_scheduler": fails},
        {"config": config, "weights": f"{folder}/none.safetensors" if is_wrong else weights},
        {"config": config, "training_data": 5 if is_wrong else [1, 2]},
    ]
    said = []
    for call in calls:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises((xds.UsageError, xds.ConfigError, ValueError)) as caught:
            xds.initialize(model, **call)
        said.append(str(caught.value))
    return said


def test_what_one_rank_alone_cannot_use_is_refused_on_all(tmp_path: Any) -> None:
    others, own = run_ranks(refusals, 2, str(tmp_path))
    for one, other in zip(own, others, strict=True):
        assert one.partition("\n")[0][:40] in other and "rank 1" in other, (one, other)
