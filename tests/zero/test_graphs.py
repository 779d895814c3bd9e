"""Graphs that use a unit's parameters in unusual ways: correct at every stage, without a crash."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import SMALL_NUMEL, run_ranks
from torch import Tensor, nn

import xds
from xds.zero.core.tensors import tensors_in

WIDTH = 12
assert WIDTH < SMALL_NUMEL < WIDTH**2  # gradients are copied in both ways


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([self.block(width) for _ in range(3)])
        self.last = nn.Linear(width, 1)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = block(x)
        return result

    def outputs(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        result: Tensor = self.last(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).square().mean()


class ViewBlock(nn.Module):
    """A prompt: what it returns is a view of its parameter, alone and in a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, width, width) / width)

    def forward(self, x: Tensor) -> Any:
        return self.table[0].expand(1, -1, -1), {"whole": (self.table, len(x))}


class Views(Net):
    block = ViewBlock

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        view, more = block(x)
        return x @ view[0] + x * more["whole"][0][1, 0] + x


class Holder:
    """A container that is not registered with torch's pytree."""

    def __init__(self, value: Tensor) -> None:
        self.itself = self
        self.value = value


@dataclass(frozen=True, eq=False)
class Slotted:
    __slots__ = ("value",)
    value: Tensor


class Mapped(dict):
    pass


def test_tensors_are_found_in_any_object_but_not_inside_of_modules() -> None:
    tensor, pair = torch.ones(2), namedtuple("Pair", ["one", "other"])
    kinds = [tensor, pair(tensor, None), Slotted(tensor), Mapped(a=tensor), UserDict(a=tensor)]
    for value in (*kinds, Holder(tensor), [Slotted(Mapped(a=tensor))]):
        (found,) = tensors_in(value)
        assert found is tensor
    assert tensors_in((nn.Linear(2, 2), "text", 1.0, None, nn.Linear)) == []


class HeldBlock(ViewBlock):
    """Tensors in objects, also in its input."""

    def forward(self, given: Any) -> Any:
        return Holder(given.value @ self.table[1]), Slotted(self.table[1])


class HeldViews(Net):
    block = HeldBlock

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        held, view = block(Slotted(x))
        return torch.tanh(held.value) + x @ view.value * 0.1 + x


class NothingBlock(Block):
    def forward(self, x: Tensor, box: list[Tensor] | None = None) -> Any:
        assert box is not None
        box.append(super().forward(x))


class Nothing(Net):
    """Blocks that return None."""

    block = NothingBlock

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        box: list[Tensor] = []
        block(x, box)
        return box[0]


