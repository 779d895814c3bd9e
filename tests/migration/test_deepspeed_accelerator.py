"""Tests of `get_accelerator`: what scripts ask of the CPU, and how another device is set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xds
from xds.deepspeed.accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from xds.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from xds.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from xds.engine.deepspeed.library import accelerator as own


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "ds_accelerator", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_the_current_device_is_one_that_torch_takes() -> None:
    found = get_accelerator()
    assert torch.ones(2, device=found.current_device()).device.type == found.device_name() == "cpu"
    assert found.current_device_name() == "cpu" and found.is_available()
    assert found is get_accelerator() and isinstance(found, DeepSpeedAccelerator)
    assert is_current_accelerator_supported()


def test_devices_of_a_cpu_are_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert get_accelerator().device_count() == 2  # what `xds` starts
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert get_accelerator().device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert get_accelerator().device_count() == 4


def test_memory_random_state_and_tensors_are_there_on_a_cpu() -> None:
    found = get_accelerator()
    assert 0 < found.available_memory() <= found.total_memory()
    assert 0 < found.memory_allocated() <= found.max_memory_allocated()
    assert found.memory_stats()["allocated_bytes.all.current"] > 0
    state = found.get_rng_state()
    first = torch.rand(3)
    found.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert found.IntTensor([0]).dtype == torch.int32 and found.current_stream() is None
    found.synchronize()
    with found.device(0), found.stream(None):
        assert found.on_accelerator(torch.ones(1))


def test_a_script_sets_a_device_of_its_own() -> None:
    class Other(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return "other"

    set_accelerator(Other())
    assert get_accelerator().device_name() == "other" and not is_current_accelerator_supported()
    wrong: Any = object()
    with pytest.raises(xds.UsageError, match="needs an object of a class that derives from"):
        set_accelerator(wrong)


def test_a_device_that_xds_does_not_train_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(
        ValueError, match="DS_ACCELERATOR = 'xpu': xds trains on cuda and cpu; unset"
    ):
        get_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert isinstance(get_accelerator(), CUDA_Accelerator)
