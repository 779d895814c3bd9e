"""Weight gradients that are computed later: the bits of autograd, for every kind of layer, call and stage."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import run_ranks
from models import build, micro_batch
from runs import config
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import xds
from xds.pipe.weight_grads import WeightGrads
from xds.utils.errors import UsageError

IN, OUT = 7, 11
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Run = Callable[[nn.Module, Tensor], Tensor]


class Conv1D(nn.Module):
    """A linear layer as transformers' Conv1D: the weight is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(
            *x.shape[:-1], self.nf
        )


class Kept:
    """A model whose weight gradients are deferred; `run` gives each `.grad`, as autograd would leave it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls = 0
        self.grads = WeightGrads([model], self.take)

    def take(self, param: nn.Parameter, grad: Tensor) -> None:
        assert grad.shape == param.shape and grad.dtype == param.dtype
        self.calls += 1
        param.grad = grad if param.grad is None else param.grad + grad

    def backward(self, loss: Tensor, key: Any = 0) -> None:
        with self.grads.deferring(key):
            loss.backward()


def call(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def compare(model: nn.Module, x: Tensor, run: Run = call, *, deferred: int | None = None) -> Kept:
    """Gradients of `run(model, x)` with autograd, with the prepared layers, and deferred: the same bits.

    deferred: the parameters whose gradients must come later.
    """
    found = []
    kept = None
    for how in ("autograd", "at once", "later"):
        torch.manual_seed(0)
        own, inputs = copy.deepcopy(model), x.detach().requires_grad_(x.requires_grad)
        kept = None if how == "autograd" else Kept(own)
        out = run(own, inputs)
        loss = (out.float() * torch.randn(out.shape)).sum()
        if how == "later":
            assert kept is not None
            kept.backward(loss)
            missing = sum(p.grad is None and p.requires_grad for p in own.parameters())
            assert deferred in (None, missing)
            kept.grads.run(0)
            assert deferred in (None, kept.calls)
            assert not kept.grads.keys and not kept.grads.kept_bytes
        else:
            loss.backward()
        found.append([out.detach(), inputs.grad, *(p.grad for p in own.parameters())])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one, other) and one.dtype == other.dtype)
    assert kept is not None
    return kept


# -- layers and inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("linear", "no bias", "conv1d"))
def test_shapes_and_dtypes(kind: str) -> None:
    layer = Conv1D(OUT, IN) if kind == "conv1d" else nn.Linear(IN, OUT, bias=kind == "linear")
    for shape, dtype in zip(((IN,), (5, IN), (1, IN), (2, 5, IN)), 2 * DTYPES, strict=False):
        x = torch.randn(shape).to(dtype)
        for needs_grad in (True, False):
            compare(layer.to(dtype), x.requires_grad_(needs_grad), deferred=1 + (kind != "no bias"))


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.transpose(-1, -2)).transpose(-1, -2)

    for shape, bias in (((IN, 5), True), ((2, IN, 5), False), ((2, 1, IN, 5), True)):
        compare(nn.Linear(IN, OUT, bias=bias), torch.randn(shape).requires_grad_(), run)


def test_a_gradient_that_is_expanded() -> None:
    compare(nn.Linear(IN, OUT), torch.randn(5, IN), lambda m, x: m(x).sum(), deferred=2)


def test_frozen() -> None:
    for frozen in (("weight",), ("bias",), ("weight", "bias")):
        layer = nn.Sequential(nn.Linear(IN, IN), nn.Linear(IN, OUT))
        for name in frozen:
            getattr(layer[1], name).requires_grad_(False)
        compare(layer, torch.randn(5, IN), deferred=4 - len(frozen))


def test_a_module_called_twice_and_a_shared_weight() -> None:
    model = nn.Sequential(*(nn.Linear(IN, IN) for _ in range(3)))
    model[2].weight = model[0].weight
    kept = compare(model, torch.randn(5, IN), lambda m, x: m(m(x).tanh()) + m[1](x), deferred=5)
    assert kept.calls == 5  # each parameter once


def test_autocast() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(x)
            assert y.dtype == torch.bfloat16
            return y

    model = nn.Sequential(nn.Linear(IN, IN), nn.LayerNorm(IN), nn.Linear(IN, OUT), Conv1D(IN, OUT))
    compare(model, torch.randn(2, 5, IN), run, deferred=6)
    kept = Kept(nn.Linear(IN, IN))  # the input is kept in the dtype of autocast
    x = torch.randn(64, IN)
    kept.backward(run(kept.model, x).float().sum())
    assert kept.grads.kept_bytes <= 2 * x.numel() * 2
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # a cast inside of the layer is not reused outside of it
        kept.model(x)
        assert nn.functional.linear(x, kept.model.weight).requires_grad


@pytest.mark.parametrize("reentrant", (True, False))
def test_a_checkpoint_is_recomputed_once(reentrant: bool) -> None:
    calls: list[int] = []

    def block(x: Tensor, model: nn.Module) -> Tensor:
        calls.append(1)
        y: Tensor = model(x)
        return y

    def run(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, model, use_reentrant=reentrant)
        return y

    model = nn.Sequential(*(nn.Linear(IN, IN) for _ in range(4)))
    compare(model, torch.randn(5, IN).requires_grad_(), run, deferred=8)
    assert len(calls) == 3 * 2


# -- what is left alone -------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _own_forward() -> nn.Module:
    layer = nn.Linear(IN, IN)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    return layer


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": lambda: Doubled(IN, IN),
    "the instance's forward": _own_forward,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(IN, IN)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(IN, IN)),
    "not linear": lambda: nn.Bilinear(IN, IN, IN),
}


def test_layers_with_a_weight_or_forward_of_their_own_are_left_alone() -> None:
    for name, make in LEFT_ALONE.items():
        model = make()
        kind = type(model)
        grads = WeightGrads([model], lambda param, grad: None)
        assert grads.num_layers == 0 and type(model) is kind, name


def test_a_weight_that_another_module_uses() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(OUT, IN), "head": nn.Linear(IN, OUT)})
    model["head"].weight = model["embed"].weight
    compare(
        model,
        torch.randn(3, IN),
        lambda m, x: m["head"](x + m["embed"](torch.tensor([0, 2, 2]))),
        deferred=0,
    )


def test_calls_that_are_computed_at_once() -> None:
    layer = nn.Linear(IN, IN)
    seen: list[Tensor] = []
    layer.bias.register_hook(seen.append)
    kept = Kept(layer)
    kept.backward(layer(torch.randn(3, IN)).sum())  # a hook wants the gradient
    kept.backward(nn.Linear(IN, IN)(layer.weight).sum())  # not prepared
    layer.bias._backward_hooks.clear()
    kept.backward(layer(layer.weight[:2]).sum())  # a parameter as input: it may be dropped before W
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    kept.backward(compiled(torch.randn(3, IN)).sum())
    assert len(seen) == 1 and layer.weight.grad is not None and not kept.grads.keys
    with torch.no_grad():
        assert not layer(torch.randn(3, IN)).requires_grad
    torch.func.grad(
        lambda w: torch.func.functional_call(layer, {"weight": w}, torch.ones(IN)).sum()
    )(torch.ones(IN, IN))


def test_second_derivatives() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return slope.square()

    compare(nn.Linear(IN, OUT), torch.randn(3, IN).requires_grad_(), run)


# -- keys and life ------------------------------------------------------------------------------------------


def test_keys_and_freed_memory() -> None:
    model = nn.Sequential(nn.Linear(IN, IN), nn.Linear(IN, IN))
    kept = Kept(model)
    left: list[int] = []
    take = kept.take
    x = torch.randn(64, IN)
    kept.grads._sink = lambda p, g: (left.append(kept.grads.kept_bytes), take(p, g))
    for key in ((0, 0), (0, 1)):
        kept.backward(model(x).sum(), key)
    with kept.grads.deferring((0, 2)), kept.grads.deferring(None):
        model(x).sum().backward()
    assert kept.grads.keys == [(0, 0), (0, 1)] and kept.grads.kept_bytes > 0
    kept.grads.run((0, 1))
    assert kept.grads.keys == [(0, 0)] and len(left) == 4
    kept.grads.run((0, 1))  # nothing is left
    kept.grads.clear()
    assert not kept.grads.keys and len(left) == 4


def test_an_input_that_changes_before_its_weight_gradient() -> None:
    kept = Kept(nn.Linear(IN, OUT))
    x = torch.randn(3, IN)
    kept.backward(kept.model(x).sum())
    x.zero_()
    with pytest.raises(UsageError, match=r"weight of shape \(11, 7\) was changed in place.*copy"):
        kept.grads.run(0)


def test_names_copies_and_restore() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), Conv1D(IN, OUT))
    text, names = repr(model), list(model.state_dict())
    grads = WeightGrads([model, model[0]], lambda param, grad: None)
    assert grads.num_layers == 2
    assert repr(model) == text and list(model.state_dict()) == names
    assert (
        isinstance(model[0], nn.Linear)
        and model[0].__dict__.keys() == nn.Linear(1, 1).__dict__.keys()
    )
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(layer) for layer in other] == [nn.Linear, Conv1D]
        assert torch.equal(other[0].weight, model[0].weight)
    grads.restore()
    assert [type(layer) for layer in model] == [nn.Linear, Conv1D]


# -- with sharded gradients ---------------------------------------------------------------------------------


def trained(stage: int, how: str, **more: Any) -> list[Tensor]:
    """Losses, norms and parameters after two steps of two micro-batches. `together`: all weights at the end."""
    engine = xds.initialize(build("checkpointed"), config(stage, accumulation=2, **more))
    sharded, rank = engine._parts.sharded, engine.global_rank
    grads = WeightGrads(
        [] if how == "plain" else [engine.module], sharded.backward_pass.add_gradient
    )
    found = []
    for step in range(2):
        for micro_step in range(2):
            key = (rank, micro_step) if how != "plain" else None
            with engine.no_sync(), grads.deferring(key):
                loss = engine(micro_batch(2 * step + rank, micro_step, 2), rank)
                engine.backward(loss)
            found.append(loss.detach())
            if how != "together" or micro_step:
                for one in grads.keys:
                    grads.run(one)
            engine.step()
        found.append(torch.tensor(engine.get_global_grad_norm()))
    assert not grads.keys
    found += engine.full_state_dict().values()
    engine.destroy()
    return [tensor.clone() for tensor in found]


def same_sums() -> None:
    on_host = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    for stage, more in (
        (0, {"precision": "bf16"}),
        (1, {}),
        (2, on_host),
        (3, {"precision": "bf16"}),
    ):
        plain = trained(stage, "plain", **more)
        for how in ("held", "together"):
            own = trained(stage, how, **more)
            assert all(torch.equal(a, b) for a, b in zip(plain, own, strict=True)), (stage, how)


def test_every_stage_gets_the_same_sums() -> None:
    run_ranks(same_sums, 2)


def _add_inside_a_backward() -> str:
    engine = xds.initialize(build("plain"), config())
    sharded, weight = engine._parts.sharded, engine.module.head.weight
    loss = engine(micro_batch(0, 0, 2))
    loss.register_hook(
        lambda _: sharded.backward_pass.add_gradient(weight, torch.ones_like(weight))
    )
    try:
        engine.backward(loss)
    except UsageError as error:
        sharded.backward_pass.add_gradient(
            nn.Parameter(torch.ones(2)), torch.ones(2)
        )  # not trained: ignored
        sharded.backward_pass.add_gradient(weight, torch.ones_like(weight))
        assert torch.equal(xds.zero.get_full_grad(weight), torch.ones_like(weight))
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_gradient_is_added_outside_of_backward_only() -> None:
    (text,) = run_ranks(_add_inside_a_backward, 1)
    assert "call it after the backward" in text
