"""Tests of checkpoints in `xds.deepspeed`: files beside them, universal ones, tags, optimizers."""

from __future__ import annotations

import os
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from torch import Tensor, nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.checkpoint import ds_to_universal
from xds.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from xds.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from xds.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from xds.deepspeed.utils import zero_to_fp32


class Tied(nn.Module):
    """Two layers with one weight, a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(self.first(x)))  # type: ignore[no-any-return]


def start(stage: int, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = Tied()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, steps: int = 2) -> None:
    for step in range(steps):
        engine.backward(engine(torch.full((2, 6), 1.0 + step)).square().mean())
        engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value for name, value in engine.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_weight_file_beside_a_checkpoint(tmp_path: Path) -> None:
    engine = start(2)
    train(engine)
    engine.save_checkpoint(tmp_path, tag="one", client_state={"epoch": 3})
    found = torch.load(tmp_path / "one/mp_rank_00_model_states.pt")
    assert same(found["module"], dict(engine.module.state_dict()))
    assert found["epoch"] == 3 and found["global_steps"] == 2
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in found["module"].values())

    engine.save_checkpoint(tmp_path, tag="one", exclude_frozen_parameters=True)
    there = torch.load(tmp_path / "one/mp_rank_00_model_states.pt")["module"]
    assert "first.weight" in there and "seen" in there and "frozen.weight" not in there
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "one")
    engine.destroy()

    engine = start(3)
    engine.save_checkpoint(tmp_path, tag="one")  # a rank has no whole weights now
    assert not list((tmp_path / "one").glob("*.pt"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("writer")])
def test_a_checkpoint_is_complete_where_the_weight_file_cannot_be_written(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(1)
    train(engine)
    with patch("torch.save", side_effect=error):
        assert engine.save_checkpoint(tmp_path, tag="one")
    assert "the checkpoint one is complete, but not mp_rank_00_model_states.pt" in caplog.text
    assert not list((tmp_path / "one").glob("*.pt*"))
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "one")
    engine.destroy()


def test_the_scripts_beside_a_checkpoint_write_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(3, bf16={"enabled": True})
    engine.save_checkpoint(tmp_path)
    masters = engine.full_state_dict(full_precision=True)
    words = [str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(words[0], run_name="__main__")
    found = torch.load(tmp_path / "out/pytorch_model.bin")
    assert same(found, masters)
    assert found["first.weight"] is found["second.weight"]
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)
    with pytest.raises(ValueError, match="Unsupported output dtype"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "no", dtype="int8")


def _universal(folder: str) -> bool:
    engine = start(1)
    train(engine)
    engine.save_checkpoint(folder, tag="t")
    if dist.get_rank() == 0:
        given = Namespace(input_folder=f"{folder}/t", output_folder=f"{folder}/t_universal")
        ds_to_universal.main(given)
    dist.barrier()
    again = start(3, seed=1, checkpoint={"load_universal": True})
    path, _ = again.load_checkpoint(folder)  # the tag is in latest_universal
    return bool(path == f"{folder}/t_universal" and same(weights(engine), weights(again)))


def test_a_universal_checkpoint_loads_at_another_stage(tmp_path: Path) -> None:
    assert run_processes(_universal, 2, str(tmp_path)) == [True, True]
    with pytest.raises(ValueError, match="exists already"):
        ds_to_universal.main(Namespace(input_folder=tmp_path / "t", output_folder=tmp_path / "t"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a checkpoint"):
        ds_to_universal.main(
            Namespace(input_folder=tmp_path / "empty", output_folder=tmp_path / "b")
        )


def _tags(folder: str) -> list[str]:
    for mode in ("ignore", "WARN"):
        engine = start(1, checkpoint={"tag_validation": mode})
        engine.save_checkpoint(folder, tag=f"{mode}{dist.get_rank()}")
        engine.destroy()
    engine = start(1, checkpoint={"tag_validation": "FAIL"})
    with pytest.raises(AssertionError, match="give every rank the same tag"):
        engine.save_checkpoint(folder, tag=f"fail{dist.get_rank()}")
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def test_different_tags_are_refused_or_that_of_rank_0_is_used(tmp_path: Path) -> None:
    assert run_processes(_tags, 2, str(tmp_path))[0] == ["WARN0", "ignore0"]


def _custom(folder: str) -> Any:
    engine = start(3)
    engine.save_checkpoint(folder)
    again = start(3, seed=1)

    def half(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    assert again.load_checkpoint(folder, custom_load_fn=half)[0]
    first = {name: value / 2 for name, value in weights(engine).items()}
    assert same(first, weights(again))
    again.load_module_state_dict({"module": weights(engine)})
    return same(weights(engine), weights(again))


def test_a_function_of_the_script_loads_weights(tmp_path: Path) -> None:
    assert run_processes(_custom, 2, str(tmp_path)) == [True, True]


def _optimizer(stage: int) -> Any:
    engine, again = start(stage), start(stage)
    kind = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    assert isinstance(engine.optimizer, kind)
    train(engine)
    train(again, steps=1)
    saved = clone_tensors_for_torch_save(engine.optimizer.state_dict())
    again.optimizer.load_state_dict(saved)
    states = engine.basic_optimizer.state.values(), again.basic_optimizer.state.values()
    for one, two in zip(*states, strict=True):
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(two[k])) for k in one)
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    numel = sum(flat.numel() for flat in getattr(engine.optimizer, name))
    with pytest.raises(ValueError, match="there are 2"):
        again.optimizer.load_state_dict([saved])
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    assert saved["partition_count"] == 2 and saved[key]["param_groups"] == saved["param_groups"]
    return numel


@pytest.mark.parametrize("stage", [1, 3])
def test_the_state_dict_of_the_optimizer(stage: int) -> None:
    first, second = run_processes(_optimizer, 2, stage)
    assert first + second >= 36 + 12  # the tied weight and two biases


def test_checkpoints_of_deepspeed_are_recognized(tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "latest").write_text("global_step1")
    torch.save({}, tmp_path / "global_step1/mp_rank_00_model_states.pt")
    engine = start(1)
    for load in (engine.load_checkpoint, zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint):
        with pytest.raises(xds.UsageError, match="xds checkpoint import"):
            load(tmp_path)


def test_a_script_may_replace_a_method_of_the_engine(tmp_path: Path) -> None:
    engine = start(0)
    with patch.object(engine, "save_checkpoint", return_value="mine") as mine:
        assert engine.save_checkpoint(tmp_path) == "mine" and mine.call_count == 1
    assert engine.save_checkpoint(tmp_path) is True


def test_copies_for_torch_save_keep_one_tensor_for_two_names() -> None:
    flat = torch.arange(10.0)
    found = clone_tensors_for_torch_save({"a": flat[:2], "b": [flat[2:4]], "c": ("x", 1)})
    assert found["a"].untyped_storage().nbytes() == 8 and found["c"] == ("x", 1)
    twice = clone_tensors_for_torch_save([flat, flat])
    assert twice[0] is twice[1] and twice[0] is not flat
