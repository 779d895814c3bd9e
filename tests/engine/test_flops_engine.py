"""The section `flops_profiler`: which steps are profiled, and the same counts at every stage and cut."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

import xds

ROWS, WIDTH, DEPTH = 4, 8, 4
LINEAR = ROWS * WIDTH * WIDTH  # MACs of one layer and micro-batch
PARAMS = DEPTH * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Model(nn.Module):
    """Blocks of one layer; returns the loss. Notes what is installed while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.recorded: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        self.recorded.append(bool(any(hooks) and _get_current_dispatch_mode()))
        assert any(hooks) == (_get_current_dispatch_mode() is not None)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def engine_of(*, accumulation: int = 1, more: dict[str, Any] | None = None, **section: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "flops_profiler": {"enabled": True, **section},
        **(more or {}),
    }
    return xds.initialize(Model(), config)


def train(engine: Any, steps: int, rows: int = ROWS) -> None:
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(rows, WIDTH)))
            engine.step()


def test_only_the_step_of_the_config_is_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(profile_step=2, accumulation=2)
    train(engine, 2)
    assert engine.flops_profile() is None and not capsys.readouterr().out
    train(engine, 2)
    assert engine.module.recorded == [False] * 4 + [True] * 2 + [False] * 2
    text = capsys.readouterr().out
    assert text.count("Profile of step 3\n") == 1
    found = engine.flops_profile()
    # figures are those of one of the two micro-batches
    assert (found.macs, found.params, found.num_batches) == (DEPTH * LINEAR, PARAMS, 2)
    assert found.flops == 2 * found.macs
    assert found.backward.macs == (2 * DEPTH - 1) * LINEAR
    assert found.seconds["step"] > 0
    assert re.search(r"fwd MACs per GPU: +1.02 KMACs", text)
    assert re.search(r"micro-batches of a step: +2", text)
    engine.destroy()


def test_several_steps_are_one_mean_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "profile.txt"
    engine = engine_of(profile_step=[1, 2], output_file=str(path), detailed=False)
    train(engine, 1)
    train(engine, 1, rows=2 * ROWS)
    assert not path.exists()
    train(engine, 2)
    assert engine.module.recorded == [False, True, True, False]
    assert engine.flops_profile().macs == 1.5 * DEPTH * LINEAR
    text = path.read_text()
    assert "Profile of step 2 to 3" in text and "Detailed" not in text
    assert not capsys.readouterr().out
    engine.destroy()


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(profile_step=0, output_file=str(tmp_path))
    with caplog.at_level(logging.WARNING, "xds"):
        train(engine, 1)
    assert "flops_profiler.output_file" in caplog.text
    assert "Profile of step 1" in capsys.readouterr().out
    engine.destroy()


def test_evaluation_in_a_profiled_step_does_not_count() -> None:
    engine = engine_of(profile_step=0)
    engine.backward(engine(torch.ones(ROWS, WIDTH)))
    engine.eval()
    engine(torch.ones(ROWS, WIDTH))
    engine.train()
    with torch.no_grad():
        engine(torch.ones(ROWS, WIDTH))
    engine.step()
    assert engine.flops_profile().macs == DEPTH * LINEAR
    engine.destroy()


def test_a_backward_that_the_script_calls_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(profile_step=0, recompute_fwd_factor=1.0)
    engine(torch.ones(ROWS, WIDTH)).backward()
    engine.step()
    text = capsys.readouterr().out
    assert engine.flops_profile().backward is None
    assert "not counted: the script called backward" in text and "estimated as 3 * fwd" in text
    engine.destroy()


# ---- several ranks --------------------------------------------------------------------------------


def counts_of(more: dict[str, Any], steps: int = 2) -> tuple[Any, ...]:
    engine = engine_of(more=more, detailed=False)
    train(engine, steps)
    found = engine.flops_profile()
    engine.destroy()
    return found.macs, found.flops, found.params, found.backward


def counts_at(cases: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [counts_of(case) for case in cases]


def test_every_stage_counts_the_same() -> None:
    """Whole parameters and products, with recomputation counted apart."""
    stages = [{"zero_optimization": {"stage": stage}} for stage in range(4)]
    again = [stage | {"activation_checkpointing": {}} for stage in stages]
    for found in run_ranks(counts_at, 2, stages + again):
        assert {(macs, params) for macs, _, params, _ in found} == {(DEPTH * LINEAR, PARAMS)}
        assert len({flops for _, flops, _, _ in found}) == 1
        assert {backward.macs for *_, backward in found} == {(2 * DEPTH - 1) * LINEAR}
        recomputed = [backward.recomputed_macs for *_, backward in found]
        assert recomputed == [0] * 4 + [DEPTH * LINEAR] * 4


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
}


def llama_counts(more: dict[str, Any]) -> tuple[Any, ...]:
    """Forward and backward MACs of this rank, its parameters, and those of the whole model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    whole = sum(param.numel() for param in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW"},
        "flops_profiler": {"enabled": True, "detailed": False},
        **more,
    }
    engine = xds.initialize(model, config)
    ids = torch.arange(32).view(2, 16)
    batches = iter([{"input_ids": ids, "labels": ids}] * 8)
    for _ in range(2):
        engine.train_batch(batches)
    found = engine.flops_profile()
    engine.destroy()
    return found.macs, found.backward.macs, found.params, whole


@pytest.mark.parametrize(
    "more",
    [
        {"pipeline": {"stages": 2, "schedule": "zero_bubble"}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
    ],
    ids=["zero-bubble", "tensor", "sequence"],
)
def test_ranks_that_share_a_model_count_their_parts(more: dict[str, Any]) -> None:
    (alone,) = run_ranks(llama_counts, 1, {})
    parts = run_ranks(llama_counts, 2, more)
    assert sum(part[0] for part in parts) == alone[0]
    assert sum(part[1] for part in parts) == alone[1]
    if "pipeline" in more:
        assert sum(part[2] for part in parts) == alone[3]
    elif "tensor_parallel" in more:
        assert all(alone[3] / 2 < part[2] < 0.6 * alone[3] for part in parts)
    else:
        assert [part[2] for part in parts] == [alone[3]] * 2
