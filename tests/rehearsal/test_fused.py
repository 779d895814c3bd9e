"""Optimizers in fp32 on a CUDA device that is host memory: torch's class only where its fused kernel is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_ranks import ranks
from helpers import run_new_ranks, run_processes
from test_rehearsal import batch, build, config_of
from torch import Tensor

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run

# whose arithmetic runs, with masters on the device and on the host. A release of torch without the kernel: 2.11
FUSED = {
    ("Adam", True): ("xds", "xds"),  # xds's class, which calls torch's kernel
    ("AdamW", True): ("xds", "xds"),
    ("SGD", True): ("torch", "torch"),
    ("SGD", False): ("xds", "torch"),
    ("Adagrad", True): ("torch", "torch"),
    ("Adagrad", False): ("xds", "torch"),
}


@contextmanager
def without_fused(name: str) -> Iterator[None]:
    """torch's class refuses its fused kernel on CUDA, as Adagrad of torch 2.11 does."""
    kind = getattr(torch.optim, name)
    step = kind.step

    def refusing(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["fused"] and any(param.is_cuda for param in group["params"]):
                raise RuntimeError(
                    "`fused=True` requires all the params to be of supported devices"
                )
        return step(self, closure)

    kind.step = refusing
    try:
        yield
    finally:
        kind.step = step


def train(config: dict[str, Any]) -> tuple[str, list[float]]:
    """Whose class the optimizer is, and the losses."""
    import xds

    engine = xds.initialize(build(), config)
    losses: list[Tensor] = []
    for step in range(4):
        loss = engine(batch(step, engine.device, torch.float32)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    whose = type(engine.optimizer).__module__.partition(".")[0]
    engine.destroy()
    return whose, [loss.item() for loss in losses]


def train_with(name: str, is_there: bool, config: dict[str, Any]) -> tuple[str, list[float]]:
    if is_there:
        return train(config)
    with without_fused(name):
        return train(config)


@pytest.mark.parametrize(("name", "is_there"), FUSED)
def test_torchs_fused_kernels_run_where_they_exist(name: str, is_there: bool) -> None:
    config = config_of(1, "fp32", 1)
    config["optimizer"] = {"type": name, "params": {"lr": 1e-2, "eps": 1e-3}}
    if name == "SGD":
        config["optimizer"]["params"] = {"lr": 1e-2, "momentum": 0.9}
    ((_, expected),) = run_processes(train, 1, config)
    for place, wanted in zip(("none", "cpu"), FUSED[name, is_there], strict=True):
        config["zero_optimization"]["offload_optimizer"] = {"device": place}
        ((whose, losses),) = ranks(1).run(train_with, name, is_there, config)
        assert whose == wanted, place
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_on_a_gpu_the_kernels_of_device_and_host_train_alike(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = config_of(1, "fp32", 1)
    config["optimizer"] = {"type": name, "params": {"lr": 1e-2}}
    found = []
    for place in ("none", "cpu"):
        config["zero_optimization"]["offload_optimizer"] = {"device": place}
        found += run_new_ranks(train, 1, config)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
