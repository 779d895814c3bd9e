"""Forwards and graphs that use parameters in unusual ways: numbers of plain PyTorch, nothing left gathered."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import SMALL_NUMEL, run_ranks
from models import build as tiny
from models import micro_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import xds
from xds import zero
from xds.zero.core.hooks import tensors_in
from xds.zero.core.param_bucket import ParamBucket

WIDTH = 12
assert WIDTH < SMALL_NUMEL < WIDTH**2  # gradients are copied in both ways


# -- what a forward may do with parameters ------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, 1)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    def outputs(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).square().mean()


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


class HeldBlock(nn.Module):
    """Tensors in objects, also in its input; one is a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, given: Any) -> Any:
        return Holder(given.value @ self.table[1]), Slotted(self.table[1])


class HeldViews(Net):
    block = HeldBlock

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        held, view = block(Slotted(x))
        return torch.tanh(held.value) + x @ view.value * 0.1 + x


class Borrows(Net):
    """Weights that the model's own code uses before and after recomputed blocks, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight.requires_grad_(False)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    def outputs(self, x: Tensor) -> Tensor:
        # backward needs this frozen weight after its block, and before a layer of the root
        x = torch.tanh(self.first(x) @ self.blocks[2].linear.weight)
        y = x
        for block in self.blocks:
            y = self.call(block, y)
        x = self.last(y) + (x @ self.blocks[0].linear.weight).sum(-1, True)
        return x * self.blocks[1].linear.bias


class Calling(nn.Module):
    """Calls another unit, which uses this one's weight, between two uses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return other(x @ self.weight, self) @ self.weight  # type: ignore[no-any-return]


class Called(Block):
    def forward(self, x: Tensor, caller: Calling) -> Tensor:  # type: ignore[override]
        return torch.tanh(self.linear(x) @ caller.weight)


class Nested(Net):
    block = Called

    def __init__(self) -> None:
        super().__init__()
        self.calling = nn.ModuleList([Calling() for _ in range(3)])

    def outputs(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one, other in zip(self.calling, self.blocks, strict=True):
            x = x + other(x, one)  # the weight of `one` is dropped: from now on both are gathered
            x = x + one(x, other)
        return self.last(x)  # type: ignore[no-any-return]


MODELS = [HeldViews, Borrows, Nested]  # tests/fuzz has others
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (2, {}),
    (3, {"stage3_max_reuse_distance": 0, "overlap_comm": False}),
    (3, {"divergent_graphs": True}),
]
UNITS = {Nested: {"units": ["Calling", "Called"]}}


