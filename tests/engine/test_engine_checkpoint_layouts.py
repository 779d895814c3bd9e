"""Checkpoints load at any layout, and say so where a model is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn

import xds


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
        **more,
    }
    return xds.initialize(model, config)


def train(engine: Any, numbers: range, width: int) -> None:
    for number in numbers:
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x).float().square().mean())
        engine.step()


# -- frozen parameters --------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen matrix and a small trained one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.adapter = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def leave_out(folder: str, stages: tuple[int, int]) -> None:
    first = engine_of(Adapted(0), stages[0])
    train(first, range(2), 64)
    first.save_checkpoint(folder, "all")
    first.save_checkpoint(folder, "few", exclude_frozen_parameters=True)
    sizes = [
        sum(path.stat().st_size for path in (Path(folder) / tag).glob("rank_*"))
        for tag in ("all", "few")
    ]
    assert sizes[0] - sizes[1] > 4 * (64 * 64 + 64) * 0.9
    second = engine_of(Adapted(1), stages[1])
    own = second.full_state_dict(rank0_only=False)
    second.load_checkpoint(folder)
    saved, found = (one.full_state_dict(rank0_only=False) for one in (first, second))
    for name, value in found.items():
        assert torch.equal(value, (own if "base" in name else saved)[name]), name
    adapter_only = nn.ModuleDict({"adapter": nn.Linear(64, 64, bias=False)})
    with pytest.raises(xds.UsageError, match="the model does not have base.bias, base.weight"):
        engine_of(adapter_only, stages[1]).load_checkpoint(folder)


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(leave_out, 2, str(tmp_path), (3, 1))
    leave_out(str(tmp_path / "alone"), (0, 2))


def test_a_manifest_that_lacks_elements_is_refused(tmp_path: Path) -> None:
    from xds.engine.checkpoint.format import HEAD, NO_SUM, dump, parse

    engine = engine_of(Adapted(0), 0)
    engine.save_checkpoint(tmp_path)
    path = tmp_path / "global_step0" / "manifest.json"
    raw = json.loads(path.read_bytes())
    cut = raw["files"][0]["ranges"][0]
    cut["stop"] -= 64
    fresh = f'{HEAD}{NO_SUM}", {json.dumps({k: v for k, v in raw.items() if k != "sha256"})[1:]}'
    from hashlib import sha256

    path.write_bytes(fresh.replace(NO_SUM, sha256(fresh.encode()).hexdigest(), 1).encode())
    assert dump(parse(path.read_bytes(), "it"))
    with pytest.raises(xds.UsageError, match=r"contradicts itself: elements of .* in no file"):
        engine.load_checkpoint(tmp_path)
