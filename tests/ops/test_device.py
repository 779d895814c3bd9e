"""The device file: variables and counts of each kind, events of what has none, sums without fp64."""

from __future__ import annotations

import inspect
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import run_ranks
from models import build, micro_batch

import xds
from xds.ops import device as devices
from xds.ops.device import KINDS, HostEvent, device_of, device_type, kind_of, name_here
from xds.ops.kernels.decide import exact_square_sum, square_sum, square_sum_without_fp64
from xds.utils.errors import UsageError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "backend", "variable"),
    [
        ("cuda", "nccl", "CUDA_VISIBLE_DEVICES"),
        ("rocm", "nccl", "HIP_VISIBLE_DEVICES"),
        ("xpu", "xccl", "ZE_AFFINITY_MASK"),
        ("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
        ("hpu", "hccl", "HABANA_VISIBLE_MODULES"),
        ("mlu", "cncl", "MLU_VISIBLE_DEVICES"),
        ("mps", "gloo", ""),
        ("cpu", "gloo", ""),
    ],
)
def test_each_kind_has_its_collectives_and_its_variable(
    name: str, backend: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_built_for", lambda: "")
    monkeypatch.setenv("DS_ACCELERATOR", name)
    for key in devices.VISIBLE:
        monkeypatch.delenv(key, raising=False)
    assert name_here() == name and KINDS[name].backend == backend
    devices.show_only((0, 3))
    told = {key: os.environ.pop(key) for key in devices.VISIBLE if key in os.environ}
    assert told == ({variable: "0,3"} if variable else {})


def test_the_kind_of_a_machine_is_known_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    packages: set[str] = set()
    monkeypatch.setattr(devices, "_has", lambda package: package in packages)
    assert name_here() == "cuda"  # a build for CPUs: a driver is counted all the same
    packages.add("torch_npu")
    assert name_here() == "npu"
    monkeypatch.setattr(devices, "_built_for", lambda: "rocm")
    assert name_here() == "rocm"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")  # DeepSpeed's name of it
    assert name_here() == "rocm"
    for number in range(3):
        (tmp_path / f"davinci{number}").touch()
    rows = {"npu": devices.Kind("hccl", drivers=(f"{tmp_path}/davinci[0-9]*",))}
    monkeypatch.setattr(devices, "KINDS", rows)
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    assert devices.num_devices_of_driver() == 3


def test_a_device_that_torch_does_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    said = "DS_ACCELERATOR = 'npu': torch finds cpu here, and no such device; install a build of torch_npu"
    with pytest.raises(UsageError, match=said):
        device_type()
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="xpu")
    )
    for asked, found in (("", "xpu"), ("xpu", "xpu"), ("cpu", "cpu")):
        monkeypatch.setenv("DS_ACCELERATOR", asked)
        assert device_type() == found


def test_a_device_that_has_no_row_answers_yes() -> None:
    kind = kind_of("privateuseone")
    assert kind.has_streams and kind.pins_memory and kind.runs_ahead and kind.has_fp64
    assert (kind.backend, kind.visible, kind.library) == ("gloo", "", "")


def test_what_is_called_of_the_module_of_a_device_is_there() -> None:
    called = set(re.findall(r"\b_?module\.(\w+)", inspect.getsource(devices)))
    optional = {"cudart", "_get_default_mps_generator"}  # asked for first
    of_memory = {name for name in called if "memory" in name} | {"mem_get_info"}
    without = {
        torch.cuda: {"_get_default_mps_generator"},
        torch.xpu: optional,
        torch.mps: {*of_memory, "cudart", "default_generators", "device", "get_device_properties"},
    }
    assert len(called) > 11
    for module, lacks in without.items():
        assert {name for name in called if not hasattr(module, name)} <= lacks, module


def test_an_event_of_a_device_without_events_waits_for_the_device() -> None:
    waits: list[int] = []
    device: Any = SimpleNamespace(runs_ahead=True, synchronize=lambda: waits.append(1))
    event = HostEvent(device, timed=False)
    assert not event.query() and not waits
    event.synchronize(), event.synchronize()
    assert event.query() and len(waits) == 1
    first, second = (HostEvent(device, timed=True) for _ in range(2))
    assert len(waits) == 3 and first.query() and first.elapsed_time(second) >= 0


# -- sums without fp64 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-10, 1.0, 1e15, 3e37])
def test_sums_without_fp64_are_right_at_any_scale(scale: float) -> None:
    values = torch.randn(10_000_019, generator=torch.Generator().manual_seed(1)).clamp_(-6, 6)
    values[::7] *= 1e-6  # rows with elements of very different sizes
    values = values.mul_(scale)
    exact = values.double().square().sum()
    assert float((square_sum_without_fp64(values) - exact).abs() / exact) < 1e-6


def test_sums_without_fp64_of_few_of_wide_and_of_no_elements() -> None:
    mixed = torch.tensor([1e30, 1e-30, 0.0, -1e30])
    assert float(square_sum_without_fp64(mixed)) == pytest.approx(2e60)
    assert float(square_sum_without_fp64(torch.zeros(5000))) == 0
    assert float(square_sum_without_fp64(torch.zeros(0))) == 0
    for value in (torch.inf, -torch.inf, torch.nan):
        assert not square_sum_without_fp64(torch.tensor([1.0, value] * 900)).isfinite()
    narrow = torch.randn(3001).bfloat16()
    exact = float(narrow.double().square().sum())
    assert float(square_sum_without_fp64(narrow)) == pytest.approx(exact, rel=1e-6)


def norms(stage: int, kind: str = "AdamW") -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.1,
    }
    engine = xds.initialize(build("tied"), config)
    found = []
    for step in range(3):
        engine.backward(engine(micro_batch(step, 0, 2)))
        engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_training_asks_whether_there_is_fp64(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_ranks(norms, 2, stage)
    calls: list[int] = []
    monkeypatch.setattr(device_of(CPU), "has_fp64", False)
    kernel = square_sum_without_fp64
    where = "xds.ops.kernels.decide.square_sum_without_fp64"
    monkeypatch.setattr(where, lambda flat: calls.append(1) or kernel(flat))
    flat = torch.randn(3000)
    assert float(square_sum(flat)) == float(exact_square_sum(flat)) == float(kernel(flat))
    for without, of_plain in zip(run_ranks(norms, 2, stage), plain, strict=True):
        assert without == pytest.approx(of_plain, rel=2e-6)
    assert len(calls) > 2
    with pytest.raises(
        AssertionError, match="optimizer.type = Lamb: its norms need fp64.*set offload_"
    ):
        run_ranks(norms, 1, 0, "Lamb")