def build(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind()


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def start(model: nn.Module, stage: int = 3, zero: dict[str, Any] | None = None) -> xds.Engine:
    zero = {"stage3_max_reuse_distance": 0} if zero is None else zero
    return xds.initialize(
        model, runs.config(stage, optimizer="SGD", params={"lr": 0.05}, zero=zero)
    )


def forgotten(engine: xds.Engine) -> bool:
    """Nothing is gathered."""
    return not any(flat.is_unsharded for unit in engine._sharded.units for flat in unit.params)


def train(kind: type[Net]) -> list[list[float]]:
    found = []
    for stage, section in SETTINGS:
        engine = start(build(kind), stage, section | UNITS.get(kind, {}))
        norms = []
        for step in range(3):
            x = samples(step, dist.get_rank())
            loss = engine(x)
            if step == 1:  # in between nothing may be dropped that the backward needs
                engine.eval()
                with torch.no_grad():
                    engine(x)
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
    def parts(step: int) -> list[Tensor]:
        return [samples(step, rank) for rank in range(2)]

    plain = runs.plain(build(kind), 3, parts, optimizer="SGD", lr=0.05)
    want = pytest.approx([step.norm for step in plain], rel=2e-4)
    for of_rank in run_ranks(train, 2, kind):
        for setting, norms in zip(SETTINGS, of_rank, strict=True):
            assert norms == want, setting


def test_tensors_are_found_in_any_object_but_not_inside_of_modules() -> None:
    tensor, pair = torch.ones(2), namedtuple("Pair", ["one", "other"])
    kinds = [tensor, pair(tensor, None), Slotted(tensor), Mapped(a=tensor), UserDict(a=tensor)]
    for value in (*kinds, Holder(tensor), [Slotted(Mapped(a=tensor))]):
        (found,) = tensors_in(value)
        assert found is tensor
    assert tensors_in((nn.Linear(2, 2), "text", 1.0, None, nn.Linear)) == []


def beside_training() -> None:
    """torch.autograd.grad, vmap, inference mode, and inputs that a script keeps."""
    kept = samples(0, dist.get_rank()).requires_grad_()
    for setting in SETTINGS[1:3]:
        with torch.inference_mode(), pytest.raises(xds.UsageError, match="inference_mode"):
            start(build(Net), *setting)
        model, plain = build(Net), build(Net)
        engine = start(model, *setting)
        loss = engine(kept)
        (own,) = torch.autograd.grad(loss, [model.first.weight], retain_graph=True)
        (want,) = torch.autograd.grad(plain(kept), [plain.first.weight])
        torch.testing.assert_close(own, want)
        for _ in range(2):
            engine.backward(loss if loss.grad_fn else engine(kept))
            engine.step()
            loss = loss.detach()
        assert not kept._backward_hooks  # no hook stays
        assert len(torch.func.vmap(model.outputs)(kept.detach())) == 2
        engine.destroy()


def test_autograd_grad_and_vmap_beside_training() -> None:
    run_ranks(beside_training, 2)


def by_vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x).square().mean()


def by_jvp(model: nn.Module, x: Tensor) -> Tensor:
    value, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return value.square().mean() + slope.square().mean()


def by_vjp(model: nn.Module, x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(model, x)
    return value.square().mean() + pull(torch.ones_like(value))[0].square().mean()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def transformed() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    for loss_of in (by_vmap, by_jvp, by_vjp):
        plain = layers()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        given = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": sgd,
            "zero_optimization": section,
        }
        engine = xds.initialize(layers(), given)
        for _ in range(2):
            loss_of(plain, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(loss_of(engine.module, x))
            engine.step()
        torch.testing.assert_close(engine.full_state_dict(rank0_only=False), plain.state_dict())
        with pytest.raises(xds.UsageError, match="deepcopy of a Linear .* is not whole"):
            torch.optim.swa_utils.AveragedModel(engine.module)
        with xds.zero.GatheredParameters(list(engine.module.parameters())):
            average = torch.optim.swa_utils.AveragedModel(engine.module)
        torch.testing.assert_close(average(x), plain(x))
        engine.destroy()


def test_transforms_of_the_model_train_and_a_copy_of_it_in_shards_is_one_sentence() -> None:
    run_ranks(transformed, 2)


DTYPES = (
    *("float64", "float16", "bfloat16", "complex64", "bool", "uint8", "int8", "int16", "int32"),
    *("int64", "uint16", "uint32", "float8_e4m3fn"),
)


def spread_buffers() -> None:
    rank = dist.get_rank()
    values: dict[str, Tensor] = {
        name: torch.full((3,), rank + 1.0).to(getattr(torch, name)) for name in DTYPES
    }
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
    start(model, 2).destroy()
    for name, value in values.items():
        now = model.get_buffer(f"of_{name}")
        want = 0.0 - 1.0j if name == "conjugate" else torch.tensor(1.0)
        whole = now.to(torch.complex64 if now.is_complex() else torch.float32)
        assert (whole == want).all() and (now.shape, now.dtype) == (value.shape, value.dtype), name


def test_buffers_of_every_kind_begin_as_rank_0s() -> None:
    run_ranks(spread_buffers, 2)


# -- forwards outside of training ---------------------------------------------------------------------------


def evaluated() -> None:
    model, plain = tiny("plain"), tiny("plain")
    engine = start(model)
    batch = micro_batch(0, 0)
    with torch.no_grad():
        want = float(plain(batch))
        assert float(engine.eval()(batch)) == want
    assert not forgotten(engine)  # the next forward needs no message
    with torch.inference_mode():
        assert float(engine(batch)) == want
    with torch.no_grad():
        assert float(engine.eval_batch(iter([batch]), 1)) == pytest.approx(want)
    engine.train()
    loss = engine(batch)  # a forward without a backward
    del loss
    with torch.no_grad():
        assert float(engine(batch)) == want
        assert forgotten(engine)  # in training mode
        layer, other = model.blocks[1].up, plain.blocks[1].up  # a layer inside of a unit
        torch.testing.assert_close(layer(torch.ones(2, 24)), other(torch.ones(2, 24)))


def test_evaluation_needs_no_backward_and_drops_in_training_mode_what_it_gathered() -> None:
    run_ranks(evaluated, 2)


def in_parts() -> None:
    """The model is never called as a whole: a unit, layers inside of one, the head."""
    model, plain = build(Net), build(Net)
    engine = start(model)

    def loss_of(net: Net, x: Tensor) -> Tensor:
        x = net.blocks[0](x)
        x = torch.tanh(net.blocks[1].linear(x)) + net.blocks[2].linear(x)
        return net.last(net.blocks[1].linear(x)).square().mean()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(plain, samples(step, rank)) / 2).backward()
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
        optimizer.step()
        kept = samples(step, dist.get_rank()).requires_grad_()
        engine.backward(loss_of(engine.module, kept))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(want, rel=1e-5)
        assert not kept._backward_hooks  # a script that uses it again collects none


