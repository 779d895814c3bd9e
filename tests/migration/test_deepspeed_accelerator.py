"""Tests of `get_accelerator`: what scripts ask of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from xds.deepspeed.accelerator import get_accelerator
from xds.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    get_accelerator.__wrapped__.cache_clear()
    yield
    get_accelerator.__wrapped__.cache_clear()


def test_the_current_device_is_one_that_torch_takes() -> None:
    found = get_accelerator()
    assert torch.ones(2, device=found.current_device()).device.type == found.device_name() == "cpu"
    assert found.current_device_name() == "cpu" and found.is_available()
    assert found is get_accelerator()


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


def test_a_device_that_xds_does_not_train_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(
        ValueError, match="DS_ACCELERATOR = 'xpu': xds trains on cuda and cpu; unset"
    ):
        get_accelerator()
    get_accelerator.__wrapped__.cache_clear()
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert isinstance(get_accelerator(), CUDA_Accelerator)
