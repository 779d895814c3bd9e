"""`.grad` set between backward and step is refused, and training goes on as if it were not set.

The large weight has more than SMALL_NUMEL elements, the small ones stay in `.grad` until backward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SMALL_NUMEL, run_ranks
from runs import config
from torch import Tensor, nn

import xds

REFUSED = (
    r".*: it would not count, and is None again; .*xds\.zero\.set_full_grad, engine\.clip_grad_norm"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(8, 16)
        self.small = nn.Linear(16, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.large(x).relu()).square().mean()


assert Net().large.weight.numel() > SMALL_NUMEL > Net().small.weight.numel()
NAMES = ("large.weight", "small.weight", "small.bias", "unused")


def engine_of(stage: int, *, steps: int = 1) -> xds.Engine:
    torch.manual_seed(0)
    settings = config(stage, samples=4, accumulation=steps, optimizer="SGD", params={"lr": 0.5})
    return xds.initialize(Net(), settings)


def batch(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def backward(engine: xds.Engine, seed: int, *, own: bool) -> None:
    loss = engine(batch(seed))
    if own:
        loss.backward()
    else:
        engine.backward(loss)


def is_refused(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(
        xds.UsageError, match=rf"^{name}\.grad( .and . more.)? was set after backward{REFUSED}"
    ):
        call()


def train(stage: int, edits: bool, own: bool) -> dict[str, Tensor]:
    """Two steps of two micro-batches. With `edits` every `.grad` is set wherever it cannot count."""
    engine = engine_of(stage, steps=2)
    params = dict(engine.module.named_parameters())

    def tried(call: Callable[[], Any]) -> None:
        for name in NAMES if edits else ():
            params[name].grad = torch.ones_like(params[name])
            is_refused(call, name)
            assert params[name].grad is None

    for seed in range(4):
        backward(engine, seed, own=own)
        if own:
            assert engine._sharded.backward_pass.has_seen_one
            engine._sharded.backward_pass.end_script_backward()  # as any call of the engine does
        tried(engine.step)
        if seed % 2:
            tried(lambda: xds.zero.get_full_grad(params["large.weight"]))
            tried(lambda: engine.clip_grad_norm(1.0))
        engine.step()
        if not seed % 2:  # in the middle of the accumulation
            tried(lambda: engine.backward(engine(batch(9))))
    state = engine.state_dict()
    engine.destroy()
    return state


def both(stage: int) -> None:
    plain = train(stage, edits=False, own=False)
    for own in (False, True):
        edited = train(stage, edits=True, own=own)
        assert all(torch.equal(plain[name], edited[name]) for name in plain)


def test_training_goes_on_as_if_it_were_not_set() -> None:
    for stage in (0, 3):
        run_ranks(both, 2, stage)


def set_all(engine: xds.Engine) -> None:
    for param in engine.module.parameters():
        param.grad = torch.ones_like(param)


def held_back(stage: int) -> None:
    engine = engine_of(stage)
    for own in (True, False):
        with engine.no_sync():
            backward(engine, 0, own=own)
        engine._sharded.backward_pass.end_script_backward()  # as any call of the engine does
        set_all(engine)
        is_refused(lambda: engine(batch(1)), "unused")
        loss = engine(batch(1))
        if engine.global_rank == 1:  # a rank that catches it goes on with the others
            set_all(engine)
            is_refused(loss.backward if own else lambda loss=loss: engine.backward(loss), "unused")
        assert all(param.grad is None for param in engine.module.parameters())
        backward(engine, 1, own=own)
        engine.step()
    engine.destroy()


def test_it_is_refused_after_no_sync() -> None:
    for stage in (0, 3):
        run_ranks(held_back, 2, stage)


def before_backward(stage: int, folder: str) -> None:
    engine = engine_of(stage)
    for param in engine.module.parameters():
        param.grad = torch.zeros_like(param)  # counts, as in plain PyTorch: autograd adds to it
    backward(engine, 0, own=False)
    engine.step()
    set_all(engine)
    engine.zero_grad()
    assert all(param.grad is None for param in engine.module.parameters())
    engine.destroy()
    engine = engine_of(stage, steps=2)
    backward(engine, 0, own=False)
    engine.step()
    engine.module.small.bias.grad = torch.ones(2)
    with pytest.raises(xds.UsageError, match=r"small\.bias\.grad was set"):
        engine.save_checkpoint(folder)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_before_the_first_backward_it_counts_and_a_save_does_not_take_it(tmp_path: Path) -> None:
    run_ranks(before_backward, 1, 2, str(tmp_path))
