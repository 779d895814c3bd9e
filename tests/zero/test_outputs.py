"""Stage 3 finds the tensors in any input and output of a module, also where torch's pytree does not."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds
from xds.zero.core.tensors import tensors_in

Pair = namedtuple("Pair", ["hidden", "other"])


@dataclass
class Output:
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class Slotted:
    __slots__ = ("hidden",)
    hidden: Tensor


class Mapped(dict):
    pass


class Anything:
    def __init__(self, hidden: Tensor) -> None:
        self.itself = self
        self.hidden = hidden


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda hidden: hidden, lambda output: output),
    "named tuple": (lambda hidden: Pair(hidden, None), lambda output: output.hidden),
    "dataclass": (Output, lambda output: output.hidden),
    "dataclass with slots": (Slotted, lambda output: output.hidden),
    "subclass of dict": (lambda hidden: Mapped(hidden=hidden), lambda output: output["hidden"]),
    "UserDict": (lambda hidden: UserDict(hidden=hidden), lambda output: output["hidden"]),
    "object": (Anything, lambda output: output.hidden),
    "nested": (lambda hidden: [Output(Mapped(a=hidden))], lambda output: output[0].hidden["a"]),
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(16, 16)

    def forward(self, inputs: Any) -> Any:
        wrap, unwrap = KINDS[self.kind]
        return wrap(torch.tanh(self.linear(unwrap(inputs))))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        wrap, unwrap = KINDS[self.kind]
        h = wrap(x)
        for block in self.blocks:
            h = block(h)
        return wrap(self.head(unwrap(h)).square().mean())


def train(kind: str) -> list[float | None]:
    torch.manual_seed(0)
    engine = xds.initialize(Model(kind), config(3, zero={"stage3_max_reuse_distance": 0}))
    found: list[float | None] = []
    for step in range(2):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(step))
        loss = KINDS[kind][1](engine(x))
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm()]
    engine.destroy()
    return found


def train_all() -> dict[str, list[float | None]]:
    return {kind: train(kind) for kind in KINDS}


def test_what_a_module_returns_may_be_any_object() -> None:
    for results in run_ranks(train_all, 2):
        for kind, found in results.items():
            assert found == results["tensor"], kind


def test_every_tensor_is_found_but_none_inside_of_modules() -> None:
    tensor = torch.ones(2)
    for wrap, _ in KINDS.values():
        (found,) = tensors_in(wrap(tensor))
        assert found is tensor
    assert tensors_in((nn.Linear(2, 2), "text", 1.0, None, Model)) == []
