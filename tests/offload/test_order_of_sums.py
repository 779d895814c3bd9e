"""Tests: on one rank gradients are summed in the order of arrival, with and without offload, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xds


class Twice(nn.Module):
    """Calls one block `n` times, recomputed by the reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor, n: int = 1) -> Tensor:
        x = self.first(x)
        for _ in range(n):
            x = x + checkpoint(self.block, x, use_reentrant=True)
        out: Tensor = self.last(x)
        return out.float().square().mean()


def engine_of(
    precision: str, accumulation: int, *, offloads: bool, sums: str | None = None
) -> xds.Engine:
    torch.manual_seed(0)
    settings = config(
        2,
        precision,
        samples=4,
        accumulation=accumulation,
        optimizer="SGD",
        params={"lr": 0.1},
        zero={"offload_optimizer": {"device": "cpu"}} if offloads else {},
        data_types={"grad_accum_dtype": sums},
    )
    return xds.initialize(Twice(), settings)


def batch(precision: str) -> Tensor:
    return torch.randn(4, 8, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)


def norms(precision: str, calls: list[tuple[int, ...]], *, bare: bool, offloads: bool) -> list[Any]:
    """calls: for each micro-batch the calls of the block in each of its forwards."""
    engine = engine_of(precision, len(calls), offloads=offloads)
    found = []
    for _ in range(3):
        for forwards in calls:
            loss = sum((engine(batch(precision), n) for n in forwards), torch.zeros(()))
            if bare:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        found.append(engine.get_global_grad_norm())
    engine.destroy()
    return found


@pytest.mark.parametrize(("precision", "bare"), [("fp32", True), ("bf16", False)])
def test_gradients_that_arrive_twice(precision: str, bare: bool) -> None:
    for calls in ([(2,)], [(1, 1)], [(1,), (2,)], [(1, 1), (1,), (2,)], [(0,), (1,)]):
        one, other = (norms(precision, calls, bare=bare, offloads=on) for on in (False, True))
        assert one == other, calls


def test_no_sync_in_the_middle_of_a_step() -> None:
    results = []
    for offloads in (False, True):
        engine = engine_of("fp32", 2, offloads=offloads)
        for _ in range(3):
            engine.backward(engine(batch("fp32")))
            engine.step()
            with engine.no_sync():
                engine.backward(engine(batch("fp32")) / 2)
            engine.backward(engine(batch("fp32")) / 2)
            engine.step()
        results.append(engine.full_state_dict())
        engine.destroy()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 2), ("bf16", 1), ("bf16", 2)])
def test_sums_of_fewer_bits(precision: str, accumulation: int) -> None:
    results = []
    for offloads in (False, True):
        engine = engine_of(precision, accumulation, offloads=offloads, sums="bf16")
        for _ in range(2 * accumulation):
            engine.backward(engine(batch(precision)))
            engine.step()
        results.append((engine.get_global_grad_norm(), engine.full_state_dict(full_precision=True)))
        engine.destroy()
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


def test_a_gradient_that_a_script_writes_keeps_its_precision() -> None:
    results = []
    for offloads in (False, True):
        engine = engine_of("bf16", 1, offloads=offloads)
        engine.backward(engine(batch("bf16")))
        weight, value = engine.module.first.weight, torch.randn(8, 8) / 3  # type: ignore[union-attr]
        xds.zero.set_full_grad(weight, value)
        assert torch.equal(xds.zero.get_full_grad(weight), value)
        engine.step()
        results.append((engine.get_global_grad_norm(), engine.full_state_dict(full_precision=True)))
        engine.destroy()
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