class After(Net):
    """A weight that the model's own code uses after its block, one before it, and a frozen one."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.blocks[2].linear.weight.requires_grad_(False)

    def outputs(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.blocks[2].linear.weight)
        result: Tensor = super().outputs(x) + (x @ self.blocks[0].linear.weight).sum(-1, True)
        return result


class Penalty(Net):
    """WGAN-GP: the gradient of the outputs is a part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self.outputs(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + (grad.norm(dim=-1) - 1).square().mean()


class Passed(Net):
    """A parameter of the root goes into each unit as an input."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.token = nn.Parameter(torch.randn(1, width))

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) + block(self.token)  # type: ignore[no-any-return]


class OddParameters(Net):
    """Frozen int8 and bool parameters, and a layer without inputs."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for block in self.blocks:
            block.steps = nn.Parameter(torch.arange(8, dtype=torch.int8), requires_grad=False)
            block.mask = nn.Parameter(torch.tensor([True, False] * 4), requires_grad=False)
        self.none = nn.Linear(0, width)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        known = (block.steps * block.mask).sum()  # type: ignore[operator]
        return block(x) + self.none(x[..., :0]) + 0.01 * known  # type: ignore[no-any-return]


MODELS: list[type[Net]] = [Views, HeldViews, Nothing, After, Penalty, Passed, OddParameters]


def build(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:  # torch warns of layers without elements
        patch.setattr(nn.init, "kaiming_uniform_", _uniform)
        return kind(WIDTH)


def _uniform(tensor: Tensor, a: float = 0) -> Tensor:
    bound = (3 / max(tensor.shape[-1], 1)) ** 0.5 / 3**0.5
    with torch.no_grad():
        return tensor.uniform_(-bound, bound)


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(kind: type[Net]) -> list[float]:
    def parts(step: int) -> list[Tensor]:
        return [samples(step, rank) for rank in range(2)]

    return [one.norm for one in runs.plain(build(kind), 3, parts, optimizer="SGD", lr=0.05)]


SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (2, {}),
    (3, {"stage3_max_reuse_distance": 0, "overlap_comm": False}),
    (3, {"divergent_graphs": True}),
]


def start(model: nn.Module, stage: int, zero: dict[str, Any]) -> xds.Engine:
    return xds.initialize(
        model, runs.config(stage, optimizer="SGD", params={"lr": 0.05}, zero=zero)
    )


def train(kind: type[Net]) -> list[list[float]]:
    found = []
    for setting in SETTINGS:
        engine = start(build(kind), *setting)
        norms = []
        for step in range(3):
            x = samples(step, dist.get_rank())
            loss = engine(x)
            if step == 1:  # in between nothing may be dropped that the backward needs
                engine.eval()
                with torch.set_grad_enabled(kind is Penalty):
                    engine(x.detach().clone())
                engine.train()
            if step == 2:
                engine.backward(loss * 0.5, retain_graph=True)
                engine.backward(loss * 0.5)
            else:
                engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        engine.destroy()
        found.append(norms)
    return found


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_norms_are_those_of_plain_torch(kind: type[Net]) -> None:
    want = plain(kind)
    for of_rank in run_ranks(train, 2, kind):
        for setting, norms in zip(SETTINGS, of_rank, strict=True):
            assert norms == pytest.approx(want, rel=2e-4), setting


def evaluate() -> None:
    """A direct call of a part, whose result is a view of its parameter."""
    x = samples(0, 0)
    plain = build(Views).eval()
    for setting in SETTINGS[1:]:
        engine = start(build(Views), *setting).eval()
        with torch.no_grad():
            torch.testing.assert_close(engine(x), plain(x))
            view = engine.module.blocks[0](x)[0]
            torch.testing.assert_close(view[0], plain.blocks[0].table[0])
        engine.destroy()


def test_evaluation_of_views_is_right() -> None:
    run_ranks(evaluate, 2)


def count_hooks() -> list[int]:
    found = []
    for stage in (0, 3):
        model = build(Passed)
        engine = start(model, stage, {})
        kept = torch.ones(2, WIDTH, requires_grad=True)  # an input that a script keeps
        for _ in range(3):
            engine.backward(engine(kept))
            engine.step()
        assert isinstance(model, Passed)
        found.append(len(model.token._backward_hooks or {}) + len(kept._backward_hooks or {}))
        engine.destroy()
    return found


def test_no_hook_stays_on_a_parameter_that_is_an_input_of_units() -> None:
    for found in run_ranks(count_hooks, 2):
        assert found == [0, 0]


DTYPES = (
    *("float64", "float16", "bfloat16", "complex64", "bool", "uint8", "int8", "int16", "int32"),
    *("int64", "uint16", "uint32", "float8_e4m3fn"),
)


def spread_buffers() -> list[bool]:
    rank = dist.get_rank()
    values: dict[str, Tensor] = {name: torch.full((3,), rank + 1.0) for name in DTYPES}
    values = {name: value.to(getattr(torch, name)) for name, value in values.items()}
    values |= {
        "expanded": torch.full((1,), rank + 1.0).expand(4),
        "transposed": torch.full((3, 4), rank + 1.0).t(),
        "strided": torch.full((8,), rank + 1.0)[::2],
        "empty": torch.empty(0),
        "scalar": torch.tensor(rank + 1.0),
        "conjugate": torch.full((3,), rank + 1.0j).conj(),
    }
    model = build(Net)
    for name, value in values.items():
        model.register_buffer(f"of_{name}", value)
    engine = start(model, 2, {})
    first = torch.tensor(1.0)
    same = []
    for name, value in values.items():
        now = model.get_buffer(f"of_{name}")
        want = 0.0 - 1.0j if name == "conjugate" else first
        whole = now.to(torch.complex64 if now.is_complex() else torch.float32)
        same.append(
            bool((whole == want).all()) and now.shape == value.shape and now.dtype == value.dtype
        )
    engine.destroy()
    return same


def test_buffers_of_every_kind_begin_as_rank_0s() -> None:
    for same in run_ranks(spread_buffers, 2):
        assert all(same), same


def ask_autograd() -> None:
    """torch.autograd.grad, vmap and inference mode beside training."""
    x = samples(0, dist.get_rank())
    for setting in SETTINGS[1:3]:
        with torch.inference_mode(), pytest.raises(xds.UsageError, match="inference_mode"):
            start(build(Net), *setting)
        model, plain = build(Net), build(Net)
        engine = start(model, *setting)
        loss = engine(x)
        (own,) = torch.autograd.grad(loss, [model.first.weight], retain_graph=True)
        (want,) = torch.autograd.grad(plain(x), [plain.first.weight])
        torch.testing.assert_close(own, want)
        engine.backward(loss)
        engine.step()
        for rank in range(engine.world_size):
            (plain(samples(0, rank)) / engine.world_size).backward()
        total = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
        assert engine.get_global_grad_norm() == pytest.approx(total, rel=1e-4), setting
        assert torch.func.vmap(model.outputs)(x).shape == (2, 1)
        engine.destroy()


def test_autograd_grad_and_vmap_beside_training() -> None:
    run_ranks(ask_autograd, 2)