def test_parts_of_the_model_are_called_directly() -> None:
    run_ranks(in_parts, 2)


class Late(Net):
    """Uses a block's weight from the sixth step on, after the forwards that are checked."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = super().outputs(x) * (x @ self.blocks[0].linear.weight if self.calls > 5 else x)
        return x.square().mean()


def registered() -> None:
    model, plain = build(Late), build(Late)
    zero.register_external_parameter(model, model.blocks[0].linear.weight)  # no engine owns it yet
    engine = start(model)
    zero.register_external_parameter(model, model.blocks[0].linear.weight)
    with pytest.raises(xds.UsageError, match="the module is not part of the engine's model"):
        zero.register_external_parameter(plain, model.blocks[0].linear.weight)
    for _ in range(8):
        loss = engine(samples(0, 0))
        assert loss.item() == pytest.approx(plain(samples(0, 0)).item(), rel=1e-6)
        engine.backward(loss)
        engine.zero_grad()


def test_a_late_use_can_be_registered() -> None:
    run_ranks(registered, 2)


def unequal(stage: int) -> None:
    engine, rank = start(tiny("plain"), stage), dist.get_rank()
    batch = micro_batch(0, 0)
    want = tiny("plain")(batch).item()
    with engine.uneven_forwards(), torch.no_grad():
        for _ in range(3 * rank + 1):
            assert engine(batch).item() == want
        if rank == 0:
            assert engine.module.blocks[2](torch.ones(1, 24)).isfinite().all()
    if stage == 3:
        assert forgotten(engine)
        with pytest.raises(xds.UsageError, match=r"backward inside uneven_forwards\(\)"):
            with engine.uneven_forwards():
                engine.backward(engine(batch))
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    assert loss.item() == want
    if rank == 1:
        with pytest.raises(ZeroDivisionError), engine.uneven_forwards():
            engine(batch)
            _ = 1 // 0
    else:
        with engine.uneven_forwards():
            for _ in range(4):
                engine(batch)


def test_ranks_run_unequal_numbers_of_forwards() -> None:
    run_ranks(unequal, 2, 1)
    run_ranks(unequal, 3, 3)


def served(blocks: list[int | None]) -> tuple[int, list[int]]:
    """Rank r calls block `blocks[r]` alone, or nothing: bytes of weights sent, and of a shard of each block."""
    engine = start(tiny("plain"))
    block = blocks[dist.get_rank()]
    with engine.uneven_forwards(), torch.no_grad():
        if block is not None:
            engine.module.blocks[block](torch.ones(1, 24))
    units = {unit.modules[0]: unit for unit in engine._sharded.units}
    shards = [
        sum(flat.shard.nbytes for flat in units[block].params) for block in engine.module.blocks
    ]
    return engine.bytes_sent()["all_gather"], shards


def test_a_shard_is_sent_to_the_ranks_that_ask_for_it() -> None:
    for rank, (sent, shards) in enumerate(run_ranks(served, 3, [None, 0, 2])):
        assert sent == {0: shards[0] + shards[2], 1: shards[2], 2: shards[0]}[rank]


def generated() -> int:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        settings = transformers.LlamaConfig(**sizes, **heads, **tokens)
        models.append(transformers.LlamaForCausalLM(settings))
    engine = start(models[0])
    prompt = torch.tensor([[5, 6, 7]])
    length = 4 + 9 * dist.get_rank()
    mine, plain = (
        one.generate(prompt, max_new_tokens=length, do_sample=False)[0].tolist()
        for one in (engine.eval(), models[1].eval())
    )
    assert mine == plain
    engine.backward(engine.train()(input_ids=prompt, labels=prompt).loss)
    engine.step()
    return len(mine)


def test_generation_stops_at_different_lengths() -> None:
    assert run_ranks(generated, 2) == [7, 16]


class Skips(Net):
    """Some steps leave out a block."""

    left_out = -1

    def outputs(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            if at != self.left_out:
                x = F.relu(block(x))
        return x


def gathers_started_on_some_ranks(offload: bool) -> list[float]:
    more = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = start(build(Skips), 3, {"stage3_max_reuse_distance": 0, **more})
    waits = pytest.MonkeyPatch()
    if offload and dist.get_rank():  # its update on the host is never done in time
        waits.setattr(ParamBucket, "may_start", property(lambda _: False))
    losses = []
    for step in range(5):
        engine.module.left_out = 1 if step % 2 else -1
        loss = engine(torch.ones(2, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    waits.undo()
    engine.destroy()
    return losses


def test_a_unit_that_some_ranks_gather_early_and_none_uses_is_gathered_by_all() -> None:
    wanted = run_ranks(gathers_started_on_some_ranks, 2, False)
    assert run_ranks(gathers_started_on_some_ranks, 2, True) == wanted


# -- gradients that lie in the memory of parameters -----------------------------------------------------------


class HalfSquare(torch.autograd.Function):
    """The gradient of 0.5 * w * w is w itself."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return 0.5 * (w * w).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return w.view_as(w)  # type: ignore[no-any-return]


class SquareBlock(Block):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 1e-3 + HalfSquare.apply(self.weight)


class Squares(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SquareBlock(numel) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(x)[0, 0] for block in self.blocks)  # type: ignore[return-value]


def view_as_gradient(numel: int, precision: str, offload: dict[str, Any]) -> None:
    zero = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0, **offload}
    config = runs.config(3, precision, samples=1, zero=zero)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = xds.initialize(Squares(numel), config)
    for _ in range(3):
        x = torch.ones(1, WIDTH)
        engine.backward(engine(x.bfloat16() if precision == "bf16" else x))
        engine.step()
    for block in engine.module.blocks:
        full = xds.zero.get_full_param(block.weight).float()
        torch.testing.assert_close(full, torch.full((numel,), 0.9**3), rtol=1e-2, atol=0)
    engine.destroy()


def test_a_gradient_that_is_a_view_of_a_parameter_outlives_its_drop() -> None:
    host = {"offload_param": {"device": "cpu"}}
    for world_size, offload in ((2, {}), (1, host), (2, host)):
        for numel in (SMALL_NUMEL - 1, SMALL_NUMEL + 1):
            for precision in ("fp32", "bf16"):
                run_ranks(view_as_gradient, world_size, numel, precision, offload)
