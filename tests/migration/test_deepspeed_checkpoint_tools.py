"""Tests of the tools in `xds.deepspeed.checkpoint`: files of DeepSpeed, lazy weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.utils import zero_to_fp32
from xds.utils.errors import UsageError

# -- files of DeepSpeed -----------------------------------------------------------------------------------


def test_a_universal_checkpoint_of_deepspeed_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "t_universal/zero/0.weight").mkdir(parents=True)
    torch.save({}, tmp_path / "t_universal/mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("t_universal")
    with pytest.raises(UsageError, match="universal checkpoint of DeepSpeed.* --tag ITS_TAG"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


# -- weights ----------------------------------------------------------------------------------------------


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
