"""`deepspeed.profiling.flops_profiler` over the profiler of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xds.deepspeed as deepspeed
from xds.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from xds.utils.errors import UsageError


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4, bias=False))


MACS = 3 * (8 * 16 + 16 * 4)
FLOPS = 2 * MACS
PARAMS = 9 * 16 + 16 * 4


def test_a_model_is_profiled_in_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    model[3].eval()
    found = get_model_profile(model, (3, 8), as_string=False)
    assert found == (FLOPS, MACS, PARAMS)
    assert [part.training for part in model.modules()] == [True, True, True, True, False]
    assert "fwd MACs per GPU" in capsys.readouterr().out
    quiet = {"print_profile": False, "warm_up": 0}
    assert get_model_profile(model, args=[torch.ones(3, 8)], **quiet) == (
        "1.15 K",
        "576 MACs",
        "208",
    )
    assert not capsys.readouterr().out


def test_generate_is_profiled() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)  # type: ignore[no-any-return]

        def generate(self, x: Tensor, *, tokens: int) -> Tensor:
            for _ in range(tokens):
                x = self(x)
            return x

    kwargs = {"x": torch.ones(1, 8), "tokens": 5}
    found = get_model_profile(
        Writes(), kwargs=kwargs, print_profile=False, as_string=False, mode="generate"
    )
    assert found == (10 * 64, 5 * 64, 64)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({}, "needs input_shape, args or kwargs"),
        ({"input_shape": [1, 8]}, "input_shape = a list: must be a tuple"),
        ({"input_shape": (1, 8), "mode": "backward"}, 'must be "forward" or "generate"'),
    ],
)
def test_wrong_calls_say_what_is_needed(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        get_model_profile(model_of(), **arguments)
    with pytest.raises(UsageError, match=r"must be a torch.nn.Module"):
        get_model_profile(len, (1, 8))


def test_a_profiler_counts_between_start_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = model_of().eval(), torch.ones(3, 8)
    profiler = FlopsProfiler(model)
    with pytest.raises(UsageError, match="counted nothing yet"):
        profiler.get_total_flops()
    profiler.print_model_profile()  # nothing before the start
    assert not capsys.readouterr().out
    model(x)
    profiler.start_profile()
    model(x)
    model(x)
    profiler.stop_profile()
    model(x)
    assert profiler.get_total_macs() == 2 * MACS and profiler.get_total_params() == PARAMS
    assert profiler.get_total_flops(as_string=True) == "2.3 K"
    assert profiler.get_total_duration() > 0 and profiler.get_total_duration(True).endswith("s")
    profiler.print_model_profile(profile_step=7, module_depth=0, detailed=False)
    text = capsys.readouterr().out
    assert "Profile of step 7" in text
    profiler.reset_profile()
    assert profiler.get_total_macs() == 0
    profiler.start_profile(ignore_list=[nn.Linear])
    profiler.reset_profile()
    model(x)
    profiler.end_profile()
    assert (profiler.flops, profiler.macs, profiler.params) == (FLOPS, MACS, PARAMS)
    assert not vars(model).keys() & {"__flops__", "__macs__"}


def test_an_engines_numbers_of_ranks_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    engine = SimpleNamespace(
        world_size=8,
        dp_world_size=None,
        seq_dp_world_size=4,
        mp_world_size=2,
        train_micro_batch_size_per_gpu=lambda: 3,
    )
    profiler = FlopsProfiler(model := model_of(), engine, recompute_fwd_factor=1.0)
    profiler.start_profile()
    model(torch.ones(3, 8))
    profiler.print_model_profile(detailed=False)
    profiler.end_profile()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["data", "parallel", "size:", "4"] in lines
    assert ["model", "parallel", "size:", "2"] in lines
    assert any("3 * fwd" in " ".join(line) for line in lines)


def test_the_engine_has_a_profiler_where_the_config_enables_it() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    profiled = config | {"flops_profiler": {"enabled": True, "detailed": False, "step": 1}}
    engine, *_ = deepspeed.initialize(model=model_of(), config=profiled)
    assert engine.flops_profiler_enabled() and engine.flops_profiler_profile_step() == 1
    for _ in range(4):
        engine.backward(engine(torch.ones(3, 8)).sum())
        engine.step()
    profiler = engine.flops_profiler
    assert (profiler.macs, profiler.params) == (MACS, PARAMS)
    assert profiler.flops == FLOPS
    profiler.start_profile()  # by the script itself
    engine(torch.ones(1, 8))
    profiler.end_profile()
    assert profiler.macs == MACS / 3
    engine.destroy()
    other, *_ = deepspeed.initialize(model=model_of(), config=config)
    assert not hasattr(other, "flops_profiler") and not other.flops_profiler_enabled()
    other.destroy()
