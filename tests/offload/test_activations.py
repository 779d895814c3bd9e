"""Tests: inputs of recomputed blocks leave the device after forward, and come back bit for bit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from runs import config
from torch import Tensor, nn

import xds
from xds.offload import activations
from xds.offload.job_queues import IN_FLIGHT

WIDTH, DEPTH = 64, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.first(x), torch.ones(WIDTH)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def engine_of(*, on_host: bool, **zero: Any) -> xds.Engine:
    torch.manual_seed(0)
    section = {"enabled": True, "cpu_checkpointing": on_host}
    zero = {"units": ["Block"], **zero}
    return xds.initialize(Model(), config(samples=4, activation_checkpointing=section, zero=zero))


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


@pytest.fixture(autouse=True)
def moves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 1)


@pytest.mark.parametrize("offload", [{}, {"stage": 3, "offload_param": {"device": "cpu"}}])
def test_the_same_bits(offload: dict[str, Any]) -> None:
    results = []
    for on_host in (False, True):
        engine = engine_of(on_host=on_host, **offload)
        losses = []
        for step in range(4):
            loss = engine(batch(step))
            engine.backward(loss, retain_graph=step == 2)
            if step == 2:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        results.append((losses, engine.full_state_dict()))
        engine.destroy()
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name])


def alive_after_forward(engine: xds.Engine) -> tuple[int, Tensor]:
    """The block inputs that are still in memory, and the loss."""
    inputs: list[Any] = []

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(weakref.ref(args[0]))  # alive as long as anything refers to the tensor

    handles = [block.register_forward_pre_hook(note) for block in engine.module.blocks]
    loss = engine(batch(0))
    for handle in handles:
        handle.remove()
    assert len(inputs) == DEPTH
    return sum(ref() is not None for ref in inputs), loss


def test_inputs_leave_the_device() -> None:
    kept, gone = engine_of(on_host=False), engine_of(on_host=True)
    assert alive_after_forward(kept)[0] == DEPTH
    count, loss = alive_after_forward(gone)
    assert count <= IN_FLIGHT + 1
    gone.backward(loss)
    gone.step()
    for engine in (kept, gone):
        engine.destroy()


def test_a_small_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 64)
    offload = activations.ActivationOffload(torch.device("cpu"))
    small, large = torch.ones(15), torch.ones(16)
    assert offload.offload(small) is small
    moved = offload.offload(large)
    assert moved is not large and offload.restore(moved).equal(large)
    offload.close()
